"""`w4gen explain`: the path that a shape takes, and why not another."""

from __future__ import annotations

from typing import Any

import click

from w4gen import pipeline
from w4gen.commands.question import (
    STORED,
    aligned,
    answer,
    as_json,
    asked,
    because,
    count,
    formula,
    picked,
    question,
    table,
    tell,
)
from w4gen.errors import W4Error
from w4gen.ir.layout import Layout, dense
from w4gen.ir.lower import lower
from w4gen.ir.problem import Problem
from w4gen.ir.program import Program
from w4gen.ir.tile import Input
from w4gen.ir.types import F32
from w4gen.schedule.arch import Arch
from w4gen.schedule.cost import bounds_us, bytes_moved, matrix_us, operations, traffic
from w4gen.schedule.rewrite import pack
from w4gen.schedule.rules import ways
from w4gen.schedule.schedule import Schedule
from w4gen.schedule.space import Candidate, candidates, judged
from w4gen.schedule.stored import decoded, layout_of, layouts_for

TRIED = (
    "scale_at=weight zero_at=weight", "scale_at=accumulator", "zero_at=weight", "zero_at=accumulator", "split_k=1", "split_k=4",
)  # fmt: skip
"""Changes of the picked schedule that are tried one by one."""


@click.command()
@question
@as_json
@click.option("--all", "every", is_flag=True, help="show every candidate, not only the first of each kind")
def explain(as_json: bool, every: bool, **options: Any) -> None:
    """Show the path that a shape takes, kernel or fallback, and why others were refused."""
    problem, arch, rows = asked(**options)
    facts = explained(problem, arch, rows)
    facts |= ranked(problem, arch, Schedule.parse(facts["schedule"]), rows, every, facts["chosen"])
    if as_json:
        tell(facts)
        return
    click.echo(told(facts, problem, arch, rows))
    click.echo()
    cells = [(each["order"], f"{each['bytes']:,}", f"{each['operations']:.2f}", each["verdict"]) for each in facts["orders"]]
    table("codes stored as", "bytes", "operations to decode one", "", rows=cells)
    click.echo()
    table("other ways", "", "why", rows=[(each["change"], each["verdict"], each["why"]) for each in facts["others"]])
    click.echo()
    cells = [(each["schedule"], *((f"{each['us']:.2f}", each["bound_by"]) if each["us"] else ("-", "-")), each["why"])
             for each in facts["candidates"]]  # fmt: skip
    table("candidates", "predicted us", "bound by", "", rows=cells)
    click.echo(f"{facts['legal']} of {facts['tried']} schedules are legal; times are those of a model and rank them")


def explained(problem: Problem, arch: Arch, rows: int) -> dict[str, Any]:
    """Everything that `explain` tells, by name; units are in the names."""
    schedule, chosen = picked(problem, arch)
    why = ""
    try:
        kernel = answer(problem, arch)
        program, schedule = kernel.program, kernel.schedule
        moved, bounds = traffic(program, rows), bounds_us(program, arch, rows)
    except W4Error as error:
        why = str(error)
        program = pack(lower(problem), layout_of(problem, arch))
        moved, bounds = fallback_traffic(program, rows), {"matrix": matrix_us(problem, arch, rows)} if arch.matrix_tflops else {}
        bounds["bytes"] = sum(moved.values()) / arch.bandwidth_gbs / 1e3
    stored = program.tile("codes.stored").layout
    taken = judged(lower(problem), schedule, arch, rows).prediction if not why else None
    return {
        "m": list(problem.m),
        "n": problem.n,
        "k": problem.k,
        "format": problem.format.label,
        "x": problem.x.name,
        "arch": arch.name,
        "path": "fallback" if why else "kernel",
        "why": why,
        "schedule": str(schedule),
        "chosen": chosen,
        "program": {} if why else brief(program),
        "bytes": moved,
        "bounds_us": {name: round(us, 3) for name, us in bounds.items()},
        "bottleneck": taken.bottleneck if taken else max(bounds, key=lambda name: bounds[name]),
        "predicted_us": round(taken.us, 3) if taken else None,
        "padding": round(stored.padding(n=problem.n, k=problem.k), 4) if stored else 0.0,
        "padded_n": stored.size("n") if stored else problem.n,
        "padded_k": stored.size("k") if stored else problem.k,
        "orders": orders(problem, stored),
        "others": others(problem, arch, schedule, rows),
    }


SHOWN, REFUSED = 6, 3
"""Candidates of each kind that are shown."""


def ranked(problem: Problem, arch: Arch, schedule: Schedule, rows: int, every: bool, chosen: str) -> dict[str, Any]:
    """Schedules that the hardware offers, with predicted times: the one taken, the first or all others, and those refused."""
    found = candidates(lower(problem), arch, rows)
    legal = [each for each in found if not each.refused]
    refused = [each for each in found if each.refused]
    own = judged(lower(problem), schedule, arch, rows)
    shown = [each for each in legal if each.schedule != schedule]
    if not every:
        shown, refused = shown[:SHOWN], list({each.refused: each for each in refused}.values())[:REFUSED]
    told = [{"schedule": "as it is", **_predicted(own, own, chosen)}] + [
        {"schedule": changes(each.schedule, schedule), **_predicted(each, own, chosen)} for each in (*shown, *refused)
    ]
    return {"tried": len(found), "legal": len(legal), "candidates": told}


def _predicted(each: Candidate, own: Candidate, chosen: str) -> dict[str, Any]:
    """What the model says of a candidate, and why it is not the one taken."""
    if each.prediction is None:
        return {"us": None, "bound_by": "", "why": f"refused: {each.refused}"}
    facts = each.prediction
    filled = f"{facts.waves:.2f} waves of {count(facts.resident, 'program')} an SM, {facts.busy:.0%} busy"
    against = "" if each is own or own.prediction is None else f", {lost(each.us / own.us, chosen)}"
    return {"us": round(each.us, 3), "bound_by": facts.bottleneck, "why": filled + against}


def lost(ratio: float, chosen: str) -> str:
    """Why a candidate is not taken, for which a model predicts so many times the time of the one taken."""
    told = f"predicted {ratio:.2f} times the one taken"
    if round(ratio, 2) >= 1:
        return told
    who = "that one was found by timing" if chosen == STORED else "the rules, which were fitted to timings, chose otherwise"
    return f"{told}: the model has it faster, but {who}"


def changes(schedule: Schedule, own: Schedule) -> str:
    """The fields in which a schedule is not the one taken."""
    return " ".join(sorted(set(str(schedule).split()) - set(str(own).split()), key=str(schedule).index))


def orders(problem: Problem, stored: Layout | None) -> list[dict[str, Any]]:
    """What each stored order of the codes costs: bytes, and word operations that decode one code in f32."""
    form, n, k = problem.format, problem.n, problem.k
    read, found = layouts_for(form, n, k), []
    for layout in dict.fromkeys(([stored] if stored else []) + read + [dense(n, k, form.bits)]):
        verdict = "taken" if layout == stored else "" if layout in read else "as checkpoints hold it; no kernel reads it"
        cost = operations(layout, decoded(form, F32, layout))
        way = {"order": str(layout), "bytes": 4 * layout.length, "operations": round(cost, 2), "verdict": verdict}
        found.append(way)
    return found


def fallback_traffic(program: Program, rows: int) -> dict[str, int]:
    """Bytes by tile, with the weight in x's type, which is written and read again."""
    problem = program.problem
    return bytes_moved(program, rows) | {"weight dequantized": 2 * problem.n * problem.k * problem.x.bits // 8}


def brief(program: Program) -> dict[str, list[str]]:
    """The per-call operations on each operand's path, in order; `y` has those on the sums."""
    paths: dict[str, list[str]] = {}
    for name in program.per_call:
        if not isinstance(program.op(name), Input):
            paths.setdefault(name.split(".")[0] if "." in name else "y", []).append(str(program.op(name)).strip())
    return paths


def others(problem: Problem, arch: Arch, schedule: Schedule, rows: int) -> list[dict[str, str]]:
    """The other ways that the rules know, and schedules near the one picked: their bound, or why they are refused."""
    program = lower(problem)
    asked = {f"template={way.template} unit={way.unit}": way for way in ways(program, arch) if way.template != schedule.template}
    asked |= {change: Schedule.parse(f"{schedule} {change}") for change in TRIED}
    found = []
    for change, other in asked.items():
        if other != schedule:
            verdict, why = tried(program, other, arch, rows)
            found.append({"change": change, "verdict": verdict, "why": why})
    return found


def tried(program: Program, schedule: Schedule, arch: Arch, rows: int) -> tuple[str, str]:
    """Whether a schedule is legal, and what a model predicts for it or why it is not."""
    try:
        pipeline.made(program, schedule, arch)
    except W4Error as error:
        return "refused", str(error)
    found = judged(program, schedule, arch, rows)
    if found.prediction is None:
        return "refused", found.refused
    return "accepted, not picked", f"predicted {found.us:.2f} us, bound by {found.prediction.bottleneck}"


def told(facts: dict[str, Any], problem: Problem, arch: Arch, rows: int) -> str:
    """The facts in words."""
    n, k = problem.n, problem.k
    bounds = facts["bounds_us"]
    kernel = facts["path"] == "kernel"
    path = "a generated kernel" if kernel else f"the fallback, dequantize then multiply by PyTorch: {facts['why']}"
    held = f"codes [{n}, {k}] are stored as [{facts['padded_n']}, {facts['padded_k']}]"
    waste = f"{facts['padding']:.1%}: {held}" if facts["padding"] else "none"
    rates = ", ".join(f"{name} {us:.2f} us" for name, us in bounds.items())
    moved = ", ".join(f"{name} {size:,}" for name, size in facts["bytes"].items())
    chosen = because(facts["chosen"], problem)
    predicted = f": a model predicts {facts['predicted_us']:.2f} us" if facts["predicted_us"] else ""
    lines = [
        ("asked", formula(problem, rows)),
        ("format", f"{facts['format']}, x and y in {facts['x']}, sums in {problem.accumulate}"),
        ("arch", str(arch)),
        ("path", path),
        *((("schedule", facts["schedule"]), ("why", chosen)) if kernel else (("tried", facts["schedule"]),)),
        *(("per call", f"{operand}: {' -> '.join(operations)}") for operand, operations in facts["program"].items()),
        ("moves", f"{sum(facts['bytes'].values()):,} bytes a call: {moved}"),
        ("padding", waste),
        ("bounds", f"{rates}: no call takes less on {arch.board}, at data sheet rates"),
        ("bound by", f"{facts['bottleneck']}{predicted}"),
    ]
    return aligned(lines)
