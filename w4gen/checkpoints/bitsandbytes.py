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

from w4gen.checkpoints.blocks import in_rows, needed, row_group
from w4gen.errors import CheckpointError
from w4gen.formats import ABSMAX
from w4gen.ir.types import F32, PER_TENSOR, Format
from w4gen.quantize import Parts

STATE = "weight.quant_state.bitsandbytes__"
"""How the name of the tensor with the facts begins."""


def facts(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """What the JSON in the tensor `weight.quant_state.bitsandbytes__nf4` says: quant_type, blocksize, shape and so on."""
    name = next((name for name in tensors if name.startswith(STATE)), f"{STATE}nf4")
    try:
        found = json.loads(bytes(needed(tensors, name).tolist()))
        (n, k), block = found["shape"], found["blocksize"]
        if min(n, k, block) < 1:
            raise ValueError(f"[{n}, {k}] in blocks of {block}")
        return {**found, "n": n, "k": k}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{name} does not hold the facts of a weight ({error!r}): the file is damaged") from error


def parts(tensors: Mapping[str, torch.Tensor]) -> tuple[Parts, Format]:
    """The parts and the format of a weight, of its tensors by their names: `weight`, `weight.absmax` and so on."""
    state = facts(tensors)
    n, k, block = state["n"], state["k"], state["blocksize"]
    stored = needed(tensors, "weight").contiguous().view(torch.uint8).reshape(-1)
    if len(stored) < (n * k + 1) // 2:
        raise CheckpointError(f"weight holds {2 * len(stored)} codes, [{n}, {k}] needs {n * k}: the file is damaged")
    codes = torch.stack([stored >> 4, stored & 15], -1).reshape(-1)[: n * k].reshape(n, k)
    scales, scale = _scales(tensors, state)
    table = tuple(needed(tensors, "weight.quant_map").float().tolist())
    form = Format(state["quant_type"], 4, codebook=table, group=row_group(k, block), scale=scale)
    return {"codes": codes, **scales}, form


def _scales(tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> tuple[Parts, Format | Any]:
    """The scales and what they are made of, one for each group of a row, and their type."""
    n, k, block = state["n"], state["k"], state["blocksize"]
    scale = in_rows(needed(tensors, "weight.absmax"), n, k, block)
    above = tensors.get("weight.nested_absmax")
    if above is None:
        return {"scale": scale}, F32
    nested = {
        "scale.scale": above.reshape(1, -1),
        "scale.zero": torch.full((1, above.numel()), -float(state["nested_offset"])),
        "scale.codebook": needed(tensors, "weight.nested_quant_map").float(),
    }
    every = int(state["nested_blocksize"]) * (block // row_group(k, block))
    return {"scale": scale, **nested}, replace(ABSMAX, codebook=PER_TENSOR, group=every)
