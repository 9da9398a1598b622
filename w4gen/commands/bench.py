"""`w4gen bench`: measurements on the GPU here, as tables and as JSON."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

import w4gen
from w4gen.api import parse_shape, problem_of
from w4gen.bench.noise import Change, against, checked, lost, results, too_fast
from w4gen.bench.results import write
from w4gen.commands.question import SHAPE_HELP, as_json, count, detected, load_format, table, tell
from w4gen.errors import ShapeError, W4Error
from w4gen.layers import shapes as layers_of


@click.command()
@click.option("--ablate", is_flag=True, help="time one shape part by part: portable, layout, decode, schedule, tuned, overlap")
@click.option(
    "--cold", is_flag=True, help="what a shape costs before its first answer: repack, compile, load; and when it has paid"
)
@click.option("--shape", "shapes", multiple=True, help=f"with --ablate or --cold: {SHAPE_HELP}; repeatable")
@click.option("--layer", "layers", multiple=True, help="KxN (inputs x outputs); repeatable; layers of known models by default")
@click.option("--random", "some", default=0, help="that many random layers, K and N in 64 … 32768, multiples of 8")
@click.option("--m", "tokens", multiple=True, type=int, default=(1, 8), show_default=True, help="rows of x; repeatable")
@click.option("--format", "formats", multiple=True, default=("int4_g128",), show_default=True, help="or FILE.py:NAME; repeatable")
@click.option("--dtype", "kinds", multiple=True, default=("float16",), show_default=True, help="of x and y; repeatable")
@click.option("--peers/--no-peers", default=True, show_default=True, help="time kernels of other libraries too, where they are")
@click.option("--peer", "names", multiple=True, help="gemlite, humming …: that library alone; repeatable")
@click.option(
    "--against", "old", type=click.Path(path_type=Path), help="older JSON file of the same rows: what is slower, wrong or gone"
)
@click.option("--results", "now", type=click.Path(path_type=Path), help="with --against: measured before, in place of now")
@click.option("--out", type=click.Path(path_type=Path), help="JSON file to write")
@as_json
def bench(
    as_json: bool,
    ablate: bool,
    cold: bool,
    shapes: tuple[str, ...],
    layers: tuple[str, ...],
    some: int,
    tokens: tuple[int, ...],
    formats: tuple[str, ...],
    kinds: tuple[str, ...],
    peers: bool,
    names: tuple[str, ...],
    old: Path | None,
    now: Path | None,
    out: Path | None,
) -> None:
    """Compare with cuBLAS, peers and the floor over layers and M.

    With --ablate tell what each part of w4gen is worth, with --cold what comes before a first answer. With --against exit with 1
    where a row became slower, wrong or faster than its floor, or is not there any more.
    """
    if (ablate or cold) != bool(shapes) or (ablate and cold):
        raise ShapeError("--ablate, or --cold, and --shape MxKxN go together; layers of a comparison are --layer KxN and --m M")
    if now is not None and old is None:
        raise W4Error(f"--results {now} is compared with an older run: name its file by --against")
    if old is not None:
        results(old)  # refused before minutes are spent
    forms = tuple(map(load_format, formats))
    wanted = [parse_shape(each) for each in shapes] or layers_of(layers, some, tokens)
    for form, kind, (m, k, n) in itertools.product(forms, kinds, wanted):
        problem_of(m=m, k=k, n=n, format=form, dtype_name=kind)  # refused before a GPU is asked for
    if now is not None:
        facts = checked(results(now))
    elif detected() == "portable":
        raise W4Error(
            "times come from GPUs only and there is none here: run w4gen bench where one is; w4gen roofline and w4gen curve "
            "with --arch work out bounds and predictions from data sheets, and --results FILE --against FILE compares old times"
        )
    elif ablate:
        facts = w4gen.ablate(shapes, forms, kinds, quiet if as_json else shown)
    elif cold:
        facts = w4gen.cold(shapes, forms, kinds, quiet if as_json else paid)
    else:
        others = (names or None) if peers else ()
        facts = w4gen.compare(layers, some, tokens, forms, kinds, quiet if as_json else click.echo, others)
    if out is not None:
        write(out, facts)
    if as_json:
        tell(facts)
    if old is not None:
        compared(against(facts, old), [*lost(facts, old), *too_fast(facts)], old, quiet if as_json else click.echo)


def compared(changes: Sequence[Change], beyond: Sequence[str], old: Path, say: Callable[[str], Any]) -> None:
    """Tell what became slower than in an older run, and what cannot be compared; exit with 1 if there is either."""
    worse = [each for each in changes if each.worse]
    say(f"{count(len(changes), 'row')} as in {old}, {len(worse)} slower by more than the noise of both runs")
    for each in worse:
        say(f"{each.row}: {each.now:.2f} floors, before {each.before:.2f}: {each.more:+.1%}, noise {each.noise:.1%}")
    for each in beyond:
        say(each)
    if worse or beyond:
        raise SystemExit(1)


def quiet(_: Any) -> None:
    """Say nothing on the way: JSON comes at the end."""


def paid(row: dict[str, Any]) -> None:
    """Print what one shape costs before its first answer, and when that has paid."""
    click.echo(
        f"{row['m']}x{row['k']}x{row['n']} {row['format']} {row['dtype']}: {row['again']['us']:.2f} us, "
        f"cuBLAS {row['again']['cublas_us']:.2f} us, {row['saved_us']:.2f} us saved a call"
    )
    for name in ("first", "again"):
        parts = ", ".join(
            f"{stage.removesuffix('_s')} {seconds:.3f}" for stage, seconds in row[name].items() if stage.endswith("_s")
        )
        calls = row[f"break_even_{name}"]
        pays = "it never pays" if calls is None else f"paid after {calls:,} calls"
        click.echo(f"{name:>9}  {row[f'{name}_s']:.3f} s: {parts}; {pays}")


def shown(ladder: dict[str, Any]) -> None:
    """Print the parts of one shape."""
    least = ladder["floor_us"]
    click.echo(
        f"{ladder['m']}x{ladder['k']}x{ladder['n']} {ladder['format']} {ladder['dtype']}: "
        f"cuBLAS {ladder['cublas_us']:.2f} us, floor {least:.2f} us"
    )
    cells = [
        [row["part"], "-", "", "", "", row["why"]]
        if "why" in row
        else [
            row["part"], f"{row['us']:.2f}", f"{row['gain']:.2f} x", f"{least / row['us']:.0%}",
            f"{row['error']:.1e}, {row['equal_repeats']} equal{'' if row['right'] else ', WRONG'}", row["schedule"],
        ]
        for row in ladder["rows"]
    ]  # fmt: skip
    table("with", "us", "gain", "of floor", "error", "schedule", rows=cells)
    for each in too_fast({"ladders": [ladder]}):
        click.echo(each)
