"""What a template can call: printers of one program each, with a ledger of the nodes that they printed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import fields
from itertools import dropwhile, takewhile
from typing import Any

from w4gen.codegen import blocks, tl, walk
from w4gen.codegen.index import suffixed
from w4gen.errors import TemplateError
from w4gen.ir.program import Program
from w4gen.ir.tile import Convert, Dot, Reduce, Slice, Space
from w4gen.ir.types import F32
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

    SIDE = "right"

    def __init__(self, program: Program, schedule: Schedule) -> None:
        self.program, self.schedule = program, Choices(schedule)
        self.ledger: Counter[str] = Counter()
        self.written = 0
        user = "part" if "part" in program.graph else "w.dense"
        roles = {"w": "w", "x": "x"} if user == "part" else {"w": "of"}
        self.chains = {operand: tl.chain(program, program.operands(user)[role]) for operand, role in roles.items()}
        for role in GROUPED:
            for name in (name for name in program if role in program.operands(name)):
                self.chains[role] = tl.chain(program, program.operands(name)[role])
        if "codebook" in program.graph:
            self.chains["codebook"] = ["codebook.tile"]
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

    def side(self) -> str:
        """The side of the Dot that w is on; "" without one of ours."""
        op = self.program.op("part") if "part" in self.program.graph else None
        return op.side if isinstance(op, Dot) else ""

    def agreed_side(self) -> None:
        """Refuse a Dot with w on the side that the template does not take it on."""
        if self.side() != self.SIDE:
            raise TemplateError(f"this template takes w as the {self.SIDE} operand: take side={self.SIDE}")

    def calls(self) -> dict[str, Any]:
        names = ("constants", "magic", "load", "decode", "zeros", "dot", "scale", "reduce", "store")
        return {name: getattr(self, name) for name in names}

    def constants(self) -> str:
        """Sizes of the problem and of its tiles, as constants."""
        program, w, blocks = self.program, self.program.tile("w.tile").sizes, self.blocks
        self.agreed_side()
        walked = "lane" if "lane" in blocks else "word"
        if self.SIDE == "right" and blocks["m"] < program.problem.m[1]:
            raise TemplateError(f"one program computes all rows of x: block_m={blocks['m']} is below {program.problem.m[1]}")
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
        return constants(rows)

    def magic(self) -> str:
        """A constant that decoding needs in a register."""
        return "\n".join(tl.magic(self.program, "tl.num_programs(2) - 1"))

    def load(self, operand: str, extra: str = "") -> str:
        """Bring one block of `w`, `x`, `scale`, `zero` or `codebook` to registers; `extra` goes into the load as it is.

        A zero that a template has not loaded is loaded where it is first used.
        """
        seen, rest = self.parted(operand)
        lines = self.view(seen, f", {extra}" if extra else "")
        if operand != "w":
            lines += [line for name in rest for line in self.node(name)]
        return "\n".join(lines)

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
        return walk.Walk(self.program, names[-1], self.spans).load(names[-1], extra)

    def node(self, name: str) -> list[str]:
        zero = self.program.operands(name).get("zero")
        lines = self.load("zero").splitlines() if zero and not self.ledger[zero] else []
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


class DensePrinter(Printer):
    """Printer of the kernel that dequantizes: blocks of n and k, whatever the layout."""

    def constants(self) -> str:
        """Sizes of the weight and of its blocks, as constants."""
        dense = self.program.tile("w.dense").sizes
        rows = [
            ("N", dense["n"], "outputs"),
            ("K", dense["k"], "inputs"),
            ("BLOCK_N", self.blocks["n"], "outputs per program"),
            ("BLOCK_K", self.blocks["k"], "inputs per program"),
        ]
        return constants(rows)

    def store(self) -> str:
        """Round and write a block of the weight."""
        self.ledger["w.dense"] += 1
        element = tl.type_of(self.program.tile("w.dense"))
        value = tl.variable(self.program.source("w.dense"))
        at, inside = "n[:, None] * K + k[None, :]", "(n[:, None] < N) & (k[None, :] < K)"
        return f"tl.store(dense_ptr + {at}, {value}.to({element}), mask={inside})"


class GemmPrinter(Printer):
    """Printer of products with w as the left operand, stored in blocks that are whole fragments of the instruction."""

    SIDE = "left"

    def calls(self) -> dict[str, Any]:
        return super().calls() | {"walk": self.walk, "finish": self.finish, "pair_type": blocks.pair_type(self.program)}

    def constants(self) -> str:
        """Sizes of the problem, of the tiles, and of the layout's blocks, as constants."""
        self.agreed_side()
        order, steps = self.order, -(-self.program.tile(self.program.source("w.tile")).sizes["k"] // self.blocks["k"])
        split = self.program.tile("parts").sizes["part"] if "parts" in self.program.graph else 1
        rows = [
            ("N", self.program.tile(self.out).sizes["n"], "outputs"),
            ("K", self.program.tile("x").sizes["k"], "inputs"),
            ("BLOCK_M", self.blocks["m"], "rows of x per program"),
            ("BLOCK_N", self.blocks["n"], "outputs per program"),
            ("BLOCK_K", self.blocks["k"], "inputs per step"),
            ("TALL", self.blocks["n"] // order.held["n"], f"stored blocks of {order.held['n']} outputs"),
            ("WIDE", self.blocks["k"] // order.held["k"], f"stored blocks of {order.held['k']} inputs"),
            ("WORDS", order.units, "words of a stored block"),
            ("STEPS", steps, "steps along k"),
            ("SPLIT", split, "programs that share k"),
        ]
        return constants(rows)

    @property
    def order(self) -> blocks.Order:
        """How the codes are stored, and the order of k in which the instruction takes them."""
        if self.blocks["n"] % (16 * self.schedule.warps):
            raise TemplateError(f"gemm gives each of {self.schedule.warps} warps 16 outputs: block_n={self.blocks['n']}")
        return blocks.Order(tl.order(self.program, "codes"), self.schedule.vector)

    def magic(self) -> str:
        return "\n".join(blocks.magic(self.program) or tl.magic(self.program, "(m_count >> 31)"))

    def walk(self) -> str:
        """The k of a step, in the order in which the instruction takes them."""
        return f"k = step * BLOCK_K + {self.order.walk()}"

    def load(self, operand: str, extra: str = "") -> str:
        if operand != "w":
            return super().load(operand, extra)
        seen = self.parted("w")[0]
        self.ledger.update(seen)
        return "\n".join(self.order.load(self.program, seen, extra))

    def decode(self, operand: str) -> str:
        value = self.parted("w")[1][0]
        self.ledger[value] += 1
        rest = takewhile(lambda name: "scale" not in self.program.operands(name), self.parted("w")[1][1:])
        return "\n".join([*blocks.decoded(self.program, value, self.order), *(line for name in rest for line in self.node(name))])

    def store(self) -> str:
        """Round and write, or write the partial sums."""
        if "parts" not in self.program.graph:
            return super().store()
        self.written += 1
        at = "(share * m_count + m[None, :]) * N + n[:, None]"
        return f"tl.store(parts_ptr + {at}, parts, mask=(m[None, :] < m_count) & (n[:, None] < N))"

    def finish(self) -> str:
        """The second kernel's lines: add the partial sums of `at` in order, round, write."""
        program, roles = self.program, self.program.operands(self.out)
        self.ledger.update(["acc", self.out])
        if program.op("acc") != Reduce(("part",)) or program.tile("acc").element != F32:
            raise TemplateError(f"acc ({program.op('acc')}) is not the f32 sum over part that this function adds up")
        lines = [
            "acc = tl.load(parts_ptr + at, mask=inside, other=0.0)",
            "for share in tl.static_range(1, SPLIT):",
            "    acc += tl.load(parts_ptr + share * m_count * N + at, mask=inside, other=0.0)",
        ]
        if "bias" in roles:
            self.ledger.update(tl.chain(program, roles["bias"]))
            lines.append("acc += tl.load(bias_ptr + at % N, mask=inside, other=0.0).to(tl.float32)")
        return "\n".join([*lines, f"tl.store(y_ptr + at, acc.to({tl.type_of(program.tile(self.out))}), mask=inside)"])


def constants(rows: Iterable[tuple[str, int, str]], language: str = "tl") -> str:
    """Lines of name, value and what it is."""
    return "\n".join(f"{name} = {language}.constexpr({value})  # {why}" for name, value, why in rows)
