"""HQQ: integer codes of 1 to 8 bits with zeros of any value.

The weight is cut into rows of one group each (axis 1); those are cut into as many parts as a word has fields, and the first part
lies in the highest field. Groups down the columns (axis 0) are refused: no scale would serve two neighbours of a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from w4gen.checkpoints.blocks import in_rows, needed, row_group
from w4gen.errors import CheckpointError
from w4gen.formats import named
from w4gen.ir import layout as layouts
from w4gen.ir.layout import Digit, Layout
from w4gen.ir.types import Format
from w4gen.quantize import Parts
from w4gen.runtime import dtypes

PACKINGS = {"8bit_u8": (8, 8, 1), "4bit_u8": (8, 4, 2), "3bit_32": (32, 3, 10), "2bit_u8": (8, 2, 4), "1bit_u8": (8, 1, 8)}
"""Bits of a word, bits of a field, fields of a word; 5 and 6 bits take a byte each, 1.58 bits take two."""


def parts(tensors: Mapping[str, torch.Tensor]) -> tuple[Parts, Format]:
    """The parts and the format of a weight, of its tensors by their names: `W_q`, `scale`, `zero`, `shape`, `nbits`, `packing`, …

    Raises `CheckpointError` on groups down the columns and on scales that are codes themselves.
    """
    n, k = (int(size) for size in needed(tensors, "shape"))
    scale, zero = tensors.get("scale"), tensors.get("zero")
    if scale is None or zero is None:
        raise CheckpointError("its scales or zeros are quantized themselves, which HQQ gave up: quantize it anew with hqq >= 0.2")
    if int(needed(tensors, "axis")) == 0 and scale.numel() > 1:
        raise CheckpointError(
            "it has groups down the columns (axis=0), a kernel needs scales for neighbours in a row: quantize it anew with axis=1"
        )
    block = n * k // scale.numel()
    form = replace(
        named(f"uint{math.ceil(needed(tensors, 'nbits').item())}"),
        group=row_group(k, block),
        scale=dtypes.of(scale, "scale"),
        zero=dtypes.of(zero, "zero"),
        zero_mode="float",
    )
    scales = {"scale": in_rows(scale, n, k, block), "zero": in_rows(zero, n, k, block)}
    return {"codes": _codes(tensors, n, k), **scales}, form


def _codes(tensors: Mapping[str, torch.Tensor], n: int, k: int) -> torch.Tensor:
    """The codes u8[N, K]; the rows of parts that were padded are left out."""
    packing = bytes(needed(tensors, "packing").tolist()).decode("ascii", "replace")
    if packing not in PACKINGS:
        raise CheckpointError(f"its packing {packing!r} is none of {', '.join(PACKINGS)}: w4gen reads no other")
    word, bits, fields = PACKINGS[packing]
    stored = needed(tensors, "W_q").contiguous().view(torch.int32 if word == 32 else torch.uint8)
    step, columns = stored.shape
    layout = Layout((Digit("n", step, word * columns), Digit("n", fields, bits), Digit("k", columns, word)), bits, word)
    lowest_first = layouts.unpack(layout, stored.reshape(-1), torch).reshape(fields, step * columns)
    if fields * step * columns < n * k:
        raise CheckpointError(f"W_q holds {fields * step * columns} codes, [{n}, {k}] needs {n * k}: the file is damaged")
    return lowest_first.flip(0).reshape(-1)[: n * k].reshape(n, k)
