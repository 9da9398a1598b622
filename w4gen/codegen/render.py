"""`render(program, schedule)`: a template, filled with the nodes of one kernel, each printed exactly once."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2

from w4gen import paths
from w4gen.codegen import tl
from w4gen.codegen.blocks import GemmPrinter
from w4gen.codegen.dense import DensePrinter, GradientPrinter
from w4gen.codegen.fast import HalfPrinter, MmaPrinter
from w4gen.codegen.printer import Printer
from w4gen.codegen.turned import TurnedPrinter
from w4gen.codegen.wgmma import WgmmaPrinter
from w4gen.errors import ShapeError, TemplateError
from w4gen.formats import is_named
from w4gen.ir.lower import lower
from w4gen.ir.problem import EVERY, Problem
from w4gen.ir.program import Program
from w4gen.ir.tile import Space
from w4gen.schedule.apply import apply
from w4gen.schedule.arch import ARCHES, GRID
from w4gen.schedule.arch import arch as arch_named
from w4gen.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Piece:
    """One function of a kernel's text: its arguments in order, and per grid axis what it runs along and by how much."""

    name: str
    arguments: tuple[str, ...]
    grid: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, repr=False)
class Kernel:
    """The text of a kernel and what its launch needs: its functions, run in order (then, for a vendor's matmul, that)."""

    name: str
    source: str
    pieces: tuple[Piece, ...]
    problem: Problem
    schedule: Schedule
    program: Program

    def programs(self, piece: Piece, m: int, n: int = 0) -> tuple[int, int, int]:
        """The grid of a function for `m` rows of x (and the first `n` outputs only)."""
        whole = self.problem.n
        extents = {"m": m, "n": n or whole, "k": self.problem.k, "part": self.schedule.split_k, "y": m * self.problem.outputs}
        counts = [-(-extents[axis] // size) for axis, size in piece.grid]
        for (axis, _), count in list(zip(piece.grid, counts))[1:]:
            if count > GRID:
                raise ShapeError(f"{axis}={extents[axis]} is {count} programs of {piece.name}, a grid has {GRID} there: split it")
        return (*counts, 1, 1)[:3]  # type: ignore[return-value]

    def __repr__(self) -> str:
        return f"<kernel {self.name} of {len(self.pieces)} functions: {self.problem} | {self.schedule}>"


@lru_cache(maxsize=8)
def environment(folder: Path) -> jinja2.Environment:
    """Templates that parse as Python: block marks are comments, and a lone `{{ call() }}` keeps its indentation.

    Where Python has no place for an expression, among arguments, the call is a comment too: `#{{ weights() }}`.
    """

    class Loader(jinja2.FileSystemLoader):
        def get_source(self, env: jinja2.Environment, template: str) -> Any:
            text, name, fresh = super().get_source(env, template)
            return (
                re.sub(r"(?m)^( *)#?\{\{ (.*) \}\}$", lambda m: f"{m[1]}{{{{ ({m[2]}) | indent({len(m[1])}) }}}}", text),
                name,
                fresh,
            )

    return jinja2.Environment(
        loader=Loader(folder),
        undefined=jinja2.StrictUndefined,
        block_start_string="#{%",
        comment_start_string="#{#",
        comment_end_string="#}",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


PRINTERS = {
    "gemv": Printer,
    "gemm": GemmPrinter,
    "dequant": DensePrinter,
    "gemv_mma": MmaPrinter,
    "gemv_half": HalfPrinter,
    "gemm_wgmma": WgmmaPrinter,
    "dgrad": GradientPrinter,
    "dgrad_wgmma": TurnedPrinter,
}
"""What fills each template."""


def render(program: Program, schedule: Schedule, arch: str, folder: Path | None = None) -> Kernel:
    """The kernel of a scheduled program. Raises `TemplateError` where the template does not print just that program."""
    name = f"{schedule.template}.py.jinja"
    if schedule.template not in PRINTERS:
        raise TemplateError(f"no printer for a template {schedule.template}: there are {', '.join(PRINTERS)}")
    printer = PRINTERS[schedule.template](program, schedule, arch_named(arch).features)
    problem = program.problem
    printer.schedule.warps, printer.schedule.stages, printer.schedule.maxnreg  # noqa: B018  the launch reads these
    try:
        template = environment(folder or paths.templates()).get_template(name)
        text = template.render(
            header=_header(problem, schedule, arch),
            facts=_facts(program, schedule),
            problem=problem,
            program=program,
            schedule=printer.schedule,
            flat=FLAT,
            has=lambda tile: tile in program.graph,
            tables=[name for name in program if name.endswith("codebook")],
            **printer.calls(),
        )
    except jinja2.TemplateNotFound as error:
        raise TemplateError(f"there is no template {error.name} in {folder or paths.templates()}") from error
    except jinja2.TemplateError as error:
        raise TemplateError(f"{name}: {error}") from error
    printer.settle(name)
    source = re.sub(r"(?m)^ +\n", "", text)  # a call that prints nothing leaves its indentation
    return _kernel(source, program, schedule)


def _arguments(source: str, name: str, program: Program, nodes: list[str]) -> tuple[str, ...]:
    """The arguments of the function `name` in `source`; they must be the tiles that its nodes share with memory."""
    function = next((n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == name), None)
    if function is None:
        raise TemplateError(f"the text defines no function {name}")
    found = [argument.arg for argument in function.args.args]
    read = {source for node in nodes for source in program.operands(node).values() if source not in nodes}
    shared = read | {node for node in nodes if program.tile(node).space is Space.GLOBAL}
    tiles = {tl.pointer(program, tile) for tile in shared}
    if set(found) - {"m_count"} != tiles:
        raise TemplateError(f"{name} takes {', '.join(found)}; its nodes use {', '.join(sorted(tiles))}")
    return tuple(found)


def read(source: str) -> Kernel:
    """The kernel that a rendered text holds. Raises `TemplateError` where it names no problem and schedule."""
    named = {node.targets[0].id: node.value for node in ast.parse(source).body if isinstance(node, ast.Assign)}  # type: ignore[attr-defined]
    if not {"PROBLEM", "SCHEDULE"} <= set(named):
        raise TemplateError("this text is not one that w4gen rendered: it assigns no PROBLEM and SCHEDULE")
    problem = Problem.parse(ast.literal_eval(named["PROBLEM"]))
    schedule = Schedule.parse(ast.literal_eval(named["SCHEDULE"]))
    program = apply(lower(problem), schedule, ARCHES["portable"])
    return _kernel(source, program, schedule)


GRIDS = {
    "gemv": ("n", "m"),
    "gemm": ("m", "n", "part"),
    "gemv_mma": ("n", "m"),
    "gemv_half": ("n",),
    "gemm_wgmma": ("m", "n", "part"),
    "dequant": ("k", "n"),
    "dgrad": ("m", "k"),
    "dgrad_wgmma": ("m", "k"),
    "add_parts": ("y",),
}
"""What the grid axes of a template's functions run along."""

FLAT = 1024
"""Elements of y that one program adds up."""


def _kernel(source: str, program: Program, schedule: Schedule) -> Kernel:
    blocks = {"m": schedule.block_m, "n": schedule.block_n, "k": schedule.block_k, "part": 1, "y": FLAT}
    pieces = []
    for name, names in zip((schedule.template, "add_parts"), program.ours, strict=False):
        grid = tuple((axis, blocks[axis]) for axis in GRIDS[name])
        pieces.append(Piece(name, _arguments(source, name, program, names), grid))
    return Kernel(schedule.template, source, tuple(pieces), program.problem, schedule, program)


def _facts(program: Program, schedule: Schedule) -> str:
    """The problem, its layout included, and the schedule: enough to check the text, wherever it is."""
    layout = program.tile("codes.stored").layout
    return f'PROBLEM = "{replace(program.problem, layout=layout)}"\nSCHEDULE = "{schedule}"'


def _header(problem: Problem, schedule: Schedule, arch: str) -> str:
    low, high = problem.m
    n, k, form = problem.n, problem.k, problem.format
    m = str(low) if low == high else f"{low}..{high}"
    asked = f"--m {high} --n {n} --k {k} --format {form.label if is_named(form) else repr(str(form))} --dtype {problem.x}"
    asked += " --bias" if problem.bias else ""
    if problem.m == EVERY or problem.epilogue or problem.gradient:
        asked = f"--problem '{replace(problem, layout=None)}'"
    said = f"dx[{m}, {k}] = dy[{m}, {n}] @ w[{n}, {k}]" if problem.gradient else f"y[{m}, {n}] = x[{m}, {k}] @ w[{n}, {k}].T"
    return "\n".join(
        [
            f"# {said} · {form.label} · {problem.x} · {schedule}",
            f"# made by: w4gen compile {asked} --arch {arch} --emit py",
        ]
    )
