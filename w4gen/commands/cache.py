"""`w4gen cache`: the kernels that are kept on disk."""

from __future__ import annotations

from typing import Any

import click

from w4gen import cache as store
from w4gen.commands.question import as_json, count, table, tell
from w4gen.errors import W4Error


@click.group()
def cache() -> None:
    """Look at the kernels that are kept on disk, check them, remove them."""


@cache.command()
@as_json
def path(as_json: bool) -> None:
    """Print the folder of kernels."""
    if as_json:
        tell({"path": str(store.kernels())})
    else:
        click.echo(store.kernels())


@cache.command("list")
@as_json
def list_command(as_json: bool) -> None:
    """List kernels: the question that each answers, what it is compiled for, bytes."""
    rows = [row(entry) for entry in store.entries()]
    if as_json:
        tell(rows)
        return
    if rows:
        cells = [(each["folder"][:8], each["question"], " ".join(each["compiled_for"]), f"{each['bytes']:,}") for each in rows]
        table("folder", "question", "compiled for", "bytes", rows=cells)
    click.echo(f"{count(len(rows), 'kernel')}, {sum(each['bytes'] for each in rows):,} bytes in {store.kernels()}")


def row(entry: store.Entry) -> dict[str, Any]:
    """What `list` tells of a kernel."""
    facts = {"folder": entry.folder.name, "question": entry.question, "schedule": entry.schedule}
    return {**facts, "compiled_for": entry.targets, "bytes": entry.nbytes}


@cache.command()
@as_json
def verify(as_json: bool) -> None:
    """Hash every text and binary anew and compare; exit with 1 where one is damaged."""
    entries = store.entries()
    damaged = {entry.folder.name: parts for entry in entries if (parts := entry.damage())}
    if as_json:
        tell({"kernels": len(entries), "damaged": damaged})
    else:
        for name, parts in damaged.items():
            click.echo(f"{name}: {', '.join(parts)}")
        damage = f"{len(damaged)} damaged{' (made anew when next asked for)' if damaged else ''}"
        click.echo(f"{count(len(entries), 'kernel')}, {damage}")
    if damaged:
        raise SystemExit(1)


@cache.command()
@as_json
@click.option("--yes", is_flag=True, help="do not ask")
def clear(as_json: bool, yes: bool) -> None:
    """Remove all kernels; tuned schedules stay."""
    entries = store.entries()
    size = sum(entry.nbytes for entry in entries)
    what = f"{count(len(entries), 'kernel')}, {size:,} bytes, from {store.kernels()}"
    if entries and not yes and not agreed(f"Remove {what}?"):
        click.echo("nothing was removed", err=True)
        return
    for entry in entries:
        entry.remove()
    if as_json:
        tell({"removed": len(entries), "bytes": size, "path": str(store.kernels())})
    else:
        click.echo(f"removed {what}")


def agreed(question: str) -> bool:
    """The answer of the person at the terminal. Raises `W4Error` where there is none."""
    try:
        return click.confirm(question, err=True)
    except click.Abort as error:
        raise W4Error("nobody answered: give --yes to remove without asking") from error
