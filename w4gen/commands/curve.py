"""`w4gen curve`: time against M, as a plot or as JSON."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

import w4gen
from w4gen.api import layer_of
from w4gen.bench.noise import too_fast
from w4gen.bench.results import write
from w4gen.commands.question import as_json, load_format, numbers, table, tell
from w4gen.errors import ShapeError
from w4gen.layers import PRESETS
from w4gen.schedule.arch import ARCHES

WIDTH = 40
"""Characters of the longest bar."""


@click.command()
@click.option("--model", help=f"config.json, or one of {', '.join(PRESETS)}: all linear layers of a model")
@click.option("--shape", help="KxN: inputs x outputs of one layer")
@click.option("--m", "rows", default="", help="rows of x, as in 1,2,4; by default both sides of each step")
@click.option("--format", "format_name", default="int4_g128", show_default=True, help="int4_g128, nf4_g64 …, or FILE.py:NAME")
@click.option("--dtype", default="float16", show_default=True, help="of x and y: float16 or bfloat16")
@click.option("--arch", default="", help=f"predict for one of {', '.join(ARCHES)}, also where a GPU is")
@click.option("--out", type=click.Path(path_type=Path), help="JSON file to write")
@as_json
def curve(
    as_json: bool, model: str | None, shape: str | None, rows: str, format_name: str, dtype: str, arch: str, out: Path | None
) -> None:
    """Time the linear layers of a model against M, on the GPU here; with none, or with --arch, predict it."""
    asked = model or shape
    if asked is None or (model and shape):
        raise ShapeError("a curve is of a model or of one layer: give --model config.json, or --shape KxN as in 4096x14336")
    if shape:
        layer_of(shape)
    more = {"ms": numbers(rows, "m")} if rows else {}
    found = w4gen.curve(asked, format=load_format(format_name), arch=arch, dtype=dtype, **more)
    if out is not None:
        write(out, found.facts())
    if as_json:
        return tell(found.facts())
    note = "" if found.source == "measured" else ": a model's times, which rank and are no measurement"
    click.echo(f"{found.source} on {found.where}{note}; microseconds, {found.format}\n")
    heads = [f"{part.k}->{part.n}" for part in found.parts]
    heads = [f"{head} x{part.count}" if part.count > 1 else head for head, part in zip(heads, found.parts, strict=True)]
    total, longest = found.total_us, max(found.total_us)
    table("M", *heads, *["all"] * (len(heads) > 1), "", "step", rows=[
        [
            str(m), *(f"{part.us[place]:.2f}" for part in found.parts), *[f"{total[place]:.1f}"] * (len(heads) > 1),
            "█" * max(1, round(WIDTH * total[place] / longest)), found.steps.get(m, ""),
        ]
        for place, m in enumerate(found.ms)
    ])  # fmt: skip
    for each in too_fast(asdict(found)):
        click.echo(each)
    return None
