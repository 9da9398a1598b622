"""A folder of plain safetensors to one of w4gen's own, a shard at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors.torch import save_file

from w4gen.checkpoints import folder, own
from w4gen.checkpoints.model import empty
from w4gen.errors import CheckpointError, FormatError
from w4gen.formats import named
from w4gen.ir.types import Format
from w4gen.runtime.weight import Weight


def convert(source: Path, target: Path, format: str | Format = "int4_g128", exclude: str | Iterable[str] = ()) -> list[str]:
    """Round the linear layers of `source` to a format, into the folder `target`; the names of the layers.

    Patterns of `exclude` are those of `w4gen.convert`. All headers are checked before anything is written. A shard is written
    whole or not at all, and one that is newer than its source is kept, so that a second call goes on where the first was cut off.
    """
    form, held = named(format), folder.read(source)
    if held.quantization:
        raise CheckpointError(f"{source}: it is quantized already: w4gen.load runs it as it is, without rounding again")
    if target.resolve() == source.resolve():
        raise CheckpointError(f"{target}: this is the checkpoint that is read: give another folder to write to")
    exclude = (exclude,) if isinstance(exclude, str) else tuple(exclude)
    modules = empty(held, torch.float16).named_modules()
    linear = [name for name, module in modules if type(module) is torch.nn.Linear and f"{name}.weight" in held.entries]
    names = [name for name in linear if not any(fnmatchcase(name, pattern) for pattern in exclude)]
    if not names:
        raise CheckpointError(f"{source}: of {len(linear)} linear layers that are named as in Transformers, none is left")
    said = {"quant_method": own.NAME, "formats": dict.fromkeys(names, str(form))}
    _begin(target, json.dumps({**held.stated, "quantization_config": said}, indent=1))
    place, size = {}, 0
    for file in sorted({entry.file for entry in held.entries.values()}):
        if not _made(target / file.name, file):
            _shard(held, file, target / file.name, form, {f"{name}.weight" for name in names})
        for name, entry in folder.entries(target / file.name):
            place[name], size = file.name, size + entry.bytes
    (target / folder.INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": place}, indent=1))
    for each in source.iterdir():
        if each.suffix in (".json", ".jinja", ".txt", ".model") and not (target / each.name).exists():
            shutil.copy(each, target / each.name)
    return names


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
    """Whether a shard is there and newer than all that happened to the file that it is made of."""
    return target.exists() and target.stat().st_mtime_ns > file.stat().st_ctime_ns


def _shard(held: folder.Folder, file: Path, target: Path, form: Format, rounded: set[str]) -> None:
    tensors = {}
    for name in (name for name, entry in held.entries.items() if entry.file == file):
        if name in rounded:
            try:
                parts = own.write(Weight.from_float(held.tensor(name).float(), form))
            except FormatError as error:
                raise CheckpointError(f"{file}: {name}: {error}") from error
            tensors |= {f"{name.removesuffix('weight')}{each}": part for each, part in parts.items()}
        else:
            tensors[name] = held.tensor(name)
    partial = target.with_suffix(".partial")
    save_file(tensors, partial, {"format": "pt"})
    partial.rename(target)
