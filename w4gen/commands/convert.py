"""`w4gen convert IN OUT`: a plain checkpoint to one of w4gen's own."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("convert")
@click.argument("source", metavar="IN", type=click.Path(path_type=Path))
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--format", default="int4_g128", show_default=True, help="What the weights are rounded to.")
@click.option("--exclude", multiple=True, help="Layers that stay as they are: a pattern, as lm_head or '*.k_proj'.")
def convert(source: Path, target: Path, format: str, exclude: tuple[str, ...]) -> None:
    """Round the linear layers of the safetensors in IN to a format, into a new folder OUT, which `w4gen.load` reads.

    IN is never changed. Where it was cut off, the same command goes on.
    """
    from w4gen.checkpoints.convert import convert as run

    names = run(source, target, format, exclude)
    click.echo(f"{target}: {len(names)} layers in {format}")
