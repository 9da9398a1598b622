"""Printer for codes that are stored in blocks of several rows, in the order of a matrix instruction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from math import prod
from typing import Any

from w4gen.codegen import epilogue, tl
from w4gen.codegen.index import Index, Term
from w4gen.codegen.printer import Printer, constants
from w4gen.errors import TemplateError
from w4gen.ir import decode as d
from w4gen.ir.layout import Digit, Layout
from w4gen.ir.problem import PAIRED
from w4gen.ir.program import Program
from w4gen.ir.tile import Pad, Reduce
from w4gen.ir.types import F32


@dataclass(frozen=True, slots=True)
class Order:
    """The blocks of a layout; `vector` neighbouring k of a fragment belong to one lane (2, or 4 for `mma.sync`)."""

    layout: Layout
    vector: int

    def __post_init__(self) -> None:
        if self.layout.row_units() is not None:
            raise TemplateError(f"layout {self.layout} is one of rows: a template that takes w on the left reads blocks")
        block = self.units * self.layout.unit
        if sum(digit.axis == "n" and digit.size > 1 and digit.stride >= block for digit in self.layout.digits) > 1:
            raise TemplateError(f"layout {self.layout}: its blocks of rows are no single run: pack the weight again")

    @property
    def units(self) -> int:
        return self.layout.block_units

    @property
    def held(self) -> dict[str, int]:
        return self.layout.block

    def inside(self) -> list[Digit]:
        """The digits of a block."""
        return [digit for digit in self.layout.digits if digit.stride < self.units * self.layout.unit]

    def stride(self, axis: str) -> int:
        """Words from one block to the next along an axis."""
        return max(digit.stride for digit in self.layout.digits if digit.axis == axis) // self.layout.unit

    def count(self, axis: str) -> int:
        """Blocks along an axis."""
        return self.layout.size(axis) // self.held[axis]

    def taken(self) -> list[Digit]:
        """The digits of k in a block as the instruction takes them, the highest first."""
        digits = [digit for digit in self.inside() if digit.axis == "k"]
        if self.vector == 2:
            return digits[::-1]
        pair, lane, register, *further = digits
        return [*reversed(further), lane, register, pair]

    def walk(self) -> str:
        """The k of a step, position by position, from the first on."""
        if self.vector == 2:
            return "tl.arange(0, BLOCK_K)"
        digits = [digit for digit in self.inside() if digit.axis == "k"]
        low = list(reversed(self.taken()[-3:]))
        terms, below = [], 1
        for digit in low:
            weight = prod(each.size for each in digits[: digits.index(digit)])
            terms.append(Term("j", divide=below, modulo=digit.size, weight=weight))
            below *= digit.size
        return Index((*terms, Term("j", divide=below, weight=below))).render(())

    def load(self, program: Program, names: list[str], place: Mapping[str, str], extra: str) -> list[str]:
        """Bring the words of a tile, [TALL, WIDE, WORDS], to registers; `place` has the stored blocks of it."""
        grown = {axis for op in map(program.op, names) if isinstance(op, Pad) for axis, _ in op.sizes}
        lines = [f"tall = ({place['n']})[:, None, None]", f"wide = ({place['k']})[None, :, None]"]
        masks = [f"({name} < {self.count(axis)})" for name, axis in (("tall", "n"), ("wide", "k")) if axis in grown]
        lines.append(f"w_at = tall * {self.stride('n')} + wide * WORDS + tl.arange(0, WORDS)[None, None, :]")
        mask = f", mask={' & '.join(masks)}, other=0" if masks else ""
        return [*lines, f"w_tile = tl.load(codes_ptr + w_at{mask}{', ' + extra if extra else ''})"]


def paired(program: Program) -> bool:
    """Whether the codes of a pair are decoded by one operation on their word."""
    return tl.decoding(program).dtype.bits == 16 and program.problem.format.codebook is None


def pair_type(program: Program) -> str:
    """The type of the halves of a pair; "" where codes are decoded alone."""
    return tl.TYPES[tl.decoding(program).dtype.name] if paired(program) else ""


def magic(program: Program) -> list[str]:
    """The exponent bits of a pair, plus a 0 that ptxas does not see."""
    bits = next((op.bits for op in tl.decoding(program).value if isinstance(op, d.Or)), 0)
    if not paired(program) or not bits:
        return []
    return [f"magic = 0x{bits << 16 | bits:08X} + (m_count >> 31)  # hidden from ptxas: and + or stay one LOP3"]


def spread(count: int, bits: int) -> tuple[list[str], str]:
    """The words of `w_tile`, shifted down to each of `count` codes along a last axis: lines before, and the expression."""
    return [f"shift = tl.arange(0, {count}) * {bits}"], "w_tile[:, :, :, None] >> shift[None, None, None, :]"


def joined(count: int, bits: int) -> tuple[list[str], str]:
    """`spread` without a broadcast, above which Triton would move a change of layout, so that words stay where they were loaded.

    The last axes, of two each, are the digits of the code's number.
    """
    parts = ["w_tile", *(f"w_tile >> {number * bits}" for number in range(1, count))]
    lines: list[str] = []
    while len(parts) > 1:
        half = len(parts) // 2
        names = [f"w_{len(parts)}_{number}" for number in range(half)] if half > 1 else ["w_moved"]
        lines += [f"{name} = tl.join({parts[number]}, {parts[number + half]})" for number, name in enumerate(names)]
        parts = names
    return lines, parts[0]


def decoded(program: Program, name: str, order: Order, shifted: Callable[[int, int], tuple[list[str], str]]) -> list[str]:
    """The lines that decode `w_tile` into `name`, [BLOCK_N, BLOCK_K]; `shifted` tells how words are shifted down to codes."""
    how, bits, value = tl.decoding(program), program.problem.format.bits, tl.variable(name)
    inside = sorted(order.inside(), key=lambda digit: -digit.stride)
    if paired(program):
        mask, text = 2**bits - 1, "halves(w_bits)"
        for op in (op for op in how.value if isinstance(op, d.Fma)):
            text = tl.expression(op, text, "")
        lines, source = shifted(16 // bits, bits)
        moves = d.moved(how)
        source = source if source.isidentifier() else f"({source})"
        lines += small_floats(how, moves, source) if moves else [f"w_bits = ({source} & 0x{mask << 16 | mask:08X}) | magic"]
        lines.append(f"{value} = {text}")
        pair = next(digit for digit in inside if digit.stride == 16)
        inside = [*(digit for digit in inside if digit != pair), pair]
    else:
        lines, source = shifted(how.per_unit, bits)
        lines.append(f"w_codes = {tl.expression(d.Narrow(), source, '') if d.Narrow() in how.field else source}")
        lines += tl.value(program, name, how, "w_codes")
    sizes = ["TALL", "WIDE", *(str(digit.size) for digit in inside)]
    rows = [digit for digit in reversed(order.inside()) if digit.axis == "n"]
    axes = [0, *(2 + inside.index(digit) for digit in rows), 1, *(2 + inside.index(digit) for digit in order.taken())]
    return [
        *lines,
        f"{value} = {value}.reshape([{', '.join(sizes)}])",
        f"{value} = {value}.permute({axes}).reshape([BLOCK_N, BLOCK_K])",
    ]


def small_floats(how: d.Decode, moves: d.Moved, source: str) -> list[str]:
    """Lines that move both small floats of a pair, `source` shifted down, to where 16-bit floats have their bits."""
    lines = [f"w_codes = {tl.bare(source)}"]
    if moves.sign == moves.rest:
        lines.append(f"w_bits = (w_codes << {moves.sign}) & {twice(moves.sign_mask | moves.rest_mask)}")
    else:
        sign = f"((w_codes << {moves.sign}) & {twice(moves.sign_mask)})"
        lines.append(f"w_bits = {sign} | ((w_codes << {moves.rest}) & {twice(moves.rest_mask)})")
    for op in how.value:
        if isinstance(op, d.Except):
            lines.append(f"w_none = ((w_bits & {twice(op.ones)}) + {twice(op.lowest)}) & {twice(1 << op.carry)}")
            lines.append(f"w_bits |= (w_none << {15 - op.carry}) - (w_none >> {op.carry - op.fill})")
    return lines


def twice(bits: int) -> str:
    """Sixteen bits in both halves of a word, as a number of 32 bits with a sign."""
    both = bits << 16 | bits
    return f"0x{both:X}" if both < 2**31 else f"-0x{2**32 - both:X}"


class SumsPrinter(Printer):
    """Printer of a second function, which adds up the partial sums of the first."""

    def added_up(self, name: str, at: str) -> list[str]:
        """The lines that add up the partial sums at `at` of [m, N], and the bias."""
        lines = [
            f"{name} = tl.load(parts_ptr + {at}, mask=inside, other=0.0)",
            "for share in tl.static_range(1, SPLIT):",
            f"    {name} += tl.load(parts_ptr + share * m_count * N + {at}, mask=inside, other=0.0)",
        ]
        if "bias" in self.program.operands(self.out):
            column = f"{at} % N" if at.isidentifier() else f"({at}) % N"
            lines.append(f"{name} += tl.load(bias_ptr + {column}, mask=inside, other=0.0).to(tl.float32)")
        return lines

    def finish(self) -> str:
        """The second kernel's lines: add the partial sums of `at` in order, do what is done to sums, round, write."""
        program, roles = self.program, self.program.operands(self.out)
        self.ledger.update(["acc", self.out])
        if program.op("acc") != Reduce(("part",)) or program.tile("acc").element != F32:
            raise TemplateError(f"acc ({program.op('acc')}) is not the f32 sum over part that this function adds up")
        kind = self.activation
        if kind == PAIRED:
            lines = [*self.added_up("gate", "2 * at"), *self.added_up("up", "2 * at + 1")]
            lines.append(f"acc = {epilogue.text('silu', 'gate')} * up")
        else:
            lines = self.added_up("acc", "at") + ([f"acc = {epilogue.text(kind, 'acc')}"] if kind else [])
        if "residual" in roles:
            self.ledger.update(tl.chain(program, roles["residual"]))
            lines.append("acc += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)")
        self.ledger.update(tl.chain(program, roles["bias"]) if "bias" in roles else [])
        return "\n".join([*lines, f"tl.store(y_ptr + at, acc.to({tl.type_of(program.tile(self.out))}), mask=inside)"])


class BlockPrinter(Printer):
    """Printer of templates that read whole blocks: lines that load words and decode them to [BLOCK_N, BLOCK_K]."""

    PLACE: Mapping[str, str] = {"n": "tl.program_id(1) * TALL + tl.arange(0, TALL)", "k": "step * WIDE + tl.arange(0, WIDE)"}
    """The stored blocks along n and k that a tile has."""
    SHIFTED = staticmethod(spread)
    """How the words of a tile are shifted down to their codes."""

    @property
    def order(self) -> Order:
        """How the codes are stored, and the order of k in which the template takes them."""
        return Order(tl.order(self.program, "codes"), self.schedule.vector)

    def of_blocks(self) -> list[tuple[str, int, str]]:
        """Constants that tell how many stored blocks a tile has."""
        order = self.order
        for axis in ("n", "k"):
            if self.blocks[axis] % order.held[axis]:
                raise TemplateError(
                    f"block_{axis}={self.blocks[axis]} is not whole blocks of {order.held[axis]}: take a multiple"
                )
        return [
            ("TALL", self.blocks["n"] // order.held["n"], f"stored blocks of {order.held['n']} outputs"),
            ("WIDE", self.blocks["k"] // order.held["k"], f"stored blocks of {order.held['k']} inputs"),
            ("WORDS", order.units, "words of a stored block"),
        ]

    def load(self, operand: str, extra: str = "") -> str:
        if operand != "w":
            return super().load(operand, extra)
        seen = self.parted("w")[0]
        self.ledger.update(seen)
        return "\n".join(self.order.load(self.program, seen, self.PLACE, extra))

    def decode(self, operand: str) -> str:
        value = self.parted("w")[1][0]
        self.ledger[value] += 1
        rest = takewhile(lambda name: "scale" not in self.program.operands(name), self.parted("w")[1][1:])
        return "\n".join(
            [*decoded(self.program, value, self.order, self.SHIFTED), *(line for name in rest for line in self.node(name))]
        )


class GemmPrinter(SumsPrinter, BlockPrinter):
    """Printer of products with w as the left operand, stored in blocks that are whole fragments of the instruction."""

    UNITS = (("mma", "left"),)

    def calls(self) -> dict[str, Any]:
        return super().calls() | {"walk": self.walk, "finish": self.finish, "pair_type": pair_type(self.program)}

    def constants(self) -> str:
        """Sizes of the problem, of the tiles, and of the layout's blocks, as constants."""
        if self.blocks["n"] % (16 * self.schedule.warps):
            raise TemplateError(f"gemm gives each of {self.schedule.warps} warps 16 outputs: block_n={self.blocks['n']}")
        steps = -(-self.program.tile(self.program.source("w.tile")).sizes["k"] // self.blocks["k"])
        split = self.program.tile("parts").sizes["part"] if "parts" in self.program.graph else 1
        rows = [
            ("N", self.sums, "outputs"),
            ("K", self.program.tile("x").sizes["k"], "inputs"),
            ("BLOCK_M", self.blocks["m"], "rows of x per program"),
            ("BLOCK_N", self.blocks["n"], "outputs per program"),
            ("BLOCK_K", self.blocks["k"], "inputs per step"),
            *self.of_blocks(),
            ("STEPS", steps, "steps along k"),
            ("SPLIT", split, "programs that share k"),
        ]
        return constants(rows)

    def magic(self) -> str:
        one = "one = (0x3F800000 + (m_count >> 31)).to(tl.float32, bitcast=True)  # 1.0, but the compiler does not see it"
        lines = magic(self.program) or tl.magic(self.program, "(m_count >> 31)")
        return "\n".join([*lines, *([one] if self.unscaled else [])])

    @property
    def unscaled(self) -> bool:
        """Whether sums of a step are added as they are, on an arch with wgmma.

        There Triton would make one sum of them, carried through the instruction (docs/kernels.md, the hazard): so they are
        multiplied by 1.
        """
        return self.schedule.scale_at == "weight" and "wgmma" in self.features

    def dot(self) -> str:
        return "\n".join([super().dot(), *(["part *= one"] if self.unscaled else [])])

    def walk(self) -> str:
        """The k of a step, in the order in which the instruction takes them."""
        return f"k = step * BLOCK_K + {self.order.walk()}"

    def store(self) -> str:
        """Round and write, or write the partial sums."""
        if "parts" not in self.program.graph:
            return super().store()
        self.written += 1
        at = "(share * m_count + m[None, :]) * N + n[:, None]"
        return f"tl.store(parts_ptr + {at}, parts, mask=(m[None, :] < m_count) & (n[:, None] < N))"
