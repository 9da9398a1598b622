"""`render(program, schedule)`: a template, filled with the nodes of one kernel, each printed exactly once."""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import dataclass, fields, replace
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

import jinja2

from w4gen import paths
from w4gen.codegen import tl
from w4gen.codegen.index import suffixed
from w4gen.errors import TemplateError
from w4gen.formats import FAMILIES
from w4gen.ir.lower import lower
from w4gen.ir.problem import Problem
from w4gen.ir.program import Program
from w4gen.ir.tile import Convert, Input, Reduce, Slice
from w4gen.schedule.arch import ARCHES
from w4gen.schedule.rewrite import GROUPED
from w4gen.schedule.rules import apply
from w4gen.schedule.schedule import IN_PROGRAM, Schedule


@dataclass(frozen=True, slots=True, repr=False)
class Kernel:
    """The text of a kernel and what its launch needs: one program per `grid`, arguments in this order, then m."""

    name: str
    source: str
    arguments: tuple[str, ...]
    grid: int
    problem: Problem
    schedule: Schedule
    program: Program

    def __repr__(self) -> str:
        return f"<kernel {self.name}, {self.grid} programs: {self.problem} | {self.schedule}>"


class Choices:
    """The schedule as a template sees it: remembers which fields were read."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self.read = schedule, set(IN_PROGRAM)

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self._schedule, name)


class Printer:
    """What a template can call. Every call prints the nodes on one operand's path and enters them in the ledger."""

    def __init__(self, program: Program, schedule: Schedule) -> None:
        self.program, self.schedule = program, Choices(schedule)
        self.ledger: Counter[str] = Counter()
        dot = program.operands("part")
        self.chains = {"w": tl.chain(program, dot["w"]), "x": tl.chain(program, dot["x"])}
        for role in GROUPED:
            for name in (name for name in program if role in program.operands(name)):
                self.chains[role] = tl.chain(program, program.operands(name)[role])
        if "codebook" in program.graph:
            self.chains["codebook"] = ["codebook.tile"]
        self.spans = program.tile("part").sizes.get("span", 1)
        self.out = list(program)[-1]
        self.blocks = self.agreed_blocks()

    def agreed_blocks(self) -> dict[str, int]:
        """Elements of a block along each axis, which every tile of the kernel must share."""
        blocks: dict[str, int] = {}
        for name in self.program.of(Slice):
            for block in self.program.op(name).blocks:  # type: ignore[union-attr]
                if block.loop and blocks.setdefault(block.axis, block.size) != block.size:
                    raise TemplateError(f"{name} takes {block.size} along {block.axis}, the tiles before it {blocks[block.axis]}")
        return blocks

    def calls(self) -> dict[str, Any]:
        names = ("constants", "magic", "load", "decode", "zeros", "dot", "scale", "reduce", "store")
        return {name: getattr(self, name) for name in names}

    def constants(self) -> str:
        """Sizes of the problem and of its tiles, as constants."""
        program, w, blocks = self.program, self.program.tile("w.tile").sizes, self.blocks
        walked = "lane" if "lane" in blocks else "word"
        codes = program.tile("w.codes").sizes["code"] * self.spans
        steps = -(-program.tile(program.source("w.tile")).sizes[walked] // blocks[walked])
        rows = [
            ("N", program.tile(self.out).sizes["n"], "outputs"),
            ("K", program.tile("x").sizes["k"], "inputs"),
            ("BLOCK_M", blocks["m"], "rows of x per program"),
            ("BLOCK_N", blocks["n"], "outputs per program"),
            (f"{walked.upper()}S", w[walked], f"{walked}s per step, {blocks[walked] * w.get('quad', 1) * codes} k in all"),
            *([("QUAD", w["quad"], "words of a lane")] if "quad" in w else []),
            ("STEPS", steps, "steps along k"),
            ("SPANS", self.spans, "stretches of a word's codes under one scale"),
            ("CODES", program.tile("w.codes").sizes["code"], "codes of a stretch"),
        ]
        return "\n".join(f"{name} = tl.constexpr({value})  # {why}" for name, value, why in rows)

    def magic(self) -> str:
        """A constant that decoding needs in a register."""
        return "\n".join(tl.magic(self.program))

    def load(self, operand: str, extra: str = "") -> str:
        """Bring one block of `w`, `x`, `scale`, `zero` or `codebook` to registers; `extra` goes into the load as it is.

        A zero that a template has not loaded is loaded where it is first used.
        """
        names = self.chains[operand]
        last = max(index for index, name in enumerate(names) if isinstance(self.program.op(name), Slice))
        lines = self.view(names[: last + 1], f", {extra}" if extra else "")
        if operand != "w":
            lines += [line for name in names[last + 1 :] for line in self.node(name)]
        return "\n".join(lines)

    def decode(self, operand: str) -> str:
        """Turn the codes of `w` into values, up to their scale."""
        names = self.chains[operand]
        last = max(index for index, name in enumerate(names) if isinstance(self.program.op(name), Slice))
        rest = takewhile(lambda name: "scale" not in self.program.operands(name), names[last + 1 :])
        return "\n".join(line for name in rest for line in self.node(name))

    def zeros(self, loop: str, *names: str) -> str:
        """Sums over the turns of `loop` that start at zero; names that the program does not have are left out."""
        extents = {"m": "BLOCK_M", "n": "BLOCK_N", "word": "WORDS", "lane": "LANES", "quad": "QUAD"}
        lines = []
        for name in (name for name in names if name in self.program.graph):
            op, tile = self.program.op(name), self.program.tile(name)
            over = op.loop or op.over[0] if isinstance(op, Reduce) else op.over[-1]  # type: ignore[union-attr]
            if over != loop:
                raise TemplateError(f"{name} sums over {over}, the template starts it anew for each turn around {loop}")
            shape = ", ".join(extents[axis] for axis in tl.dims(self.program, tile))
            lines.append(f"{tl.variable(name)} = tl.zeros([{shape}], {tl.type_of(tile)})")
        return "\n".join(lines)

    def dot(self) -> str:
        """Multiply and add to the partial sums; add x to its own sum where the program has one."""
        return "\n".join(line for name in ("part", "x.sum") if name in self.program.graph for line in self.node(name))

    def scale(self, operand: str) -> str:
        """Apply the scale, and a zero that comes after it, to `w` or to the partial sums (`acc`)."""
        path = self.chains["w"] if operand == "w" else tl.chain(self.program, "acc")[len(self.chains["w"]) :]
        rest = dropwhile(lambda name: "scale" not in self.program.operands(name), path)
        scaling = takewhile(lambda name: isinstance(self.program.op(name), Convert), rest)
        return "\n".join(line for name in scaling for line in self.node(name))

    def reduce(self, *names: str) -> str:
        """Sums over axes of a tile, or over steps; names that the program does not have are left out."""
        return "\n".join(line for name in names if name in self.program.graph for line in self.node(name))

    def store(self) -> str:
        """Add the bias, round and write."""
        out, program = self.out, self.program
        lines, roles = [], program.operands(out)
        value, axes = tl.variable(roles["acc"]), tl.dims(program, program.tile(roles["acc"]))
        if "bias" in roles:
            lines += self.view(tl.chain(program, roles["bias"]))
            bias = suffixed(tl.variable(roles["bias"]), tl.dims(program, program.tile(roles["bias"])), axes)
            lines.append(f"{value} += {bias}.to(tl.float32)")
        m, n = (suffixed(axis, (axis,), axes) for axis in ("m", "n"))
        row, fits = (f"{m} * N + ", f"({m} < m_count) & ({n} < N)") if "m" in axes else ("", f"{n} < N")
        lines.append(f"tl.store(y_ptr + {row}{n}, {value}.to({tl.type_of(program.tile(out))}), mask={fits})")
        self.ledger[out] += 1
        return "\n".join(lines)

    def view(self, names: list[str], extra: str = "") -> list[str]:
        """One load through the slices, pads and maps `names`."""
        self.ledger.update(names)
        return tl.Walk(self.program, names[-1], self.spans).load(names[-1], extra)

    def node(self, name: str) -> list[str]:
        zero = self.program.operands(name).get("zero")
        lines = self.load("zero").splitlines() if zero and not self.ledger[zero] else []
        self.ledger[name] += 1
        return lines + tl.conversion(self.program, name)

    def settle(self, template: str) -> None:
        """Every per-call node printed exactly once, every choice of the schedule read. Raises `TemplateError`."""
        for name in self.program.per_call:
            if self.ledger[name] != (expected := 0 if isinstance(self.program.op(name), Input) else 1):
                raise TemplateError(
                    f"{template} prints {name} ({self.program.op(name)}) {self.ledger[name]} times, not {expected}"
                )
        for field in fields(Schedule):
            if field.name not in self.schedule.read and getattr(self.schedule._schedule, field.name) != field.default:
                raise TemplateError(f"{template} never reads {field.name} of the schedule: leave it at {field.default}")


def environment(folder: Path) -> jinja2.Environment:
    """Templates that parse as Python: block marks are comments, and a lone `{{ call() }}` keeps its indentation."""

    class Loader(jinja2.FileSystemLoader):
        def get_source(self, env: jinja2.Environment, template: str) -> Any:
            text, name, fresh = super().get_source(env, template)
            return (
                re.sub(r"(?m)^( *)\{\{ (.*) \}\}$", lambda m: f"{m[1]}{{{{ ({m[2]}) | indent({len(m[1])}) }}}}", text),
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


def render(program: Program, schedule: Schedule, arch: str, folder: Path | None = None) -> Kernel:
    """The kernel of a scheduled program. Raises `TemplateError` where the template does not print just that program."""
    name = f"{schedule.template}.py.jinja"
    printer = Printer(program, schedule)
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
            has=lambda tile: tile in program.graph,
            **printer.calls(),
        )
    except jinja2.TemplateNotFound as error:
        m = f"M={problem.m[1]}" if problem.m[0] == problem.m[1] else f"M={problem.m[0]}..{problem.m[1]}"
        raise TemplateError(f"{m} has no kernel yet, there is no {name}: such calls are dequantized and multiplied") from error
    except jinja2.TemplateError as error:
        raise TemplateError(f"{name}: {error}") from error
    printer.settle(name)
    source = re.sub(r"(?m)^ +\n", "", text)  # a call that prints nothing leaves its indentation
    return _kernel(source, program, schedule)


def _arguments(source: str, name: str, program: Program) -> tuple[str, ...]:
    """The arguments of the kernel called `name` in `source`; they must be the global tiles of the program."""
    kernel = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name)
    found = [argument.arg for argument in kernel.args.args]
    tiles = {"y_ptr", "m_count", *(tl.pointer(program, name) for name in program.kept + program.of(Input))}
    if set(found) != tiles:
        raise TemplateError(f"{name} takes {', '.join(found)}; the program has {', '.join(sorted(tiles))}")
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


def _kernel(source: str, program: Program, schedule: Schedule) -> Kernel:
    grid = -(-program.problem.n // schedule.block_n)
    name = schedule.template
    return Kernel(name, source, _arguments(source, name, program), grid, program.problem, schedule, program)


def _facts(program: Program, schedule: Schedule) -> str:
    """The problem, its layout included, and the schedule: enough to check the text, wherever it is."""
    layout = program.tile("codes.stored").layout
    return f'PROBLEM = "{replace(program.problem, layout=layout)}"\nSCHEDULE = "{schedule}"'


def _header(problem: Problem, schedule: Schedule, arch: str) -> str:
    low, high = problem.m
    n, k, form = problem.n, problem.k, problem.format
    m = str(low) if low == high else f"{low}..{high}"
    family = FAMILIES.get(form.name)
    builtin = family is not None and form == family.with_suffixes(form.suffixes)
    options = f"--format {form.label if builtin else repr(str(form))} --dtype {problem.x}{' --bias' if problem.bias else ''}"
    return "\n".join(
        [
            f"# y[{m}, {n}] = x[{m}, {k}] @ w[{n}, {k}].T · {form.label} · {problem.x} · {schedule}",
            f"# made by: w4gen compile --m {high} --n {n} --k {k} {options} --arch {arch} --emit py",
        ]
    )
