"""GPTQ, as AutoGPTQ, GPTQModel and AutoRound write it: both versions of its zeros, with columns in any order.

qweight i32[K·bits/32, N]: a stream along K · qzeros i32[groups, N·bits/32]: a stream along N · scales f16[groups, N] ·
g_idx i32[K]: the group of each input.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from w4gen.checkpoints.layer import Layer, Tensors, bitstream, by_group, expect, integers, need, refuse

NAME = "gptq"
MARKS = (".qweight",)
BITS = range(2, 9)
CAUSE = "bits or group_size of the quantization_config may not be those of this layer"


def claims(quantization: Mapping[str, Any]) -> bool:
    return quantization.get("quant_method") == "gptq"


def settings(quantization: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What is said of one layer: `dynamic` maps patterns to other settings, the first that matches counts."""
    for pattern, changes in (quantization.get("dynamic") or {}).items():
        if re.match(pattern.removeprefix("+:").removeprefix("-:"), name):
            if pattern.startswith("-:"):
                refuse(name, "qweight", f"the pattern {pattern!r} of dynamic leaves this layer out", "yet it is quantized")
            return {**quantization, **changes}
    return dict(quantization)


def read(tensors: Tensors, quantization: Mapping[str, Any], name: str) -> Layer:
    said = settings(quantization, name)
    bits, group = said.get("bits"), said.get("group_size", -1)
    if bits not in BITS:
        refuse(name, "qweight", f"bits={bits}", f"GPTQ's layers have one of {', '.join(map(str, BITS))}")
    version = said.get("checkpoint_format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        refuse(name, "qweight", f"checkpoint_format={version!r} is not read", "save it again as gptq or gptq_v2")
    words, scales = need(tensors, "qweight", name, 2, torch.int32), need(tensors, "scales", name, 2)
    (groups, n), k = scales.shape, words.shape[0] * 32 // bits
    group = k if group == -1 else group
    expect(words, (k * bits // 32, n), "qweight", name, CAUSE)
    expect(scales, (-(-k // group), n), "scales", name, CAUSE)
    zeros, notes = _zeros(need(tensors, "qzeros", name, 2, torch.int32), bits, (groups, n), version, name)
    order, group, picked = None, group, None
    if "g_idx" in tensors:
        index = expect(tensors["g_idx"], (k,), "g_idx", name, "the file may be damaged")
        order, group, picked = by_group(index, group, groups, name, "g_idx")
    elif said.get("desc_act"):
        refuse(name, "g_idx", "missing", "with desc_act it says the group of each input; a shard may be missing")
    scales, zeros = (each if picked is None else each[picked] for each in (scales, zeros))
    codes = bitstream(words, bits, 0, k).T
    codes = codes if order is None else codes[:, order]
    form, parts = integers(codes, bits, group, scales.T, zeros.T)
    return Layer(name, NAME, form, parts, tensors.get("bias"), order, notes)


def _zeros(
    words: torch.Tensor, bits: int, shape: tuple[int, int], version: str, name: str
) -> tuple[torch.Tensor, tuple[str, ...]]:
    """The zeros u8[groups, N], and warnings. The first version stores each less 1, in its own field."""
    groups, n = shape
    expect(words, (groups, -(-n * bits // 32)), "qzeros", name, CAUSE)
    stored = bitstream(words, bits, 1, n)
    if version == "gptq_v2":
        return stored, ()
    wrapped = int((stored == 2**bits - 1).sum())
    note = f"{name}: {wrapped} stored zeros are all ones, which is 0 in the first version of GPTQ: read so, as its writer meant"
    return (stored.int() + 1).remainder(2**bits).to(torch.uint8), (note,) * bool(wrapped)
