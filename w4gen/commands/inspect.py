"""`w4gen inspect FILE_OR_FOLDER`: what a checkpoint holds, and what w4gen will do with it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

import w4gen
from w4gen.commands.question import as_json, table, tell

if TYPE_CHECKING:
    from w4gen.checkpoints.inspect import Held

COLUMNS = ("tensors", "count", "shape", "dialect", "format", "bits a weight", "what w4gen does")


@click.command("inspect")
@click.argument("file", type=click.Path(path_type=Path))
@as_json
def inspect(file: Path, as_json: bool) -> None:
    """List what a GGUF file, or a folder of safetensors, holds: how it is stored, and what w4gen will do with it.

    Tensors that differ only in the number of their layer share a line. Of a GGUF file nothing but the header is read.
    """
    found = w4gen.inspect(file)
    if as_json:
        tell([asdict(each) for each in found])
        return
    table(*COLUMNS, rows=map(_row, found))


def _row(each: Held) -> tuple[str, ...]:
    shape = " x ".join(map(str, each.shape))
    return each.name, str(each.count), shape, each.dialect, each.format, f"{each.bits:.2f}" if each.bits else "-", each.plan
