"""The linear layers of a model that others loaded: those that hold codes become w4gen's, in place, one at a time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from w4gen.checkpoints import dialects, rows
from w4gen.checkpoints.layer import Dialect
from w4gen.errors import W4Error
from w4gen.models import HOOKED, Skipped, hooked, of_transformers, reasons
from w4gen.progress import tracked
from w4gen.runtime.linear import Linear

KEPT = {
    "gptq": ("TorchLinear", "TritonV2Linear", "TorchQuantLinear", "TritonV2QuantLinear"),
    "auto-round": (),
    "awq": ("AwqTorchLinear", "AwqGEMMLinear", "AwqGEMVLinear", "AwqGEMMTritonLinear", "WQLinear_GEMM", "WQLinear_GEMV"),
}
"""Modules that keep the tensors of the file. Others reorder them in place, for kernels of their own, which no shape shows."""


@dataclass(frozen=True, slots=True)
class Accelerated:
    """What `accelerate` did: layers that run from codes now (name, dialect, format), layers that were left and why, warnings."""

    replaced: tuple[tuple[str, str, str], ...]
    left: tuple[Skipped, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = Counter(each[1:] for each in self.replaced)
        lines = [f"{count} layers of {dialect} run from codes ({form})" for (dialect, form), count in counts.items()]
        return "\n".join([*(lines or ["no layer was replaced"]), *reasons("left", self.left), *self.notes])


def accelerate(model: torch.nn.Module, quantization: Mapping[str, Any] | None = None, progress: bool = True) -> Accelerated:
    """Replace the quantized linear layers of a loaded model by `w4gen.Linear` over their codes, in place; say what was done.

    A layer is read from its state dict, in the dialect that `quantization` names: by default the quantization_config of
    `model.config`. Layers are replaced one at a time, so one layer's memory is needed besides the model's. Left, with the reason:
    layers that are not quantized, that have hooks, that contradict themselves, or whose codes were reordered when they were
    loaded. A model of Transformers whose quantized layers were all replaced is of the quantization method `w4gen` from then on:
    `save_pretrained` writes files of w4gen's own.
    """
    said = dict(stated(model) if quantization is None else quantization)
    dialect = next((each for each in dialects.DIALECTS if each.claims(said)), None)
    replaced, left, notes, foreign = [], [], list[str](), 0
    names = [name for name, module in model.named_modules() if name and (isinstance(module, torch.nn.Linear) or _codes(module))]
    for name in tracked(names, len(names), "replacing", progress):
        plain, done = _plain(model.get_submodule(name)), _replaced(model, name, dialect, said)
        if isinstance(done, str):
            left.append(Skipped(name, done))
            foreign += not plain
        else:
            replaced.append((name, dialect.NAME, done[0]))  # type: ignore[union-attr]
            notes += done[1]
    rows.push(model)
    if not foreign and hasattr(model, "ct_decompress_hook"):  # with no layer of compressed-tensors left, nothing to do at a call
        model.ct_decompress_hook.remove()  # type: ignore[operator, union-attr]
    if replaced and not foreign and of_transformers(model):
        from w4gen.checkpoints import quantizer

        quantizer.keep(model)
    return Accelerated(tuple(replaced), tuple(left), tuple(notes))


def stated(model: torch.nn.Module) -> Mapping[str, Any]:
    """The quantization_config of a model of Transformers, as its config.json has it; empty without."""
    said = getattr(getattr(model, "config", None), "quantization_config", None) or {}
    if not isinstance(said, Mapping):
        said = said.to_dict()
    found: dict[str, Any] = json.loads(json.dumps(said, default=str))
    return found


def _plain(module: torch.nn.Module) -> bool:
    return type(module) is torch.nn.Linear


def _codes(module: torch.nn.Module) -> bool:
    """Whether a module holds whole numbers of its own, other than an embedding's or a w4gen layer's."""
    held = (*module._parameters.values(), *module._buffers.values(), getattr(module, "W_q", None))
    two = (each for each in held if isinstance(each, torch.Tensor) and each.dim() > 1)
    return not isinstance(module, Linear) and any(not each.dtype.is_floating_point and each.dtype != torch.bool for each in two)


def _replaced(
    model: torch.nn.Module, name: str, dialect: Dialect | None, said: Mapping[str, Any]
) -> tuple[str, tuple[str, ...]] | str:
    """Put a w4gen layer in the place of a module: its format and warnings, or why the module stays."""
    module = model.get_submodule(name)
    if reason := _refusal(module, tensors := module.state_dict(), dialect):
        return reason
    if callable(version := getattr(module, "qzero_format", None)):  # zeros may have been brought to the second version
        said = {**said, "checkpoint_format": {1: "gptq", 2: "gptq_v2"}[version()]}
    try:
        layer = dialects.read(dialect, tensors, said, name)  # type: ignore[arg-type]
        made = layer.linear().to(layer.parts["codes"].device).train(module.training)
    except W4Error as error:
        return str(error)
    sizes = getattr(module, "out_features", layer.shape[0]), getattr(module, "in_features", layer.shape[1])
    if layer.shape != sizes:
        return f"its codes are {list(layer.shape)}, the module is {list(sizes)}"
    model.set_submodule(name, made)
    return layer.format.label, layer.notes


def _refusal(module: torch.nn.Module, tensors: Mapping[str, Any], dialect: Dialect | None) -> str:
    """Why a module stays as it is, before its tensors are read; empty where they can be."""
    kind = type(module).__name__
    if hooked(module):
        return HOOKED
    if dialect is None or not any(mark[1:] in tensors for mark in dialect.MARKS):
        return "its weight is not quantized" if _plain(module) else f"the tensors of a {kind} are of no dialect that is read"
    kept = KEPT.get(dialect.NAME, (kind,))
    if kind not in kept:
        way = f"load it as {kept[0]}, or " if kept else "load "
        return f"a {kind} may have reordered its codes: {way}the files by w4gen.load"
    return ""
