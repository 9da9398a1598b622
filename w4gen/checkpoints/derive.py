"""A checkpoint as an arch's kernels read it, stored beside it: a second start maps it into memory and packs nothing."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from w4gen.checkpoints import dialects, folder, own, packed
from w4gen.checkpoints.load import whole
from w4gen.errors import CheckpointError
from w4gen.progress import tracked
from w4gen.runtime.linear import Linear
from w4gen.schedule.arch import arch as arch_named
from w4gen.schedule.stored import layout_for


def pack(source: Path, arch: str, progress: bool = True) -> Path:
    """Store the model of a checkpoint with its layers as the kernels of an arch read them, beside it: the folder that was made.

    `w4gen.load(source)` takes it where that arch is present, as long as the files of `source` stay the same. Raises
    `CheckpointError` where there is nothing to pack.
    """
    made, target = packed.beside(source, arch), arch_named(arch)
    model = whole(source, None, torch.device("cpu")).model
    names = [name for name, module in model.named_modules() if isinstance(module, Linear)]
    if not names:
        raise CheckpointError(f"{source}: no layer of it is quantized, so there is nothing to pack: `w4gen convert` rounds it")
    stated = dict[str, Any]()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name in tracked(names, len(names), "packing", progress):
            layer = model.get_submodule(name)
            model.set_submodule(name, torch.nn.Identity())  # nothing is in memory twice
            weight = layer.weight
            weight = weight.packed_as(layout_for(weight.format, target, weight.n, weight.k))
            stated[name] = packed.stated(weight)
            yield from _of_layer(name, packed.write(weight, layer.order, layer.bias))
        yield from _plain(model)

    said = {"quant_method": packed.NAME, "arch": arch, "layers": stated, "source": packed.facts(source)}
    _save(made, model.config.to_dict(), said, tensors())
    return made


def unpack(source: Path, target: Path, progress: bool = True) -> None:
    """What `pack` made, as files of w4gen's own again: bit for bit the tensors it was made of, where that was such a folder."""
    held = folder.read(source)
    if not packed.claims(held.quantization):
        raise CheckpointError(f"{source}: it was not made by `w4gen pack`: give a folder called w4gen-ARCH")
    formats, ordered = dict[str, str](), list[str]()
    names = dialects.layers(held)
    taken = dialects.used(held)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name in tracked(names, len(names), "unpacking", progress):
            layer = dialects.layer(held, name)
            formats[name] = str(layer.format)
            ordered.extend([name] * (layer.order is not None))
            yield from _of_layer(name, own.write(layer.weight, layer.order, layer.bias))
        yield from held.tensors(name for name in held.entries if name not in taken)

    _save(target, held.stated, {"quant_method": own.NAME, "formats": formats, "ordered": ordered}, tensors())
    for each in (source.parent if source.parent != target else source).iterdir():
        if each.suffix in folder.BESIDES and not (target / each.name).exists() and each.name != folder.INDEX:
            shutil.copy(each, target / each.name)


def _of_layer(name: str, held: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    return ((f"{name}.{each}", tensor) for each, tensor in held.items())


def _plain(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a model; of tied ones the first."""
    seen = set[int]()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            yield name, tensor


def _save(target: Path, stated: dict[str, Any], said: dict[str, Any], tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """A folder that is there whole or not at all; what `pack` made before is replaced, other things are not."""
    there = folder.read(target).quantization if (target / "config.json").exists() else {}
    if target.exists() and not (packed.claims(there) and packed.claims(said)):
        raise CheckpointError(f"{target}: it is there already: give a folder that is not")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as partial:
        folder.save(Path(partial) / "made", {**stated, "quantization_config": said}, tensors)
        if target.exists():
            target.rename(Path(partial) / "before")
        (Path(partial) / "made").rename(target)
