"""Codes packed and repacked some rows at a time are what the program's offline part stores of the whole."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
import torch
import weights
from hypothesis import strategies as st

from w4gen.formats import named
from w4gen.ir import layout as layouts
from w4gen.ir.interpret import offline
from w4gen.ir.lower import lower
from w4gen.ir.problem import Problem
from w4gen.ir.types import Format
from w4gen.runtime import repack
from w4gen.schedule.arch import ARCHES, M16K16
from w4gen.schedule.rewrite import pack
from w4gen.schedule.stored import fragment_order, layout_for

FORMATS = [named(label) for label in ("int4_g64", "uint3_g64_z", "int8_g64", "uint5_g64_z", "nf4_g64", "int2_g64", "int1_g64")]


def orders(form: Format, n: int, k: int) -> list[layouts.Layout]:
    """Rows, planes or rows of an arch without fragments, and fragments where codes fill words."""
    made = [layouts.dense(n, k, form.bits), layout_for(form, ARCHES["sm_75"], n, k)]
    return [*made, fragment_order(form, M16K16, n, k)] if 32 % form.bits == 0 else made


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.label)
@pytest.mark.parametrize(("n", "k"), [(70, 131), (16, 256), (1, 1)])
def test_slabs_are_stored_as_the_whole_is(form: Format, n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repack, "NEAR", 1)  # slabs of one block of rows
    codes = torch.randint(0, 2**form.bits, (n, k), dtype=torch.uint8)
    stored = []
    for order in orders(form, n, k):
        program = pack(lower(Problem(m=(1, 1), n=n, k=k, format=form, layout=order)), order)
        whole = offline(program, {"codes": codes}, torch, ["codes.stored"])["codes.stored"].reshape(-1)
        stored.append((order, whole))
        assert torch.equal(repack.packed(codes, order), whole)
        assert torch.equal(torch.cat(list(repack.unpacked(whole, order, n, k, repack.whole(1, order)))), codes)
    for source, held in stored:
        for target, whole in stored:
            assert torch.equal(repack.repacked(held, source, target, n, k), whole)


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    order=weights.layouts((4, 8)).filter(lambda each: each.size("n") <= 64 and each.size("k") <= 2048), data=st.data()
)
def test_rows_may_lie_anywhere(order: layouts.Layout, data: st.DataObject) -> None:
    """Also where a digit of n is not the one that strides furthest: then no rows follow one another."""
    n, k = (data.draw(st.integers(max(1, order.size(axis) // 2), order.size(axis))) for axis in "nk")
    codes = torch.randint(0, 2**order.bits, (n, k), dtype=torch.uint8)
    plain, held = layouts.dense(n, k, order.bits), repack.packed(codes, order)
    full = torch.nn.functional.pad(codes, (0, order.size("k") - k, 0, order.size("n") - n))
    bits = np.unpackbits(held.numpy().view(np.uint8), bitorder="little")
    for row, column in {(n - 1, k - 1), (0, k - 1), (n - 1, 0), (n // 2, k // 2)}:
        at = order.address(n=row, k=column)
        assert np.packbits(bits[at : at + order.bits], bitorder="little")[0] == full[row, column]
    assert torch.equal(repack.repacked(held, order, plain, n, k), repack.packed(codes, plain))
    assert torch.equal(repack.repacked(repack.packed(codes, plain), plain, order, n, k), held)


def test_columns_need_not_be_contiguous() -> None:
    codes = torch.randint(0, 16, (131, 70), dtype=torch.uint8)
    order = layouts.dense(70, 131, 4)
    assert torch.equal(repack.packed(codes.T, order), repack.packed(codes.T.contiguous(), order))
