"""`w4gen show`: what is behind a kernel, step by step."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from w4gen import api
from w4gen.commands.question import answer, as_json, asked, picked, question, tell, trial
from w4gen.ir.lower import lower
from w4gen.ir.show import show as show_program
from w4gen.schedule.rules import apply


@click.command()
@click.argument("what", type=click.Choice(["ir", "schedule", "kernel"]))
@question
@trial
@as_json
def show(what: str, as_json: bool, schedule: str, templates: Path | None, **options: Any) -> None:
    """Show the program (ir), the schedule or the text of a kernel."""
    problem, arch, _ = asked(**options)
    if what == "ir" and not schedule and templates is None and api.refusal(problem, arch):
        # no template yet, but the program can be looked at
        chosen = picked(problem, arch)[0]
        program = apply(lower(problem), chosen, arch)
        text = ""
    else:
        kernel = answer(problem, arch, schedule, templates)
        chosen, program, text = kernel.schedule, kernel.program, kernel.source
    if what == "ir":
        facts = {"logical": show_program(lower(problem)), "schedule": str(chosen), "scheduled": show_program(program)}
        text = "logical\n{logical}\n\nscheduled: {schedule}\n{scheduled}".format(**facts)
    elif what == "schedule":
        facts, text = {field.name: getattr(chosen, field.name) for field in fields(chosen)}, str(chosen)
    else:
        facts = {"name": kernel.name, "source": text, "functions": {piece.name: list(piece.arguments) for piece in kernel.pieces}}
    if as_json:
        tell(facts)
    else:
        click.echo(text, nl=what != "kernel")
