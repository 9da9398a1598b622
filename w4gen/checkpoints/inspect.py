"""What a checkpoint holds, and what w4gen will do with it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from w4gen.checkpoints import dialects, folder, gguf
from w4gen.errors import CheckpointError
from w4gen.patterns import kind_of

EMBEDDINGS = ("token_embd.weight", "position_embd.weight", "token_types.weight")
"""What GGUF calls the tables that tokens are looked up in."""


@dataclass(frozen=True, slots=True)
class Held:
    """Tensors that differ in the number of their layer alone: how many, how they are stored, and what becomes of them.

    `format` is w4gen's, or a plain type; `bits` are those of a weight with its share of scales.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    dialect: str
    format: str
    bits: float
    plan: str


def inspect(path: str | Path) -> list[Held]:
    """The tensors of a GGUF file, by its header; or the layers of a folder of safetensors, each of which is read.

    Raises `CheckpointError` where a file is damaged; a layer that contradicts itself is told as refused.
    """
    if Path(path).is_dir():
        found = Counter(_in_folder(folder.read(path)))
    else:
        file = gguf.read(path)
        found = Counter(_held(file, entry) for entry in file.entries.values())
    return [replace(held, count=count) for held, count in found.items()]


def _in_folder(held: folder.Folder) -> Iterator[Held]:
    """The quantized layers of a folder, then the tensors that are plain."""
    names, found = dialects.layers(held), dialects.dialect(held)
    for name in names:
        dialect = found.NAME if found else ""
        try:
            layer = dialects.layer(held, name)
        except CheckpointError as error:
            yield Held(kind_of(name), 1, (), dialect, "-", 0.0, f"refused: {error}")
            continue
        plan = (
            "runs from codes" + ", columns in another order" * (layer.order is not None) + ", with a warning" * bool(layer.notes)
        )
        yield Held(kind_of(name), 1, layer.shape, dialect, layer.format.label, layer.format.stated_bits(*layer.shape), plan)
    taken = dialects.used(held)
    for name, entry in held.entries.items():
        if name not in taken:
            bits = 8 * entry.bytes / max(1, math.prod(entry.shape))
            yield Held(kind_of(name), 1, entry.shape, "plain", entry.kind.lower(), bits, "stays as it is")


def _held(file: gguf.File, entry: gguf.Entry) -> Held:
    try:
        form, refused = file.format(entry.name), ""
    except CheckpointError as error:
        form, refused = None, str(error)
    if refused:
        plan = f"refused: {gguf.UNREAD[entry.type][1]}"
    elif form is None:
        plan = "stays as it is"
    elif entry.name in EMBEDDINGS:
        plan = "dequantized; a head tied to it runs from codes"
    else:
        plan = "runs from codes"
    size = 8 * entry.bytes / max(1, entry.elements)
    return Held(kind_of(entry.name), 1, entry.shape, f"GGUF {entry.kind}", form.label if form else entry.kind, size, plan)
