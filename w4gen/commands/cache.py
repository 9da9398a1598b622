"""`w4gen cache`: the kernels and the tuned schedules that are kept on disk."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import click

from w4gen import bundle, paths, tuned
from w4gen import cache as store
from w4gen.commands.bundle import imported
from w4gen.commands.question import as_json, count, table, tell
from w4gen.errors import W4Error
from w4gen.ir.problem import Problem
from w4gen.layers import LAYERS


@click.group()
def cache() -> None:
    """Look at the kernels and tuned schedules that are kept on disk; check, remove, bring in, compare."""


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
    if (held := paths.bundle()) is not None:
        raise W4Error(f"W4GEN_CACHE names the bundle {held}, which is a file of yours: unset it to clear {store.kernels()}")
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


@cache.command("import")
@as_json
@click.argument("path", type=click.Path(path_type=Path))
def import_command(as_json: bool, path: Path) -> None:
    """Copy what a bundle holds, FILE.w4g, into the cache, after checking all of it."""
    count_of = imported(path, bundle.read(path))
    if as_json:
        tell(count_of | {"path": str(store.kernels().parent)})
    else:
        what = ", ".join(count(number, name.removesuffix("s")) for name, number in count_of.items())
        click.echo(f"imported {what} into {store.kernels().parent}")


@cache.command()
@as_json
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
def merge(as_json: bool, files: tuple[Path, ...]) -> None:
    """Take tuned rows from files called ARCH.json into the cache; of two rows for one question the newer counts."""
    read = [(path, tuned.arch_of(path).name, *readable(path)) for path in files]
    facts = [
        {"from": str(path), "rows": len(rows), "skipped": skipped, "into": str(tuned.save(name, rows))}
        for path, name, rows, skipped in read
    ]
    if as_json:
        tell(facts)
        return
    for each in facts:
        click.echo(f"{count(each['rows'], 'row')} of {each['from']} into {each['into']}")
        for why in each["skipped"]:
            click.echo(f"  skipped: {why}")


def readable(path: Path) -> tuple[dict[tuned.Row, Problem], list[str]]:
    """The rows of a file with the problems that they answer, and why others are of no use here."""
    held = tuned.opened(path)
    found, refused = tuned.answers(held.rows)
    return found, [*held.why, *refused]


@cache.command()
@as_json
@click.argument("old", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
def diff(as_json: bool, old: Path, new: Path) -> None:
    """Show where two files of tuned rows say different things."""
    pairs = tuned.diff(tuned.load(old), tuned.load(new))
    if as_json:
        tell([{"old": a and a.facts(), "new": b and b.facts()} for a, b in pairs])
        return
    if pairs:
        table("question", "device", "old", "us", "new", "us", rows=[difference(a, b) for a, b in pairs])
    click.echo(f"{count(len(pairs), 'difference')} of {old} and {new}")


def difference(a: tuned.Row | None, b: tuned.Row | None) -> list[str]:
    """A line of `diff`: what the schedules have that the other has not."""
    row = a or b
    fields = [set(str(each.schedule).split()) if each else set() for each in (a, b)]
    sides = [" ".join(sorted(fields[i] - fields[1 - i])) or "-" for i in (0, 1)]
    times = [f"{each.us:.2f}" if each else "" for each in (a, b)]
    return [row.question if row else "", row.device if row else "", sides[0], times[0], sides[1], times[1]]


@cache.command()
@as_json
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--fitted", is_flag=True, help="count also the layers that the rules were fitted to")
def rules(as_json: bool, files: tuple[Path, ...], fitted: bool) -> None:
    """Show how far the rules' choice is from the fastest that tuning found, over layers that the rules were never fitted to.

    Both were timed in one search: the geometric mean, and the worst, of the one time over the other. Files are called ARCH.json.
    """
    read = [(tuned.arch_of(path), *readable(path)) for path in files]
    archs = {row: arch for arch, rows, _ in read for row in rows}
    asked = {row: problem for _, rows, _ in read for row, problem in rows.items()}
    new = [row for row in archs if fitted or (asked[row].k, asked[row].n) not in LAYERS]
    told = [row for row in new if tuned.current(row, archs[row])]
    groups: dict[str, list[tuned.Row]] = {"all": told}
    for row in sorted(told, key=lambda row: asked[row].m):
        groups.setdefault("{0} M={1.m[0]}..{1.m[1]}".format(asked[row].format.label, asked[row]), []).append(row)
    facts = [{"rows": name} | behind(each) for name, each in groups.items()]
    left = {
        "fitted": len(archs) - len(new),
        "changed": len(new) - len(told),
        "untimed": sum(not row.rules_us for row in told),
        "unreadable": sum(len(skipped) for *_, skipped in read),
    }
    if as_json:
        tell({"groups": facts} | left)
        return
    cells = [(each["rows"], str(each["layers"]), f"{each['mean']:.3f}", f"{each['worst']:.3f}", each["at"]) for each in facts]
    table("rows", "layers", "mean", "worst", "at", rows=cells)
    click.echo(
        f"left out: {left['fitted']} of layers that the rules were fitted to, {left['changed']} timed against a choice that is "
        f"not theirs now or is not told, {left['untimed']} without a time of theirs, {left['unreadable']} that cannot be read"
    )


def behind(rows: Sequence[tuned.Row]) -> dict[str, Any]:
    """How far the rules are behind in some rows: geometric mean, worst and where; NaN where nothing was timed."""
    ratios = {row: row.rules_ratio for row in rows if row.rules_us and row.us}
    worst = max(ratios, key=ratios.__getitem__, default=None)
    figures = {"mean": geometric_mean(ratios.values()), "worst": ratios[worst]} if worst else {"mean": nan, "worst": nan}
    return {"layers": len(ratios), **figures, "at": worst.question if worst else ""}
