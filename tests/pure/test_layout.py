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
from w4gen.ir.groups import beside, together
from w4gen.ir.layout import Layout, dense, matrix, pack, planes, rows, unpack
from w4gen.ir.types import Format
from w4gen.schedule.arch import ARCHES, M16K16
from w4gen.schedule.stored import WASTE, fragment_order, layout_for, layouts_for

WORDS = np.dtype("u4")


SOME = [
    *(rows(3, 131, bits, run) for bits in (2, 4, 8) for run in (1, 4, 8, 16)),
    fragment_order(named("int4_g128"), M16K16, 20, 70),
    fragment_order(named("nf4_g64"), M16K16, 1, 1),
    fragment_order(named("int8_g64"), M16K16, 17, 65),
    fragment_order(Format("uint2", bits=2), M16K16, 33, 130),
    fragment_order(Format("quarters", bits=2, codebook=(-1.0, -0.25, 0.25, 1.0)), M16K16, 16, 128),
    fragment_order(Format("evens", bits=1, step=2.0, origin=-2.0), M16K16, 16, 300),
    beside(fragment_order(named("int4_g128"), M16K16, 40, 384), 3, 16),
    beside(fragment_order(named("int8_g128"), M16K16, 16, 128), 1, 32),
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


FRAGMENTS = {
    "int4": (named("int4_g128"), False),
    "int8": (named("int8_g128"), False),
    "uint2": (Format("uint2", bits=2), False),
    "evens": (Format("evens", bits=1, step=2.0, origin=-2.0), False),
    "nf4": (named("nf4_g64"), True),
    "quarters": (Format("quarters", bits=2, codebook=(-1.0, -0.25, 0.25, 1.0)), True),
    "signs": (Format("signs", bits=1, codebook=(-1.0, 1.0)), True),
}


def operand_of(lane: int, register: int, half: int) -> tuple[int, int]:
    """Row and column of the 16 x 16 operand A that a half of a lane's register holds.

    PTX ISA, matrix fragments for mma.m16n8k16 with .f16 and .bf16: groupID = lane >> 2, threadID_in_group = lane % 4; a0 … a7 are
    the halves of four registers; row = groupID for a0, a1, a4, a5, else groupID + 8; col = threadID_in_group * 2 + (i & 1), and 8
    more from a4 on.
    """
    i = 2 * register + half
    row = lane >> 2 if i in (0, 1, 4, 5) else (lane >> 2) + 8
    return row, lane % 4 * 2 + (i & 1) + (8 if i >= 4 else 0)


@pytest.mark.parametrize("name", FRAGMENTS)
def test_a_quad_of_words_holds_the_operands_of_one_lane(name: str) -> None:
    """One after the other along k, each in the order of its registers; pairs half a word apart, or neighbours for a look-up."""
    form, neighbours = FRAGMENTS[name]
    per_word, bits = 32 // form.bits, form.bits
    deep = 4 * per_word // 8 * 16  # a lane has 8 codes of each fragment
    layout = fragment_order(form, M16K16, 32, 2 * deep)
    for n0, k0, lane in itertools.product((0, 16), (0, deep), range(32)):
        quad = (n0 // 16 * 2 + k0 // deep) * 128 + 4 * lane
        for place in range(4 * per_word // 2):  # of a pair of codes in the quad
            word, inside = divmod(place, per_word // 2)
            fragment, register = divmod(place, 4)
            for half in range(2):
                row, column = operand_of(lane, register, half)
                found = layout.address(n=n0 + row, k=k0 + 16 * fragment + column)
                at = (2 * inside + half) * bits if neighbours else inside * bits + 16 * half
                assert found == (quad + word) * 32 + at, (lane, fragment, register, half)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("n", [16, 48])
def test_the_scales_of_a_lane_are_one_load(n: int, groups: int) -> None:
    """Lane 4g + t works on rows g and g + 8: their scales are neighbours, then come the other lanes, then the next group."""
    order = beside(fragment_order(named("int4_g128"), M16K16, n, 128 * groups), groups, 16)
    for row, group in itertools.product(range(n), range(groups)):
        block, inside = divmod(row, 16)
        assert order.address(n=row, g=group) == 16 * ((block * groups + group) * 16 + inside % 8 * 2 + inside // 8)


@pytest.mark.parametrize(
    ("group", "groups", "bits", "held"),
    [
        (16, 512, 8, 8),
        (32, 256, 8, 4),
        (32, 256, 16, 4),
        (16, 512, 16, 4),
        (32, 6, 8, 2),
        (32, 7, 8, 1),
        (64, 64, 16, 1),
        (48, 8, 8, 1),
    ],
)
def test_how_many_groups_lie_together(group: int, groups: int, bits: int, held: int) -> None:
    """Those of 128 k, in 16 bytes for two rows; whole pieces of a row; groups of 64 k and more are steps of their own."""
    assert together(group, groups, bits) == held
    order = beside(fragment_order(named("int4_g32"), M16K16, 32, group * groups), groups, bits, held)
    lane = [order.address(n=row, g=each) for each in range(held) for row in (3, 11)]
    assert lane == list(range(lane[0], lane[0] + 2 * held * bits, bits)), "what a lane loads of row 3 and 11"


@given(
    st.sampled_from(sorted(FRAGMENTS)), st.integers(1, 60), st.integers(1, 600), st.integers(1, 6), st.sampled_from([1, 2, 4, 8])
)
def test_scales_beside_codes_pack_and_unpack(name: str, n: int, k: int, pieces: int, held: int) -> None:
    groups = pieces * held
    order = beside(fragment_order(FRAGMENTS[name][0], M16K16, n, k), groups, 16, held)
    check_one_place_each(order)
    check_packing(order)
    assert order.units == order.size("n") * groups


def test_padding_counts_both_axes() -> None:
    assert fragment_order(named("int4_g128"), M16K16, 47, 1000).padding(n=47, k=1000) == pytest.approx(48 * 1024 / 47000 - 1)
    assert rows(5, 128, 4, 16).padding(n=5, k=128) == 0


def test_scales_beside_rows_are_row_major() -> None:
    assert beside(rows(5, 300, 4, 16), 3, 16) == matrix({"n": 5, "g": 3}, 16)


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
    layout = layout_for(form, ARCHES["portable"], n, k)
    fewest = min(each.length for each in layouts_for(form, n, k))
    assert layout.length <= (1 + WASTE) * fewest
    assert layout.size("n") == n
    assert layout.size("k") >= k
    # a row is whole quads of words, in every plane
    assert layout.length * 32 <= max(1.05 * n * k * bits, n * (k + 4 * 32) * bits)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("k", [128, 384, 576 * 2, 4096, 5248, 11008])
def test_whole_groups_of_128_are_stored_without_padding(bits: int, k: int) -> None:
    layout = layout_for(Format("mine", bits=bits), ARCHES["portable"], 64, k)
    assert 64 * k * bits <= layout.length * 32 <= 1.02 * 64 * k * bits
    assert dense(64, k, bits).length * 32 == 64 * k * bits


@pytest.mark.parametrize(
    ("n", "k", "blocks"),
    [
        (256, 1536, True),
        (16, 64, True),
        (16, 61, True),
        (16, 60, False),
        (15, 1024, False),
        (321, 1024, True),
        (289, 1024, False),
    ],
)
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_blocks_waste_at_most_five_per_cent(arch: str, n: int, k: int, blocks: bool) -> None:
    """3 of 61 is 4.9 %, 4 of 60 is 6.7 %; 1 row of 15 is 6.7 %, 15 of 305 are 4.9 %, 15 of 289 are 5.2 %."""
    layout = layout_for(named("int4_g128"), ARCHES[arch], n, k)
    assert (layout.row_units() is None) == blocks


@pytest.mark.parametrize("arch", ["portable", "sm_75", "gfx942", "gfx1100"])
def test_archs_without_a_fragment_store_rows(arch: str) -> None:
    assert layout_for(named("int4_g128"), ARCHES[arch], 256, 1536) == rows(256, 1536, 4, 16)


@pytest.mark.parametrize("name", FRAGMENTS)
def test_packed_bytes_of_fragments(name: str, rng: np.random.Generator) -> None:
    """Every word, put together by a loop over lanes and registers."""
    form, neighbours = FRAGMENTS[name]
    bits, per_word = form.bits, 32 // form.bits
    deep = 4 * per_word // 8 * 16
    codes = rng.integers(0, 2**bits, (32, 2 * deep)).astype("u1")
    words = []
    for n0, k0, lane, word in itertools.product((0, 16), (0, deep), range(32), range(4)):
        value = 0
        for inside, half in itertools.product(range(per_word // 2), range(2)):
            fragment, register = divmod(word * per_word // 2 + inside, 4)
            row, column = operand_of(lane, register, half)
            code = int(codes[n0 + row, k0 + 16 * fragment + column])
            value |= code << ((2 * inside + half) * bits if neighbours else inside * bits + 16 * half)
        words.append(value)
    assert np.array_equal(pack(fragment_order(form, M16K16, 32, 2 * deep), codes, np).view("u4"), np.array(words, "u4"))
