"""`w4gen tune`: schedules timed on the GPU here, for one layer or for those of models."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

import w4gen
from w4gen.api import parse_shape, problem_of
from w4gen.bench.noise import impossible
from w4gen.commands.bundle import of_model
from w4gen.commands.question import as_json, asked, count, load_format, numbers, of_models, question, tell
from w4gen.errors import W4Error
from w4gen.ir.problem import Problem
from w4gen.layers import PRESETS, random_layers
from w4gen.tuned import Row


@click.command()
@question
@as_json
@click.option("--model", "models", multiple=True, help="config.json or a preset: tune all linear layers of a model; repeatable")
@click.option("--presets", is_flag=True, help=f"tune those of {', '.join(PRESETS)}")
@click.option("--random", "random", default=0, help="tune that many random layers, K and N in 64 … 32768, multiples of 8")
@click.option("--tp", default="1", help="with a model: shards of tensor parallelism, one or several, as in 1,2,4")
@click.option("--budget", default=60.0, show_default=True, type=click.FloatRange(min=0.0), help="seconds, in all")
@click.option("--again", is_flag=True, help="tune also what was tuned before on this GPU with this Triton")
def tune(
    as_json: bool, models: tuple[str, ...], presets: bool, random: int, tp: str, budget: float, again: bool, **options: Any
) -> None:
    """Time schedules on the GPU here and keep the fastest that are right; Ctrl-C keeps what is done, and a second run goes on.

    --format may list several, as in int4_g128,nf4_g64.
    """
    questions = wanted([*models, *(PRESETS if presets else ())], tp, options, random_layers(random))
    start = last = time.monotonic()
    rows = []
    for turn, (each, row, found) in enumerate(w4gen.tune(questions, budget, again), 1):
        skipped, now = len(found.skipped) if found else 0, time.monotonic()
        facts = {"question": str(each.problem), "row": row.facts() if row else None, "skipped": skipped}
        wrong = impossible(row) if row else []
        rows.append(facts | {"seconds": round(now - last, 2), "measuring_errors": wrong})
        if not as_json:
            verdict = timed(row) if row else told(found)
            at = f"{each.m}x{each.problem.k}x{each.problem.n} {each.problem.format.label}"
            spent = f"{now - last:.1f} s; {max(0.0, budget - now + start):.0f} s left"
            click.echo("\n".join([f"{turn}/{len(questions)} {at}: {verdict}, {skipped} skipped, {spent}", *wrong]))
        last = now
    if as_json:
        tell(rows)
    elif len(rows) < len(questions):
        click.echo(f"{count(len(questions) - len(rows), 'question')} left: run it again to go on")


def timed(row: Row) -> str:
    """What a row came to."""
    return f"{row.us:.2f} us, rules {row.rules_us:.2f}, floor {row.floor_us:.2f}, {count(row.trials, 'trial')}"


def told(found: Any) -> str:
    """Why a question has no new row."""
    return "none was right, the rules answer" if found else "passed over: tuned before, or too large for the memory"


def wanted(models: Sequence[str], tp: str, options: dict[str, Any], layers: Sequence[str] = ()) -> list[tuple[Problem, int, int]]:
    """The problems that the options name, with the rows of x to time each with and how many layers have it.

    A row answers with a bias and without: layers of models are timed without.
    """
    if options["arch"] or options["layout"]:
        raise W4Error("tuning is for the GPU here, in the stored order that its kernels read: leave out --arch and --layout")
    forms = options["format_name"].split(",")
    if not models and not layers:
        if not any(options.get(name) for name in ("shape", "m", "k", "n", "problem")):
            raise W4Error("nothing to tune: give --shape MxKxN, --model config.json, --presets, or --random 12")
        return [(problem, rows, 1) for problem, _, rows in (asked(**options | {"format_name": form}) for form in forms)]
    of_models(options)
    rows_of_x, found = options["m"] or "1,16,256", dict[Problem, tuple[int, int]]()
    for layer, form, m in itertools.product(layers, map(load_format, forms), numbers(rows_of_x, "m")):
        _, k, n = parse_shape(f"1x{layer}")
        found[problem_of(m=m, n=n, k=k, format=form, dtype_name=options["dtype"])] = m, 1
    for form, model in itertools.product(map(load_format, forms), models):
        for problem, (layer, rows) in of_model(Path(model), tp, rows_of_x, form, options["dtype"]).items():
            alike = replace(problem, bias=False)
            found[alike] = rows, layer.count + found.get(alike, (rows, 0))[1]
    return [(problem, rows, layers) for problem, (rows, layers) in found.items()]
