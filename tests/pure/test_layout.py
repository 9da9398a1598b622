"""Layouts: one place per bit, and one definition for packing, unpacking and addresses."""

from __future__ import annotations

import itertools

import numpy as np
import oracle
import pytest
import weights
from hypothesis import given
from hypothesis import strategies as st

from w4gen.errors import FormatError
from w4gen.formats import named
from w4gen.ir.layout import Layout, matrix, pack, rows, unpack
from w4gen.schedule.arch import ARCHES, M16K16
from w4gen.schedule.rules import WASTE, fragment_order, layout_for

WORDS = np.dtype("u4")


SOME = [
    *(rows(3, 131, bits, run) for bits in (2, 4, 8) for run in (1, 4, 8, 16)),
    fragment_order(named("int4_g128"), M16K16, 20, 70),
    fragment_order(named("nf4_g64"), M16K16, 1, 1),
    matrix({"n": 3, "g": 5}, 16),
]


def random_codes(layout: Layout) -> np.ndarray:
    shape = [layout.size(axis) for axis in layout.axes]
    return np.random.default_rng(1).integers(0, min(2**layout.bits, 2**31), shape).astype("u1" if layout.bits < 16 else "i8")


def addresses(layout: Layout) -> dict[tuple[int, ...], int]:
    """Index -> bit, element by element."""
    every = itertools.product(*(range(layout.size(axis)) for axis in layout.axes))
    return {index: layout.address(**dict(zip(layout.axes, index, strict=True))) for index in every}


def check_one_place_each(layout: Layout) -> None:
    """No two elements share a bit, none crosses a unit, none lies outside."""
    places = list(addresses(layout).values())
    bits = {place + bit for place in places for bit in range(layout.bits)}
    assert len(bits) == len(places) * layout.bits
    assert all(place % layout.unit + layout.bits <= layout.unit for place in places)
    assert max(bits) < layout.units * layout.unit


def check_packing(layout: Layout) -> None:
    """Each element lies in the units at its address, and unpacking gives all of them back."""
    codes = random_codes(layout)
    units = pack(layout, codes, np)
    assert units.shape == (layout.units,)
    for index, place in addresses(layout).items():
        unit = int(units[place // layout.unit])
        assert (unit >> place % layout.unit) & (2**layout.bits - 1) == codes[index]
    assert np.array_equal(unpack(layout, units, np), codes)


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


@given(st.sampled_from(["int4_g128", "nf4_g64"]), st.integers(1, 300), st.integers(1, 30000))
def test_the_stored_layout_wastes_little_or_has_the_smallest_granule(name: str, n: int, k: int) -> None:
    """Design section 5: where padding would waste more than 5 % of the bytes, the plain rows are used."""
    layout = layout_for(named(name), ARCHES["sm_90"], n, k)
    padding = layout.size("k") - k
    assert 0 <= padding <= WASTE * k or layout == rows(n, k, 4)
    assert padding < 4 * 8 or padding <= WASTE * k
    assert layout.size("n") == n
