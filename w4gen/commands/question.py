"""What the commands share: the options that say which kernel is meant, and how facts are told."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from w4gen import api, cache, knobs, paths, pipeline
from w4gen.codegen.render import Kernel
from w4gen.errors import ScheduleError, ShapeError, W4Error
from w4gen.ir.lower import lower
from w4gen.ir.problem import Problem
from w4gen.ir.types import Format
from w4gen.schedule import arch as arches
from w4gen.schedule.rules import pick
from w4gen.schedule.schedule import Schedule
from w4gen.schedule.stored import fragment_order, layout_for
from w4gen.toolchain import able

SHAPE_HELP = "MxKxN: tokens x inputs x outputs (1x1536x256 is one token through a 1536 -> 256 projection)"


def question(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say which kernel is meant."""
    for option in (
        click.option(
            "--arch", default="", help=f"one of {', '.join(arches.ARCHES)}; default: W4GEN_ARCH, the GPU here, else portable"
        ),
        click.option(
            "--layout",
            type=click.Choice(["rows", "fragment"]),
            help="stored order of the codes, in place of the one picked: rows, or as the arch's matrix instruction takes them",
        ),
        click.option(
            "--problem", help="the whole question as str(Problem) writes it, in place of the options from --shape to --bias"
        ),
        click.option("--bias", is_flag=True, help="add a bias"),
        click.option("--dtype", default="float16", show_default=True, help="of x and y: float16 or bfloat16"),
        click.option(
            "--format", "format_name", default="int4_g128", show_default=True, help="int4_g128, nf4_g64 …, or FILE.py:NAME"
        ),
        click.option("--n", type=int, help="outputs (out_features)"),
        click.option("--k", type=int, help="inputs (in_features)"),
        click.option("--m", help="rows of x (tokens); of a whole model several, as in 1,16"),
        click.option("--shape", help=SHAPE_HELP),
    ):
        command = option(command)
    return command


def trial(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that try another schedule or template than the one picked."""
    for option in (
        click.option("--templates", type=click.Path(path_type=Path), help="folder of templates to take in place of w4gen's own"),
        click.option("--schedule", default="", help="changes to the picked schedule, as in block_n=64,warps=4"),
    ):
        command = option(command)
    return command


as_json = click.option("--json", "as_json", is_flag=True, help="print facts as JSON")


def asked(
    shape: str | None,
    m: str | None,
    k: int | None,
    n: int | None,
    format_name: str,
    dtype: str,
    bias: bool,
    arch: str,
    layout: str | None,
    problem: str | None = None,
) -> tuple[Problem, arches.Arch, int]:
    """The problem, the arch and the rows of x that the options name. Raises `W4Error`."""
    if problem is not None:
        if shape is not None or (m, k, n) != (None, None, None) or bias or layout:
            raise ShapeError("--problem says all that --shape, --m --k --n, --bias and --layout do: leave them out")
        whole = Problem.parse(problem)
        return whole, arches.arch(arch or knobs.ARCH.read() or detected()), whole.m[0]
    if shape is not None and (m, k, n) != (None, None, None):
        raise ShapeError("--shape and --m --n --k both say the sizes: give one of the two")
    if shape is None and None in (m, k, n):
        raise ShapeError(f"no shape: give --shape {SHAPE_HELP}, or --m, --n and --k")
    sizes = api.parse_shape(shape) if shape is not None else (*numbers(m or "", "m", 1), k, n)
    form = load_format(format_name)
    made = api.problem_of(
        m=int(sizes[0] or 0), k=int(sizes[1] or 0), n=int(sizes[2] or 0), format=form, dtype_name=dtype, bias=bias
    )
    where, rows = arches.arch(arch or knobs.ARCH.read() or detected()), int(sizes[0] or 0)
    if layout == "fragment":
        if where.fragment is None:
            raise ScheduleError(f"{where.name} has no matrix fragment that w4gen knows: name an arch that has, as --arch sm_80")
        made = replace(made, layout=fragment_order(made.format, where.fragment, made.n, made.k))
    elif layout == "rows":
        made = replace(made, layout=layout_for(made.format, replace(where, fragment=None), made.n, made.k))
    return made, where, rows


def of_models(options: Mapping[str, Any]) -> None:
    """Raises `ShapeError` where options that name one layer stand beside what names many."""
    single = [name for name in ("shape", "n", "k", "layout", "bias", "problem") if options.get(name)]
    if single:
        raise ShapeError(f"--{single[0]} is of one layer and --model names all of one: give one of the two")


def numbers(text: str, option: str, most: int = 99) -> list[int]:
    """The whole numbers that an option lists, as in `1,16`. Raises `ShapeError` on anything else, and on more than `most`."""
    parts = text.split(",")
    if not all(re.fullmatch(r"-?\d+", part.strip()) for part in parts):
        raise ShapeError(f"--{option} {text!r} is not a whole number{' or several, as in 1,16' if most > 1 else ''}")
    if len(parts) > most:
        raise ShapeError(f"--{option} {text} is more than one: only a whole model (--model) takes several")
    return [int(part) for part in parts]


def detected() -> str:
    """The arch of the GPU here, asked of the driver's own tool so that torch need not be imported; else `portable`."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "portable"
    done = subprocess.run([tool, "--query-gpu=compute_cap", "--format=csv,noheader"], capture_output=True, text=True, check=False)
    major, _, minor = done.stdout.splitlines()[0].strip().partition(".") if done.returncode == 0 and done.stdout else ("", "", "")
    return arches.for_capability(int(major), int(minor)).name if major.isdigit() and minor.isdigit() else "portable"


def load_format(name: str) -> str | Format:
    """A format's name, or the `Format` called NAME in FILE.py. Raises `W4Error` where the file or the name is not there."""
    path, colon, variable = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        return name
    if not Path(path).is_file():
        raise W4Error(f"no file {path}: give --format FILE.py:NAME with a file that defines NAME = w4gen.Format(...)")
    try:
        scope = runpy.run_path(path)
    except Exception as error:  # the file is the user's: whatever it raises is one line that names it
        raise W4Error(f"{path} does not run: {type(error).__name__}: {error}") from error
    found = scope.get(variable)
    if not isinstance(found, Format):
        known = [key for key, value in scope.items() if isinstance(value, Format)]
        raise W4Error(f"{path} defines no Format called {variable}: it defines {', '.join(known) or 'none'}")
    return found


def formula(problem: Problem, rows: int) -> str:
    """What is computed, as a formula and in words."""
    n, k = problem.n, problem.k
    what = f"{count(rows, 'token')} through a {k} -> {n} projection"
    if problem.gradient:
        return f"dx[{rows}, {k}] = dy[{rows}, {n}] · w: the gradient of {what}"
    return f"y[{rows}, {n}] = x[{rows}, {k}] · wᵀ: {what}"


STORED = "stored by tuning"


def picked(problem: Problem, arch: arches.Arch) -> tuple[Schedule, str]:
    """The schedule that a compile starts from, and who chose it."""
    stored = pipeline.winner(lower(problem), arch)
    return (stored.schedule, STORED) if stored else (pick(lower(problem), able(arch)), "the rules' choice")


def because(chosen: str, problem: Problem) -> str:
    """Who chose a schedule, for which M, and whether anything was timed for it."""
    timed = "" if chosen == STORED else " (nothing was timed)"
    return f"{chosen} for M={problem.m[0]}..{problem.m[1]}{timed}"


def answer(problem: Problem, arch: arches.Arch, schedule: str = "", templates: Path | None = None) -> Kernel:
    """The kernel of a problem, with `schedule` changed as in `block_n=64,warps=4` and rendered from the folder `templates`.

    Its second line is the command that makes it again, these two included. Raises `W4Error` where there is none.
    """
    if not schedule and templates is None:
        return pipeline.compile(problem, arch)
    chosen = Schedule.parse(f"{picked(problem, arch)[0]} {schedule.replace(',', ' ')}")
    if templates is not None and not (templates / f"{chosen.template}.py.jinja").is_file():
        has = ", ".join(sorted(path.name for path in templates.glob("*.py.jinja"))) or "no template"
        raise W4Error(
            f"no {chosen.template}.py.jinja in {templates}, which has {has}: copy one of {paths.templates()} there and change it"
        )
    kernel = pipeline.made(lower(problem), chosen, arch, templates)
    given = ["--schedule", schedule] * bool(schedule) + ["--templates", str(templates)] * (templates is not None)
    source = kernel.source.replace(" --emit py\n", f" {shlex.join(given)} --emit py\n", 1)
    return cache.store(replace(kernel, source=source))


def count(number: int, what: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def tell(facts: Any) -> None:
    """Print facts as JSON."""
    click.echo(json.dumps(facts, indent=1, ensure_ascii=False))


def aligned(lines: Iterable[tuple[str, str]]) -> str:
    """Names and what is to be said of them, in two columns."""
    return "\n".join(f"{name:>9}  {text}".rstrip() for name, text in lines)


def table(*columns: str, rows: Iterable[Iterable[str]]) -> None:
    """Print a table; cells are texts, not markup. Long ones wrap on a terminal and stay whole in a pipe."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    made = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        made.add_row(*map(Text, row))
    console = Console(width=None if sys.stdout.isatty() else 1000)
    with console.capture() as captured:
        console.print(made)
    click.echo("\n".join(map(str.rstrip, captured.get().splitlines())))
