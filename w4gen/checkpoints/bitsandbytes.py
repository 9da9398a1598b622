"""bitsandbytes' 4 bits, with and without double quantization.

Codes lie two in a byte, the first in the high half, in one stream over all rows; blocks run on over the ends of rows. The table
of values is always the stored one. Scales are float32; double quantization makes them 8-bit codes of a stored table, under a
scale for 256 of them, with an offset.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from w4gen.checkpoints.blocks import in_rows, row_group
from w4gen.checkpoints.layer import Layer, Tensors, need, refuse
from w4gen.formats import ABSMAX
from w4gen.ir.types import F32, PER_TENSOR, DType, Format
from w4gen.quantize import Parts

NAME = "bitsandbytes"
STATE = "weight.quant_state.bitsandbytes__"
MARKS = (f".{STATE}nf4", f".{STATE}fp4")


def claims(quantization: Mapping[str, Any]) -> bool:
    """Whether its layers have 4 bits; those of 8 bits are not read."""
    return quantization.get("quant_method") == NAME and not quantization.get("load_in_8bit", False)


def read(tensors: Tensors, quantization: Mapping[str, Any], name: str) -> Layer:
    """The layer called `name`: all that it needs is in its own tensors."""
    state = _facts(tensors, name)
    n, k, block = state["n"], state["k"], state["blocksize"]
    stored = need(tensors, "weight", name).contiguous().view(torch.uint8).reshape(-1)
    if len(stored) != (n * k + 1) // 2:
        refuse(name, "weight", f"holds {2 * len(stored)} codes, [{n}, {k}] needs {n * k}", "the file may be damaged")
    codes = torch.stack([stored >> 4, stored & 15], -1).reshape(-1)[: n * k].reshape(n, k)
    scales, scale = _scales(tensors, state, name)
    table = tuple(need(tensors, "weight.quant_map", name).float().tolist())
    form = Format(state["quant_type"], 4, codebook=table, group=row_group(k, block), scale=scale)
    return Layer(name, NAME, form, {"codes": codes, **scales}, tensors.get("bias"))


def _facts(tensors: Tensors, name: str) -> dict[str, Any]:
    """What the JSON in the tensor `weight.quant_state.bitsandbytes__nf4` says: quant_type, blocksize and so on; n and k."""
    tensor = next((tensor for tensor in tensors if tensor.startswith(STATE)), f"{STATE}nf4")
    try:
        found = json.loads(bytes(need(tensors, tensor, name).tolist()))
        (n, k), block = found["shape"], found["blocksize"]
        if min(n, k, block) < 1:
            raise ValueError(f"[{n}, {k}] in blocks of {block}")
        return {**found, "n": n, "k": k}
    except (ValueError, KeyError, TypeError) as error:
        refuse(name, tensor, f"does not hold the facts of a weight ({error!r})", "the file may be damaged")


def _scales(tensors: Tensors, state: Mapping[str, Any], name: str) -> tuple[Parts, DType | Format]:
    """The scales and what they are made of, one for each group of a row, and their type."""
    n, k, block = state["n"], state["k"], state["blocksize"]
    scale = in_rows(need(tensors, "weight.absmax", name), n, k, block, "weight.absmax", name)
    above = tensors.get("weight.nested_absmax")
    if above is None:
        return {"scale": scale}, F32
    nested = {
        "scale.scale": above.reshape(1, -1),
        "scale.zero": torch.full((1, above.numel()), -float(state["nested_offset"]), device=above.device),
        "scale.codebook": need(tensors, "weight.nested_quant_map", name).float(),
    }
    every = int(state["nested_blocksize"]) * (block // row_group(k, block))
    return {"scale": scale, **nested}, replace(ABSMAX, codebook=PER_TENSOR, group=every)
