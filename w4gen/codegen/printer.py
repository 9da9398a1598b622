"""What a template can call: printers of one program each, with a ledger of the nodes that they printed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import fields
from itertools import dropwhile, takewhile
from math import prod
from typing import Any

from w4gen.codegen import epilogue, tl, walk
from w4gen.codegen.index import suffixed
from w4gen.errors import TemplateError
from w4gen.ir.problem import PAIRED
from w4gen.ir.program import Program
from w4gen.ir.tile import Convert, Dot, Reduce, Slice, Space
from w4gen.schedule.rewrite import GROUPED
from w4gen.schedule.schedule import IN_PROGRAM, Schedule


class Choices:
    """The schedule as a template sees it: remembers which fields were read."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self.read = schedule, set(IN_PROGRAM)

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self._schedule, name)


class Printer:
    """What a template can call. Every call prints the nodes on one operand's path and enters them in the ledger."""

    UNITS: tuple[tuple[str, str], ...] = (("lanes", "right"), ("mma", "right"))
    """What multiplies in a program that the template is made for, and the side of w."""
    WIDE = False
    """Whether the template can take indices of 64 bits."""
    STARTS: Mapping[str, str] = walk.STARTS
    """Where a program is along an axis of which one element is taken."""
    FAR = True
    """Whether the template's offsets of rows can have 64 bits."""

    def __init__(self, program: Program, schedule: Schedule, features: frozenset[str] = frozenset()) -> None:
        self.program, self.schedule, self.features = program, Choices(schedule), features
        self.ledger: Counter[str] = Counter()
        self.written = 0
        self.agreed_unit()
        user = "part" if "part" in program.graph else "w.dense"
        roles = {"w": "w", "x": "x"} if user == "part" else {"w": "of"}
        self.chains = {operand: tl.chain(program, program.operands(user)[role]) for operand, role in roles.items()}
        of_weight = [name for name in program if not name.startswith(tuple(f"{role}." for role in GROUPED))]
        users = reversed(of_weight)  # the first that takes a scale, or a zero, has the one of each group
        self.grouped = {role: source for name in users for role, source in program.operands(name).items() if role in GROUPED}
        self.spans = program.tile("part").sizes.get("span", 1) if user == "part" else 1
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

    def agreed_unit(self) -> None:
        """Refuse a program that multiplies in another way than the template."""
        dots = [(op.unit, op.side) for op in map(self.program.op, self.program.of(Dot)) if isinstance(op, Dot)]
        if len(dots) != 1 or dots[0] not in self.UNITS:
            ways, has = (" or ".join(f"unit={unit} side={side}" for unit, side in each) for each in (self.UNITS, dots))
            raise TemplateError(
                f"template={self.schedule.template} is made for {ways}, not for {has}: take that, or another template"
            )

    @property
    def wide(self) -> list[str]:
        """What a weight has in memory that indices of 32 bits do not reach: 2**31 elements or more."""
        program, own = self.program, {name for names in self.program.ours for name in names} - {self.out}
        tiles = {name: program.tile(name) for name in (*program.kept, *own) if program.tile(name).space is Space.GLOBAL}
        return [name for name, tile in tiles.items() if prod(tile.shape) >= 2**31]

    @property
    def activation(self) -> str:
        """What the store applies to the sums."""
        return str(self.program.op(self.out).activation)  # type: ignore[union-attr]

    @property
    def sums(self) -> int:
        """Sums of a row of x: one for each column of y, or two where y is made of pairs."""
        return self.program.tile(self.out).sizes["n"] * (2 if self.activation == PAIRED else 1)

    @property
    def far(self) -> bool:
        """Whether x, y or partial sums have 2**31 elements or more."""
        split = self.program.tile("parts").sizes["part"] if "parts" in self.program.graph else 1
        return self.program.problem.far or split * self.program.problem.m[1] * self.program.problem.n >= 2**31

    @property
    def many(self) -> bool:
        """Whether rows of x are shared out to several programs."""
        return self.blocks.get("m", self.program.problem.m[1]) < self.program.problem.m[1]

    def calls(self) -> dict[str, Any]:
        if self.wide and not self.WIDE:
            raise TemplateError(f"{self.wide[0]} has more elements than indices of 32 bits reach: take unit=vendor")
        if self.far and not self.FAR:
            raise TemplateError(f"x or y has more elements than offsets of 32 bits reach, which {self.schedule.template} has")
        names = ("constants", "weights", "magic", "load", "decode", "zeros", "dot", "scale", "reduce", "store")
        return {name: getattr(self, name) for name in names} | {"wide": bool(self.wide), "far": self.far, "many": self.many}

    def constants(self) -> str:
        """Sizes of the problem and of its tiles, as constants."""
        program, w, blocks = self.program, self.program.tile("w.tile").sizes, self.blocks
        walked = "lane" if "lane" in blocks else "word"
        stretch = program.tile("w.codes" if "w.codes" in program.graph else "w.tile").sizes["code"]
        in_walked = w.get("quad", 1) * stretch * self.spans
        steps = -(-program.tile(program.source("w.tile")).sizes[walked] // blocks[walked])
        rows = [
            ("N", self.sums, "outputs"),
            ("K", program.tile("x").sizes["k"], "inputs"),
            ("BLOCK_M", blocks["m"], "rows of x per program"),
            ("BLOCK_N", blocks["n"], "outputs per program"),
            (f"{walked.upper()}S", w[walked], f"{walked}s per step, {blocks[walked] * in_walked} k in all"),
            *([("QUAD", w["quad"], "words of a lane")] if "quad" in w else []),
            ("STEPS", steps, "steps along k"),
            ("SPANS", self.spans, "stretches of a word's codes under one scale"),
            ("CODES", stretch, "codes of a stretch"),
        ]
        return constants(rows)

    def magic(self) -> str:
        """A constant that decoding needs in a register."""
        return "\n".join(tl.magic(self.program, "tl.num_programs(2) - 1"))

    def weights(self) -> str:
        """The arguments that hold the weight, each on a line."""
        return "\n".join(f"{tl.pointer(self.program, part)}," for part in self.program.problem.format.parts(1, 1))

    def load(self, operand: str, extra: str = "") -> str:
        """Bring one block of `w`, `x`, `scale`, `zero` or `codebook` to registers; `extra` goes into the load as it is.

        Scales and zeros that are codes are decoded too. A zero that a template has not loaded is loaded where it is first used.
        """
        if operand == "codebook":
            tables = [name for name in self.program if name.endswith("codebook.tile")]
            return "\n".join(line for name in tables for line in self.made(name))
        if operand in GROUPED:
            self.ledger[self.grouped[operand]] += (again := self.ledger[self.grouped[operand]])
            return "" if again else "\n".join(self.made(self.grouped[operand]))
        seen, rest = self.parted(operand)
        lines = self.view(seen, f", {extra}" if extra else "")
        if operand != "w":
            lines += [line for name in rest for line in self.node(name)]
        return "\n".join(lines)

    def made(self, name: str) -> list[str]:
        """The lines behind a node, itself included: what it is computed from, or the load that it is a view of; none twice."""
        if self.ledger[name]:
            return []
        if not isinstance(self.program.op(name), Convert):
            return self.view(tl.chain(self.program, name))
        return [line for source in self.program.operands(name).values() for line in self.made(source)] + self.node(name)

    def decode(self, operand: str) -> str:
        """Turn the codes of `w` into values, up to their scale."""
        unscaled = takewhile(lambda name: "scale" not in self.program.operands(name), self.parted(operand)[1])
        return "\n".join(line for name in unscaled for line in self.node(name))

    def parted(self, operand: str) -> tuple[list[str], list[str]]:
        """The nodes on an operand's path that its load reads through, and those that compute with what it loaded."""
        names = self.chains[operand]
        last = max(index for index, name in enumerate(names) if isinstance(self.program.op(name), Slice))
        return names[: last + 1], names[last + 1 :]

    def zeros(self, loop: str, *names: str) -> str:
        """Sums over the turns of `loop` that start at zero; names that the program does not have are left out."""
        extents = {"m": "BLOCK_M", "n": "BLOCK_N", "k": "BLOCK_K", "word": "WORDS", "lane": "LANES", "quad": "QUAD"}
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
        """Add the bias, apply the activation, add the residual, round and write."""
        out, program = self.out, self.program
        lines, roles = [], program.operands(out)
        value, axes = tl.variable(roles["acc"]), tl.dims(program, program.tile(roles["acc"]))
        if "bias" in roles:
            lines += self.view(tl.chain(program, roles["bias"]))
            bias = suffixed(tl.variable(roles["bias"]), tl.dims(program, program.tile(roles["bias"])), axes)
            lines.append(f"{value} += {bias}.to(tl.float32)")
        kind = self.activation
        if kind == PAIRED:
            lines += self.gated(value, axes)
        elif kind:
            lines.append(f"{value} = {epilogue.text(kind, value)}")
        if "residual" in roles:
            lines += self.view(tl.chain(program, roles["residual"]))
            lines.append(f"{value} += {tl.variable(roles['residual'])}.to(tl.float32)")
        m, n = (suffixed(axis, (axis,), axes) for axis in ("m", "n"))
        wide, at = ("(N // 2)", f"{n} // 2") if kind == PAIRED else ("N", n)
        row, fits = (f"{m} * {wide} + ", f"({m} < m_count) & ({n} < N)") if "m" in axes else ("", f"{n} < N")
        lines.append(f"tl.store(y_ptr + {row}{at}, {value}.to({tl.type_of(program.tile(out))}), mask={fits})")
        self.ledger[out] += 1
        return "\n".join(lines)

    def gated(self, value: str, axes: tuple[str, ...]) -> list[str]:
        """The lines that make one output of each pair along n, and leave in n the first of each."""
        if self.blocks["n"] % 2:
            raise TemplateError(f"{PAIRED} takes outputs in pairs: block_n={self.blocks['n']} is odd, take a multiple of 2")
        shape = [part for axis in axes for part in (("BLOCK_N // 2", "2") if axis == "n" else (f"BLOCK_{axis.upper()}",))]
        order = [place for place, part in enumerate(shape) if part != "2"] + [shape.index("2")]
        turned = "" if order == sorted(order) else f".permute({order})"
        return [
            f"gate, up = tl.split({value}.reshape([{', '.join(shape)}]){turned})",
            f"{value} = {epilogue.text('silu', 'gate')} * up",
            "n, _ = tl.split(n.reshape([BLOCK_N // 2, 2]))",
        ]

    def view(self, names: list[str], extra: str = "") -> list[str]:
        """One load through the slices, pads and maps `names`."""
        self.ledger.update(names)
        return walk.Walk(self.program, names[-1], self.spans, self.STARTS).load(names[-1], extra)

    def node(self, name: str) -> list[str]:
        zero = self.program.operands(name).get("zero")
        lines = self.made(zero) if zero else []
        self.ledger[name] += 1
        return lines + tl.conversion(self.program, name)

    def settle(self, template: str) -> None:
        """Every node of our kernels printed exactly once, every choice of the schedule read. Raises `TemplateError`."""
        ours = {name for names in self.program.ours for name in names}
        for name in self.program.per_call:
            if self.ledger[name] != (expected := int(name in ours)):
                raise TemplateError(
                    f"{template} prints {name} ({self.program.op(name)}) {self.ledger[name]} times, not {expected}"
                )
        written = "parts" in self.program.graph and self.program.tile("parts").space is Space.GLOBAL
        if self.written != (expected := int(written)):
            raise TemplateError(f"{template} prints parts (its store) {self.written} times, not {expected}")
        for field in fields(Schedule):
            if field.name not in self.schedule.read and getattr(self.schedule._schedule, field.name) != field.default:
                raise TemplateError(f"{template} never reads {field.name} of the schedule: leave it at {field.default}")


def constants(rows: Iterable[tuple[str, int, str]], language: str = "tl") -> str:
    """Lines of name, value and what it is."""
    return "\n".join(f"{name} = {language}.constexpr({value})  # {why}" for name, value, why in rows)
