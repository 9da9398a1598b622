"""A folder of plain safetensors to one of w4gen's own, a shard at a time."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from w4gen.checkpoints import folder, own
from w4gen.checkpoints.model import empty
from w4gen.errors import CheckpointError, FormatError
from w4gen.ir.types import Format
from w4gen.patterns import by_pattern, check_matched, chosen, matches, patterns
from w4gen.progress import tracked
from w4gen.quantize import refuse_non_finite
from w4gen.runtime.weight import Weight

logger = logging.getLogger("w4gen")


def convert(
    source: Path,
    target: Path,
    format: str | Format | Mapping[str, str | Format] = "int4_g128",
    exclude: str | Iterable[str] = (),
    progress: bool = True,
    clip: bool = False,
) -> dict[str, Format]:
    """Round the linear layers of `source` to a format, or formats by pattern, into the folder `target`; each layer's format.

    Patterns, and `clip`, are those of `w4gen.convert`. Headers, shapes, values and room on the disk are checked before any write.
    A shard is written whole or not at all, and one that is whole and newer than its source is kept, so that a second call goes on
    where the first was cut off.
    """
    choose, held = by_pattern(format), folder.read(source)
    if held.quantization:
        raise CheckpointError(f"{source}: it is quantized already: w4gen.load runs it as it is, without rounding again")
    if target.resolve() == source.resolve():
        raise CheckpointError(f"{target}: this is the checkpoint that is read: give another folder to write to")
    forms = _forms(held, choose, patterns(exclude))
    _check_room(held, forms, target)
    said: dict[str, Any] = {"quant_method": own.NAME, "formats": {name: str(form) for name, form in forms.items()}}
    said |= {"clip": True} if clip else {}
    files = sorted({entry.file for entry in held.entries.values()})
    asked = [file for file in files if not _made(target / file.name, file)]
    _check_values(held, forms, asked)
    _begin(target, json.dumps({**held.stated, "quantization_config": said}, indent=1))
    total = sum(entry.file in asked for entry in held.entries.values())
    for _ in tracked(_written(held, asked, target, forms, clip), total, "converting", progress):
        pass
    folder.index(target, [target / file.name for file in files])
    for each in source.iterdir():
        if each.suffix in folder.BESIDES and not (target / each.name).exists():
            shutil.copy(each, target / each.name)
    return forms


def _forms(held: folder.Folder, choose: Mapping[str, Format], exclude: tuple[str, ...]) -> dict[str, Format]:
    """The layers that are rounded, and to what.

    Raises `CheckpointError` where none is, shapes are of another model, or a pattern matches no layer, which may be misspelt.
    """
    modules = empty(held, torch.float16).named_modules()
    layers = {name: module for name, module in modules if type(module) is torch.nn.Linear}
    check_matched(held.path, layers, *choose, *exclude)
    forms, count = dict[str, Format](), 0
    for name, module in layers.items():
        if f"{name}.weight" not in held.entries:  # a head that is tied
            continue
        count += 1
        entry, shape = held.entries[f"{name}.weight"], (module.out_features, module.in_features)
        if entry.shape != shape:
            told = f"has shape {list(entry.shape)}, config.json says {list(shape)}: the two may be of different models"
            raise CheckpointError(f"{entry.file}: {name}.weight {told}")
        form = None if matches([name], exclude) else chosen([name], choose)
        if form is not None:
            forms[name] = form
    if not forms:
        raise CheckpointError(f"{held.path}: of {count} linear layers that are named as in Transformers, none is left")
    return forms


def _check_room(held: folder.Folder, forms: Mapping[str, Format], target: Path) -> None:
    """Raise `CheckpointError` where the disk has no room for what will be written."""
    need = 0
    for name, entry in held.entries.items():
        form = forms.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        need += entry.bytes if form is None else int(form.stated_bits(*entry.shape) * entry.shape[0] * entry.shape[1] / 8)
    there = next(each for each in (target, *target.absolute().parents) if each.exists())
    held_already = sum(each.stat().st_size for each in target.glob("*.safetensors")) if target.is_dir() else 0
    free = shutil.disk_usage(there).free + held_already
    if need > free:
        raise CheckpointError(f"{target}: it takes {need:,} bytes and the disk has {free:,}: make room, or give another folder")


def _check_values(held: folder.Folder, forms: Mapping[str, Format], files: list[Path]) -> None:
    """Raise `CheckpointError` where a weight that is rounded is not finite; they are read once more for that."""
    names = [f"{name}.weight" for name in forms if held.entries[f"{name}.weight"].file in files]
    for name, tensor in held.tensors(names):
        try:
            refuse_non_finite(tensor, "weight")
        except FormatError as error:
            raise CheckpointError(f"{held.entries[name].file}: {name}: {error}") from error


def _begin(target: Path, stated: str) -> None:
    """The folder, with its config.json. Raises `CheckpointError` where another is there."""
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{target}: no folder can be there ({error.strerror}): give another one to write to") from error
    there = target / "config.json"
    if any(target.iterdir()) and not (there.exists() and there.read_text() == stated):
        raise CheckpointError(f"{target}: it holds other files: give an empty folder, or the settings that it was begun with")
    there.write_text(stated)


def _made(target: Path, file: Path) -> bool:
    """Whether a shard is there, whole, and newer than all that happened to the file that it is made of."""
    if not target.exists() or target.stat().st_mtime_ns <= file.stat().st_ctime_ns:
        return False
    try:
        with folder.opened(target):
            return True
    except CheckpointError as error:
        logger.warning("%s: it is made anew", error)
        return False


def _written(held: folder.Folder, files: list[Path], target: Path, forms: Mapping[str, Format], clip: bool) -> Iterator[str]:
    """Write the shards that are made of `files`; the name of each tensor once it is done."""
    formats = {name: str(form) for name, form in forms.items()}
    for file in files:
        tensors = dict[str, torch.Tensor]()
        for name, tensor in held.tensors(name for name, entry in held.entries.items() if entry.file == file):
            form = forms.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
            tensors |= {name: tensor} if form is None else _rounded(tensor, form, clip, name.removesuffix("weight"), file)
            yield name
        partial = (target / file.name).with_suffix(".partial")
        save_file(tensors, partial, own.metadata(tensors, formats))
        partial.rename(target / file.name)


def _rounded(tensor: torch.Tensor, form: Format, clip: bool, start: str, file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a layer, by their whole names."""
    try:
        parts = own.write(Weight.from_float(tensor.float(), form, clip))
    except FormatError as error:
        raise CheckpointError(f"{file}: {start}weight: {error}") from error
    return {f"{start}{each}": part for each, part in parts.items()}
