"""HQQ: integer codes of 1 to 8 bits with zeros of any value.

The weight is cut into rows of one group each (axis 1); those are cut into as many parts as a word has fields, and the first part
lies in the highest field. Groups down the columns (axis 0) are refused: their members lie N·K / group elements apart, and a
`Format` counts groups along k. It could say that only as groups of 1, a scale for each weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from w4gen.checkpoints.blocks import in_rows, row_group
from w4gen.checkpoints.layer import Layer, Tensors, need, refuse
from w4gen.formats import named
from w4gen.ir import layout as layouts
from w4gen.ir.layout import Digit, Layout
from w4gen.runtime import dtypes

NAME = "hqq"
MARKS = (".W_q",)
PACKINGS = {"8bit_u8": (8, 8, 1), "4bit_u8": (8, 4, 2), "3bit_32": (32, 3, 10), "2bit_u8": (8, 2, 4), "1bit_u8": (8, 1, 8)}
"""Bits of a word, bits of a field, fields of a word; 5 and 6 bits take a byte each, 1.58 bits take two."""


def claims(quantization: Mapping[str, Any]) -> bool:
    return quantization.get("quant_method") == NAME


def read(tensors: Tensors, quantization: Mapping[str, Any], name: str) -> Layer:
    """The layer called `name`: `shape`, `nbits`, `axis` and `packing` are tensors of its own, beside `W_q`, `scale`, `zero`."""
    n, k = (int(size) for size in need(tensors, "shape", name))
    if "scale" not in tensors or "zero" not in tensors:
        refuse(name, "scale", "scales or zeros are quantized themselves, which HQQ gave up", "quantize it anew with hqq >= 0.2")
    scale, zero = tensors["scale"], tensors["zero"]
    if int(need(tensors, "axis", name)) == 0 and scale.numel() > 1:
        width = 8 * (scale.element_size() + zero.element_size())
        problem = f"groups run down the columns (axis=0), neighbours in a row share no scale: {width} bits beside each code"
        refuse(name, "scale", problem, "quantize it anew with axis=1, or give w4gen.convert a Linear of what hqq dequantizes")
    block = n * k // max(1, scale.numel())
    form = replace(
        named(f"uint{math.ceil(need(tensors, 'nbits', name).item())}"),
        group=row_group(k, block),
        scale=dtypes.of(scale, "scale"),
        zero=dtypes.of(zero, "zero"),
        zero_mode="float",
    )
    scales = {role: in_rows(each, n, k, block, role, name) for role, each in (("scale", scale), ("zero", zero))}
    return Layer(name, NAME, form, {"codes": _codes(tensors, n, k, name), **scales}, tensors.get("bias"))


def _codes(tensors: Tensors, n: int, k: int, name: str) -> torch.Tensor:
    """The codes u8[N, K]; the rows of parts that were padded are left out."""
    packing = bytes(need(tensors, "packing", name).tolist()).decode("ascii", "replace")
    if packing not in PACKINGS:
        refuse(name, "packing", f"is {packing!r}", f"w4gen reads {', '.join(PACKINGS)}")
    word, bits, fields = PACKINGS[packing]
    stored = need(tensors, "W_q", name, 2).contiguous().view(torch.int32 if word == 32 else torch.uint8)  # maybe kept as floats
    step, columns = stored.shape
    if fields * step * columns < n * k:
        refuse(name, "W_q", f"holds {fields * step * columns} codes, [{n}, {k}] needs {n * k}", "the file may be damaged")
    layout = Layout((Digit("n", step, word * columns), Digit("n", fields, bits), Digit("k", columns, word)), bits, word)
    lowest_first = layouts.unpack(layout, stored.reshape(-1), torch).reshape(fields, step * columns)
    return lowest_first.flip(0).reshape(-1)[: n * k].reshape(n, k)
