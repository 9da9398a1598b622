"""`w4gen formats`: the built-in families, and what they cost."""

from __future__ import annotations

import click

from w4gen.bench.formats import HINT, described
from w4gen.commands.question import as_json, table, tell
from w4gen.formats import FAMILIES, USERS


@click.command()
@as_json
def formats(as_json: bool) -> None:
    """List the built-in formats: what they mean, what they cost, who uses them."""
    rows = [described(form, USERS.get(form.name, "")) for form in FAMILIES.values()]
    if as_json:
        tell(rows)
        return
    names = ("format", "bits", "decoded by", "group", "scale", "zero", "bits a weight", "ops f16", "ops bf16", "used by")
    table(*names, rows=[["-" if value is None else str(value) for value in row.values()] for row in rows])
    click.echo(f"\n{HINT}")
