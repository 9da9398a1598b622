"""`w4gen tune`: schedules timed on the GPU here, for one layer or for those of a model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

import w4gen
from w4gen.commands.bundle import of_model
from w4gen.commands.question import as_json, asked, count, detected, load_format, question, tell
from w4gen.errors import W4Error
from w4gen.ir.problem import Problem


@click.command()
@question
@as_json
@click.option("--model", type=click.Path(path_type=Path), help="config.json or a preset: tune all linear layers of a model")
@click.option("--tp", default="1", help="with --model: shards of tensor parallelism, one or several, as in 1,2,4")
@click.option("--budget", default=60.0, show_default=True, type=click.FloatRange(min=0.0), help="seconds, in all")
@click.option("--again", is_flag=True, help="tune also what was tuned before on this GPU with this Triton")
def tune(as_json: bool, model: Path | None, tp: str, budget: float, again: bool, **options: Any) -> None:
    """Time schedules on the GPU here and keep the fastest that are right; Ctrl-C keeps what is done, and a second run goes on."""
    questions = wanted(model, tp, options)
    if detected() == "portable":
        raise W4Error("times come from GPUs only and there is none here: run w4gen tune where the kernels will run")
    start, rows = time.monotonic(), []
    for turn, (each, row, found) in enumerate(w4gen.tune(questions, budget, again), 1):
        skipped = len(found.skipped) if found else 0
        rows.append({"question": str(each.problem), "row": row.facts() if row else None, "skipped": skipped})
        if not as_json:
            gone = time.monotonic() - start
            verdict = f"{row.us:.2f} us, floor {row.floor_us:.2f}, {count(row.trials, 'trial')}" if row else told(found)
            at = f"{each.m}x{each.problem.k}x{each.problem.n} {each.problem.format.label}"
            click.echo(f"{turn}/{len(questions)} {at}: {verdict}, {skipped} skipped; {max(0.0, budget - gone):.0f} s left")
    if as_json:
        tell(rows)


def told(found: Any) -> str:
    """Why a question has no new row."""
    return "none was right, the rules answer" if found else "passed over: tuned before, or too large for the memory"


def wanted(model: Path | None, tp: str, options: dict[str, Any]) -> list[tuple[Problem, int, int]]:
    """The problems that the options name, with the rows of x to time each with and how many layers have it."""
    if options["arch"] or options["layout"]:
        raise W4Error("tuning is for the GPU here, in the stored order that its kernels read: leave out --arch and --layout")
    if model is None:
        problem, _, rows = asked(**options)
        return [(problem, rows, 1)]
    form = load_format(options["format_name"])
    found = of_model(model, tp, options["m"] or "1,16,256", form, options["dtype"])
    return [(problem, rows, layer.count) for problem, (layer, rows) in found.items()]
