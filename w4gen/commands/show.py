"""`w4gen show`: what is behind a kernel, step by step."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from w4gen.commands.question import answer, as_json, asked, question, tell, trial
from w4gen.ir.lower import lower
from w4gen.ir.show import show as show_program


@click.command()
@click.argument("what", type=click.Choice(["ir", "schedule", "kernel"]))
@question
@trial
@as_json
def show(what: str, as_json: bool, schedule: str, templates: Path | None, **options: Any) -> None:
    """Show the program (ir), the schedule or the text of a kernel."""
    problem, arch, _ = asked(**options)
    kernel = answer(problem, arch, schedule, templates)
    chosen, text = kernel.schedule, kernel.source
    if what == "ir":
        facts = {"logical": show_program(lower(problem)), "schedule": str(chosen), "scheduled": show_program(kernel.program)}
        text = "logical\n{logical}\n\nscheduled: {schedule}\n{scheduled}".format(**facts)
    elif what == "schedule":
        facts, text = {field.name: getattr(chosen, field.name) for field in fields(chosen)}, str(chosen)
    else:
        facts = {"name": kernel.name, "source": text, "functions": {piece.name: list(piece.arguments) for piece in kernel.pieces}}
    if as_json:
        tell(facts)
    else:
        click.echo(text, nl=what != "kernel")
