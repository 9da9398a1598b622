"""Layouts: one place per bit, and one definition for packing, unpacking and addresses."""

from __future__ import annotations

import itertools

import hypothesis
import numpy as np
import oracle
import pytest
import weights
from hypothesis import given
from hypothesis import strategies as st

from w4gen.errors import FormatError
from w4gen.formats import named
from w4gen.ir.layout import Layout, dense, matrix, pack, planes, rows, unpack
from w4gen.ir.types import Format
from w4gen.schedule.arch import ARCHES, M16K16
from w4gen.schedule.rules import WASTE, fragment_order, layout_for, layouts_for

WORDS = np.dtype("u4")


SOME = [
    *(rows(3, 131, bits, run) for bits in (2, 4, 8) for run in (1, 4, 8, 16)),
    fragment_order(named("int4_g128"), M16K16, 20, 70),
    fragment_order(named("nf4_g64"), M16K16, 1, 1),
    matrix({"n": 3, "g": 5}, 16),
    *(way(2, 40, bits) for bits in (3, 5, 6, 7) for way in (rows, dense, planes)),
    planes(2, 600, 3, 16),
]


def random_codes(layout: Layout) -> np.ndarray:
    shape = [layout.size(axis) for axis in layout.axes]
    return np.random.default_rng(1).integers(0, min(2**layout.width, 2**31), shape).astype("u1" if layout.bits < 16 else "i8")


def addresses(layout: Layout, bit: int = 0) -> dict[tuple[int, ...], int]:
    """Index -> place of a bit, element by element."""
    every = itertools.product(*(range(layout.size(axis)) for axis in layout.axes))
    return {index: layout.address(bit, **dict(zip(layout.axes, index, strict=True))) for index in every}


def check_one_place_each(layout: Layout) -> None:
    """No two elements share a bit, none lies outside; none crosses a word but in units of several words."""
    places = [list(addresses(layout, bit).values()) for bit in range(layout.width)]
    bits = {place for each in places for place in each}
    assert len(bits) == sum(map(len, places))
    assert max(bits) < layout.length * min(layout.unit, 32)
    for plane in layout.planes:
        assert all(place % plane.unit + plane.bits <= plane.unit for place in addresses(plane).values())


def check_packing(layout: Layout) -> None:
    """Each bit of each element is where its address says, and unpacking gives all elements back."""
    codes, word = random_codes(layout), min(layout.unit, 32)
    stored = pack(layout, codes, np)
    assert stored.shape == (layout.length,)
    for bit in range(layout.width):
        for index, place in addresses(layout, bit).items():
            assert (int(stored[place // word]) >> place % word) & 1 == (int(codes[index]) >> bit) & 1
    assert np.array_equal(unpack(layout, stored, np), codes)


@given(weights.wide_layouts())
def test_codes_of_any_width_are_given_back(layout: Layout) -> None:
    codes = random_codes(layout)
    stored = pack(layout, codes, np)
    assert stored.shape == (layout.length,)
    assert stored.dtype == np.int32
    assert np.array_equal(unpack(layout, stored, np), codes)
    assert Layout.parse(str(layout)) == layout


@hypothesis.settings(max_examples=10)
@given(weights.wide_layouts().filter(lambda layout: layout.size("k") <= 256))
def test_codes_of_any_width_lie_where_their_addresses_say(layout: Layout) -> None:
    check_one_place_each(layout)
    check_packing(layout)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("k", [1, 128, 131])
def test_a_dense_row_is_the_stream_of_bits_that_checkpoints_hold(bits: int, k: int, rng: np.random.Generator) -> None:
    codes, layout = rng.integers(0, 2**bits, (3, k)).astype("u1"), dense(3, k, bits)
    padded = np.zeros((3, layout.size("k")), "u1")
    padded[:, :k] = codes
    found, expected = pack(layout, padded, np).view("u4").reshape(3, -1), oracle.stream(codes, bits)
    assert np.array_equal(found[:, : expected.shape[1]], expected)
    assert not found[:, expected.shape[1] :].any()


@pytest.mark.parametrize(("bits", "widths"), [(3, (2, 1)), (5, (4, 1)), (6, (4, 2)), (7, (4, 2, 1))])
@pytest.mark.parametrize("run", [1, 16])
def test_planes_are_rows_of_the_low_and_the_high_bits(
    bits: int, widths: tuple[int, ...], run: int, rng: np.random.Generator
) -> None:
    codes = rng.integers(0, 2**bits, (3, 1024)).astype("u1")
    layout = planes(3, 1024, bits, run)
    below, expected = 0, []
    for width in widths:
        expected.append(oracle.pack_rows((codes >> below) % 2**width, width, run).ravel())
        below += width
    assert np.array_equal(pack(layout, codes, np).view("u4"), np.concatenate(expected))
    assert layout.length * 32 == 3 * 1024 * bits


@given(weights.layouts())
def test_random_layouts_have_one_place_per_element(layout: Layout) -> None:
    check_one_place_each(layout)


@given(weights.layouts())
def test_random_layouts_pack_by_address_and_unpack(layout: Layout) -> None:
    check_packing(layout)


@given(weights.layouts())
def test_a_layout_reads_what_it_writes(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize("layout", SOME, ids=str)
def test_own_layouts_keep_the_same_rules(layout: Layout) -> None:
    check_one_place_each(layout)
    check_packing(layout)
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("run", [1, 4, 8, 16])
@pytest.mark.parametrize("k", [1, 31, 128, 515])
def test_rows_are_packed_as_the_oracle_packs_them(bits: int, run: int, k: int, rng: np.random.Generator) -> None:
    codes = rng.integers(0, 2**bits, (3, k)).astype("u1")
    layout = rows(3, k, bits, run)
    padded = np.zeros((3, layout.size("k")), "u1")
    padded[:, :k] = codes
    expected = oracle.pack_rows(codes, bits, run)
    assert np.array_equal(pack(layout, padded, np).view("u4").reshape(3, -1), expected)
    assert layout.row_units() == expected.shape[1]


@pytest.mark.parametrize("layout", SOME[:12], ids=str)
def test_word_and_code_of_a_row_are_the_inverse_of_the_address(layout: Layout) -> None:
    for word, code in itertools.product(range(layout.row_units() or 0), range(layout.per_unit)):
        place = layout.address(n=2, k=int(layout.index("k", word, code)))
        assert place == (2 * layout.row_units() + word) * layout.unit + layout.bit(code)


def test_a_fragment_word_holds_the_pairs_of_one_lane() -> None:
    """PTX ISA, m16n8k16: lane 4g+t holds rows g, g+8 and columns 2t, 2t+1, 2t+8, 2t+9; pairs lie half a word apart."""
    layout = fragment_order(named("int4_g128"), M16K16, 16, 64)
    for n, k in itertools.product(range(16), range(64)):
        word, bit = divmod(layout.address(n=n, k=k), 32)
        lane, fragment = divmod(word, 4)
        assert (lane, fragment) == (4 * (n % 8) + k % 8 // 2, k // 16)
        assert bit // 16 == k % 2


@pytest.mark.parametrize(
    ("digits", "message"),
    [
        ("k16@2;2/32+k8@1;1/32", "its planes do not hold the same elements"),
        ("k20@2;2/40", "a unit of 40 bits is not whole words"),
        ("n2@0,k8@4,k2@32;4/32", "is not one place per element: digit n2@0 should start at bit 4"),
        ("k8@4,k2@16;4/32", "digit k2@16 should start at bit"),
        ("k8@4,n2@64;4/32", "digit n2@64 should start at bit 32"),
        ("k16@4;4/32", "digit k16@4 crosses the 32-bit unit"),
        ("k8@2;4/32", "digit k8@2 should start at bit 4"),
    ],
)
def test_layouts_with_shared_or_unused_places_are_refused(digits: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        Layout.parse(digits)


@pytest.mark.parametrize("text", ["", "k8@4", "k8@4;4", "8@4;4/32", "k8@-4;4/32", "rows"])
def test_text_that_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match="cannot read the layout"):
        Layout.parse(text)


@given(st.integers(1, 8), st.integers(1, 300), st.integers(1, 30000))
def test_the_stored_layout_has_about_the_fewest_bytes(bits: int, n: int, k: int) -> None:
    form = Format("mine", bits=bits)
    layout = layout_for(form, ARCHES["sm_90"], n, k)
    fewest = min(each.length for each in layouts_for(form, n, k))
    assert layout.length <= (1 + WASTE) * fewest
    assert layout.size("n") == n
    assert layout.size("k") >= k
    # a row is whole quads of words, in every plane
    assert layout.length * 32 <= max(1.05 * n * k * bits, n * (k + 4 * 32) * bits)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("k", [128, 384, 576 * 2, 4096, 5248, 11008])
def test_whole_groups_of_128_are_stored_without_padding(bits: int, k: int) -> None:
    layout = layout_for(Format("mine", bits=bits), ARCHES["sm_90"], 64, k)
    assert 64 * k * bits <= layout.length * 32 <= 1.02 * 64 * k * bits
    assert dense(64, k, bits).length * 32 == 64 * k * bits
