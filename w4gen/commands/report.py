"""`w4gen report`: pictures and one page of what was measured; no GPU is needed."""

from __future__ import annotations

from pathlib import Path

import click

from w4gen.bench.page import page, pictures, runs
from w4gen.commands.question import as_json, count, tell
from w4gen.errors import W4Error


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--html", type=click.Path(path_type=Path), help="file to write: a page that needs no other file")
@click.option("--png", type=click.Path(path_type=Path), help="folder to write the pictures to")
@as_json
def report(files: tuple[Path, ...], html: Path | None, png: Path | None, as_json: bool) -> None:
    """Draw what FILES hold, JSON that bench, profile, roofline or curve wrote by --out."""
    if html is None and png is None:
        raise W4Error("a report is written to a file: name a page by --html FILE, a folder of pictures by --png FOLDER, or both")
    found = runs(files)
    made = pictures(found)
    for each in made if png is not None else ():
        png.mkdir(parents=True, exist_ok=True)  # type: ignore[union-attr]
        (png / f"{each.name}.png").write_bytes(each.png())  # type: ignore[operator]
    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(page(found, made))
    if as_json:
        tell([{"name": each.name, "title": each.title, "shows": each.shows} for each in made])
    else:
        click.echo(f"{count(len(made), 'picture')} of {count(len(files), 'file')}")
