"""AutoRound's own export: the tensors are GPTQ's or AWQ's, as `packing_format` says, under settings of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from w4gen.checkpoints import awq, gptq
from w4gen.checkpoints.layer import Dialect, Layer, Tensors, refuse

NAME = "auto-round"
MARKS = (".qweight",)
PACKINGS: dict[str, tuple[Dialect, dict[str, str]]] = {
    "auto_round:auto_gptq": (gptq, {"checkpoint_format": "gptq"}),
    "auto_round": (gptq, {"checkpoint_format": "gptq_v2"}),
    "auto_round:gptqmodel": (gptq, {"checkpoint_format": "gptq_v2"}),
    "auto_round:auto_awq": (awq, {"version": "gemm"}),
}
"""Whose tensors a packing has, and what those would say of themselves."""


def claims(quantization: Mapping[str, Any]) -> bool:
    return quantization.get("quant_method") in (NAME, "intel/auto-round")


def settings(quantization: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What is said of one layer: `extra_config` has other settings by name, then by pattern, of which the first counts."""
    others = quantization.get("extra_config") or {}
    pattern = name if name in others else next((each for each in others if re.search(each, name)), None)
    return {**quantization, **(others[pattern] if pattern else {})}


def read(tensors: Tensors, quantization: Mapping[str, Any], name: str) -> Layer:
    said = settings(quantization, name)
    packing, kind, x_bits = said.get("packing_format"), said.get("data_type", "int"), said.get("act_bits") or 16
    if packing not in PACKINGS or kind != "int" or x_bits < 16:
        problem = f"packing_format={packing!r}, data_type={kind!r}, act_bits={x_bits} is not read"
        refuse(name, "qweight", problem, f"integers packed as {', '.join(PACKINGS)} are, with x of 16 bits")
    if said.get("rotation_config"):
        refuse(name, "qweight", "rotation_config rotates x, which is not done", "quantize it without")
    dialect, about = PACKINGS[packing]
    return replace(
        dialect.read(tensors, {"bits": said.get("bits"), "group_size": said.get("group_size"), **about}, name), dialect=NAME
    )
