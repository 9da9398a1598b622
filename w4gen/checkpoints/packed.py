"""Weights as an arch's kernels read them, to be mapped into memory: a dialect of its own, made from another by `derive`.

`codes`, `scale` and so on are the buffers of `Linear`. The quantization_config names the arch, and of each layer the format, the
layout and the size [N, K].
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from w4gen.checkpoints import folder
from w4gen.checkpoints.layer import Layer, Tensors, expect, need, refuse
from w4gen.errors import CheckpointError, FormatError
from w4gen.ir.layout import Layout
from w4gen.ir.types import Format
from w4gen.runtime.linear import attribute
from w4gen.runtime.weight import Weight, stored_shapes

logger = logging.getLogger("w4gen")

NAME = "w4gen-packed"
MARKS = (".codes",)
CAUSE = "config.json may be of another folder: `w4gen pack` makes it anew"


@dataclass(frozen=True, slots=True, eq=False)
class Packed(Layer):
    """A layer whose weight is packed already; `parts` is empty."""

    held: Weight | None = None

    @property
    def weight(self) -> Weight:
        if self.held is None:
            refuse(self.name, "codes", "no weight is held", CAUSE)
        return self.held

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.n, self.weight.k


def claims(quantization: Mapping[str, Any]) -> bool:
    return quantization.get("quant_method") == NAME


def write(weight: Weight, order: torch.Tensor | None, bias: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The tensors of a layer."""
    held = {attribute(name): buffer for name, buffer in zip(weight.names, weight.buffers, strict=True)}
    return held | {name: each for name, each in (("order", order), ("bias", bias)) if each is not None}


def stated(weight: Weight) -> dict[str, Any]:
    """What the quantization_config says of a layer."""
    return {"format": str(weight.format), "layout": str(weight.layout), "size": [weight.n, weight.k]}


def read(tensors: Tensors, quantization: Mapping[str, Any], name: str) -> Layer:
    said = (quantization.get("layers") or {}).get(name)
    if said is None:
        refuse(name, "codes", "config.json states no layout for it", CAUSE)
    try:
        form, layout, (n, k) = Format.parse(said["format"]), Layout.parse(said["layout"]), said["size"]
    except FormatError as error:
        refuse(name, "codes", str(error), CAUSE)
    buffers = []
    for part, (kind, shape) in stored_shapes(form, layout, n, k).items():
        found = expect(need(tensors, attribute(part), name), shape, attribute(part), name, CAUSE)
        if found.dtype != kind:
            refuse(name, attribute(part), f"is {found.dtype}, {kind} is needed", CAUSE)
        buffers.append(found)
    weight = Weight(form, n, k, layout, tuple(buffers))
    return Packed(name, NAME, form, {}, tensors.get("bias"), tensors.get("order"), held=weight)


def beside(source: Path, arch: str) -> Path:
    """Where what is made of a checkpoint for an arch lies."""
    return source / f"w4gen-{arch}" if source.is_dir() else source.with_name(f"{source.name}.w4gen-{arch}")


def facts(source: Path) -> dict[str, list[int]]:
    """The files that a checkpoint is, by size and time: what is made of it is of these and no others."""
    files = [*source.glob("*.safetensors"), source / "config.json"] if source.is_dir() else [source]
    stats = {each.name: each.stat() for each in sorted(files)}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def fresh(source: Path, arch: str) -> Path | None:
    """What was made of a checkpoint for an arch, where it is there, whole, and made of the files that are there now."""
    made = beside(source, arch)
    if not (made / "config.json").exists():
        return None
    try:
        same = folder.read(made).quantization.get("source") == facts(source)
    except CheckpointError as error:
        logger.warning("%s is not used: %s", made, error)
        return None
    if not same:
        logger.warning("%s is not used: it was made of other files than are there now: `w4gen pack` makes it anew", made)
    return made if same else None
