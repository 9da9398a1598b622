"""`w4gen convert IN OUT`: a plain checkpoint to one of w4gen's own."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click

from w4gen.commands.question import as_json, load_format, tell


@click.command("convert")
@click.argument("source", metavar="IN", type=click.Path(path_type=Path))
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "formats",
    multiple=True,
    default=("int4_g128",),
    show_default=True,
    help="A format's name, or FILE.py:NAME; or PATTERN=FORMAT, which may be repeated: the first that matches a layer counts.",
)
@click.option("--exclude", multiple=True, help="Layers that stay as they are: a pattern, as lm_head or '*.k_proj'.")
@click.option("--clip", is_flag=True, help="Cut every group first, where that leaves less squared error.")
@as_json
def convert(source: Path, target: Path, formats: tuple[str, ...], exclude: tuple[str, ...], clip: bool, as_json: bool) -> None:
    """Round the linear layers of the safetensors in IN to a format, into a new folder OUT, which `w4gen.load` reads.

    IN is never changed. Where it was cut off, the same command goes on.
    """
    from w4gen.checkpoints.convert import convert as run

    choose = {pattern or "*": load_format(name) for pattern, _, name in (each.rpartition("=") for each in formats)}
    done = {name: form.label for name, form in run(source, target, choose, exclude, clip=clip).items()}
    if as_json:
        tell({"out": str(target), "layers": done})
        return
    click.echo(f"{target}: {', '.join(f'{count} layers in {label}' for label, count in Counter(done.values()).items())}")
