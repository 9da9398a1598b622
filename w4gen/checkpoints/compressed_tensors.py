"""compressed-tensors: integers of 1 to 8 bits (pack-quantized), nvfp4 and mxfp4.

weight_packed i32[N, words] is a stream along K of q + 2**(bits-1), weight_zero_point i32[words, groups] one along N; files from
before the stream was dense have 32 // bits codes in each word. weight_packed u8[N, K/2] holds e2m1 codes, the low half first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from w4gen.checkpoints.layer import Layer, Tensors, bitstream, by_group, expect, integers, need, nibbles, refuse
from w4gen.formats import named

NAME = "compressed-tensors"
MARKS = (".weight_packed",)
CAUSE = "the scheme in config_groups may not be that of this layer"


def claims(quantization: Mapping[str, Any]) -> bool:
    return quantization.get("quant_method") == "compressed-tensors"


def scheme(quantization: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """What is said of the weights of one layer: by its name, by a pattern, or as of any linear layer, in this order."""
    groups = list((quantization.get("config_groups") or {}).values())
    for matches in (name.__eq__, lambda each: each[:3] == "re:" and re.match(each[3:], name), "Linear".__eq__):
        for group in groups:
            if any(matches(target) for target in group.get("targets") or ()):
                return {"format": group.get("format") or quantization.get("format"), **(group.get("weights") or {})}
    return refuse(name, "weight_packed", "no target of config_groups matches this layer", "config.json may be of another model")


def read(tensors: Tensors, quantization: Mapping[str, Any], name: str) -> Layer:
    said = scheme(quantization, name)
    if told := _rotated(quantization):
        refuse(name, "weight_packed", f"transform_config rotates activations ({told}), which is not done", "quantize it without")
    kind = {"pack-quantized": _integers, "nvfp4-pack-quantized": _nvfp4, "mxfp4-pack-quantized": _mxfp4}.get(said["format"])
    if kind is None:
        refuse(name, "weight_packed", f"format {said['format']!r} is not read", "pack-quantized, nvfp4 and mxfp4 are")
    return kind(tensors, said, name)


def _rotated(quantization: Mapping[str, Any]) -> str:
    """Where activations are transformed as the model runs, by `transform_config`; what is done to weights is in them already."""
    groups = ((quantization.get("transform_config") or {}).get("config_groups") or {}).values()
    places = {str(each.get("location")) for group in groups for each in group.get("apply") or ()}
    return ", ".join(sorted(places - {"weight_input", "weight_output"}))


def _integers(tensors: Tensors, said: Mapping[str, Any], name: str) -> Layer:
    bits, way = said.get("num_bits"), said.get("strategy")
    if bits not in range(1, 9) or said.get("type") != "int" or way not in ("group", "channel", "tensor"):
        refuse(name, "weight_packed", f"num_bits={bits}, type={said.get('type')}, strategy={way}", "1 to 8 bits, int, are read")
    words, scales = need(tensors, "weight_packed", name, 2, torch.int32), need(tensors, "weight_scale", name)
    n, k = _shape(tensors, said, name)
    group = said["group_size"] if way == "group" else k
    groups = -(-k // group)
    dense = _dense(words, (n, k), bits, name)
    scales = scales.reshape(1, 1).expand(n, 1) if way == "tensor" and scales.numel() == 1 else scales
    expect(scales, (n, groups), "weight_scale", name, CAUSE)
    zeros = None
    if not said.get("symmetric", True):
        packed = need(tensors, "weight_zero_point", name, 2, torch.int32)
        expect(packed, (_width(n, bits, dense), groups), "weight_zero_point", name, CAUSE)
        zeros = _fields(packed, bits, 0, n, dense)
    codes, order = _fields(words, bits, 1, k, dense), None
    index = tensors.get("weight_g_idx")
    if index is not None and int(index.min()) >= 0:  # -1 stands for none
        order, group, picked = by_group(expect(index, (k,), "weight_g_idx", name, CAUSE), group, groups, name, "weight_g_idx")
        codes = codes if order is None else codes[:, order]
        scales, zeros = (each if each is None or picked is None else each[:, picked] for each in (scales, zeros))
    form, parts = integers(codes, bits, group, scales, zeros)
    return Layer(name, NAME, form, parts, tensors.get("bias"), order)


def _shape(tensors: Tensors, said: Mapping[str, Any], name: str) -> tuple[int, int]:
    shape = need(tensors, "weight_shape", name).tolist()
    if len(shape) != 2 or min(shape) < 1:
        refuse(name, "weight_shape", f"is {shape}, [N, K] is needed", "the file may be damaged, or a slice of a larger one")
    return shape[0], shape[1]


def _width(count: int, bits: int, dense: bool) -> int:
    """Words of `count` codes."""
    return -(-count * bits // 32) if dense else -(-count // (32 // bits))


def _dense(words: torch.Tensor, shape: tuple[int, int], bits: int, name: str) -> bool:
    """Whether codes lie in a dense stream. Older files begin a new word where a code does not fit: its width says so."""
    n, k = shape
    now, before = _width(k, bits, True), _width(k, bits, False)
    if words.shape[1] == before != now:
        return False
    if now == before and 32 % bits and k > 32 // bits:
        refuse(name, "weight_packed", f"K={k} of {bits} bits takes {now} words in the old and the new packing", "save it again")
    expect(words, (n, now), "weight_packed", name, CAUSE)
    return True


def _fields(words: torch.Tensor, bits: int, axis: int, count: int, dense: bool) -> torch.Tensor:
    if dense:
        return bitstream(words, bits, axis, count)
    each = torch.stack([(words >> bits * place) & (2**bits - 1) for place in range(32 // bits)], -1).to(torch.uint8)
    return each.movedim(axis, -2).flatten(-2)[:, :count].movedim(-1, axis)


def _nvfp4(tensors: Tensors, said: Mapping[str, Any], name: str) -> Layer:
    by = need(tensors, "weight_global_scale", name)
    if by.numel() != 1 or not float(by) > 0:
        refuse(
            name,
            "weight_global_scale",
            f"is {by.flatten().tolist()[:4]}",
            "one positive number is needed: scales are divided by it",
        )
    return nvfp4(tensors, "weight_packed", 1 / by.float(), NAME, name)


def nvfp4(tensors: Tensors, packed: str, overall: torch.Tensor, dialect: str, name: str) -> Layer:
    """A layer of nvfp4, all of whose scales are multiplied by `overall`."""
    codes, scales = nibbles(need(tensors, packed, name, 2, torch.uint8)), need(tensors, "weight_scale", name, 2)
    expect(scales, (codes.shape[0], -(-codes.shape[1] // 16)), "weight_scale", name, "groups are of 16, and scales not swizzled")
    if scales.dtype not in (torch.float8_e4m3fn, torch.uint8):
        refuse(name, "weight_scale", f"is {scales.dtype}, e4m3 is needed", "the dialect may be another")
    parts = {"codes": codes, "scale": scales, "scale.scale": overall.float().reshape(1, 1)}
    return Layer(name, dialect, named("nvfp4"), parts, tensors.get("bias"))


def _mxfp4(tensors: Tensors, said: Mapping[str, Any], name: str) -> Layer:
    codes, scales = nibbles(need(tensors, "weight_packed", name, 2, torch.uint8)), need(tensors, "weight_scale", name, 2)
    expect(scales, (codes.shape[0], -(-codes.shape[1] // 32)), "weight_scale", name, "groups are of 32")
    return Layer(name, NAME, named("mxfp4"), {"codes": codes, "scale": scales}, tensors.get("bias"))
