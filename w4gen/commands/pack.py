"""`w4gen pack IN` and `w4gen unpack FOLDER OUT`: a checkpoint as an arch's kernels read it, and back."""

from __future__ import annotations

from pathlib import Path

import click

from w4gen.commands.question import as_json, tell


@click.command("pack")
@click.argument("source", metavar="IN", type=click.Path(path_type=Path))
@click.option("--arch", help="Whose kernels will read it, as sm_90; default: W4GEN_ARCH, else the GPU present.")
@as_json
def pack(source: Path, arch: str | None, as_json: bool) -> None:
    """Store the model of IN, a GGUF file or a folder, in the layout of an arch's kernels, beside IN: w4gen-ARCH.

    `w4gen.load(IN)` on that arch then maps it into memory, while the files of IN stay as they are. IN is never changed.
    """
    from w4gen.checkpoints.derive import pack as run
    from w4gen.runtime.launch import arch_of

    made = run(source, arch or arch_of().name)
    tell({"out": str(made)}) if as_json else click.echo(f"{made}: w4gen.load({str(source)!r}) takes it where its arch is present")


@click.command("unpack")
@click.argument("source", metavar="FOLDER", type=click.Path(path_type=Path))
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@as_json
def unpack(source: Path, target: Path, as_json: bool) -> None:
    """Write what `w4gen pack` made to a new folder OUT of w4gen's own files: canonical [N, K], whose rows can be sliced."""
    from w4gen.checkpoints.derive import unpack as run

    run(source, target)
    tell({"out": str(target)}) if as_json else click.echo(str(target))
