"""Printer for codes that are stored in blocks of several rows, in the order of a matrix instruction."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from w4gen.codegen import tl
from w4gen.codegen.index import Index, Term
from w4gen.errors import TemplateError
from w4gen.ir import decode as d
from w4gen.ir.layout import Digit, Layout
from w4gen.ir.program import Program
from w4gen.ir.tile import Pad


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
        pair, lane, register, *further = (digit for digit in self.inside() if digit.axis == "k")
        return [*reversed(further), *([register, lane] if self.vector == 2 else [lane, register]), pair]

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

    def load(self, program: Program, names: list[str], extra: str) -> list[str]:
        """Bring the words of a step, [TALL, WIDE, WORDS], to registers."""
        n, k = "tl.program_id(1) * TALL + tl.arange(0, TALL)", "step * WIDE + tl.arange(0, WIDE)"
        grown = {axis for op in map(program.op, names) if isinstance(op, Pad) for axis, _ in op.sizes}
        lines = [f"tall = ({n})[:, None, None]", f"wide = ({k})[None, :, None]"]
        masks = [f"({name} < {self.count(axis)})" for name, axis in (("tall", "n"), ("wide", "k")) if axis in grown]
        lines.append(f"w_at = tall * {self.stride('n')} + wide * WORDS + tl.arange(0, WORDS)[None, None, :]")
        mask = f", mask={' & '.join(masks)}, other=0" if masks else ""
        return [*lines, f"w_tile = tl.load(codes_ptr + w_at{mask}{', ' + extra if extra else ''})"]


def paired(program: Program) -> bool:
    """Whether the codes of a pair are decoded by one operation on their word."""
    how = tl.decoding(program)
    return how.dtype.bits == 16 and not any(isinstance(op, d.Lookup) for op in how.value)


def pair_type(program: Program) -> str:
    """The type of the halves of a pair; "" where codes are decoded alone."""
    return tl.TYPES[tl.decoding(program).dtype.name] if paired(program) else ""


def magic(program: Program) -> list[str]:
    """The exponent bits of a pair, plus a 0 that ptxas does not see."""
    if not paired(program):
        return []
    bits = next(op.bits for op in tl.decoding(program).value if isinstance(op, d.Or))
    return [f"magic = 0x{bits << 16 | bits:08X} + (m_count >> 31)  # hidden from ptxas: and + or stay one LOP3"]


def decoded(program: Program, name: str, order: Order) -> list[str]:
    """The lines that decode `w_tile` into `name`, the left operand [BLOCK_N, BLOCK_K]."""
    how, bits, value = tl.decoding(program), program.problem.format.bits, tl.variable(name)
    inside = sorted(order.inside(), key=lambda digit: -digit.stride)
    if paired(program):
        mask, (times, plus) = 2**bits - 1, next((op.times, op.plus) for op in how.value if isinstance(op, d.Fma))
        scaled = "" if times.value(0) == 1 else f" * {times.value(0)!r}"
        lines = [
            f"shift = tl.arange(0, {16 // bits}) * {bits}",
            f"w_bits = ((w_tile[:, :, :, None] >> shift[None, None, None, :]) & 0x{mask << 16 | mask:08X}) | magic",
            f"{value} = halves(w_bits){scaled} + {plus.value(0)!r}".replace("+ -", "- "),
        ]
        pair = next(digit for digit in inside if digit.stride == 16)
        inside = [*(digit for digit in inside if digit != pair), pair]
    else:
        lines = [
            f"shift = tl.arange(0, {how.per_unit}) * {bits}",
            "w_codes = w_tile[:, :, :, None] >> shift[None, None, None, :]",
        ]
        lines += tl.value(value, "w_codes", how)
    sizes = ["TALL", "WIDE", *(str(digit.size) for digit in inside)]
    rows = [digit for digit in reversed(order.inside()) if digit.axis == "n"]
    axes = [0, *(2 + inside.index(digit) for digit in rows), 1, *(2 + inside.index(digit) for digit in order.taken())]
    return [
        *lines,
        f"{value} = {value}.reshape([{', '.join(sizes)}])",
        f"{value} = {value}.permute({axes}).reshape([BLOCK_N, BLOCK_K])",
    ]
