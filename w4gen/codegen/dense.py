"""Printers of templates that decode whole tiles of the weight: to memory, or for a product with w on the right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from w4gen.codegen import tl
from w4gen.codegen.blocks import BlockPrinter, joined, magic, pair_type
from w4gen.codegen.index import Index, Term
from w4gen.codegen.printer import Printer, constants
from w4gen.ir.layout import Layout
from w4gen.ir.tile import Pad, Repeat
from w4gen.ir.types import U8, DType

TOGETHER = 8
"""Columns of programs of a gradient that share what the L2 cache holds of dY."""


class DensePrinter(BlockPrinter):
    """Printer of the kernel that dequantizes: tiles of n and k; of rows, and of other orders, a code loads the word it is in."""

    PLACE: Mapping[str, str] = {"n": BlockPrinter.PLACE["n"], "k": "tl.program_id(0) * WIDE + tl.arange(0, WIDE)"}
    UNITS = (("vendor", "right"),)
    WIDE = True

    def constants(self) -> str:
        """Sizes of the weight and of its blocks, as constants."""
        dense = self.program.tile("w.dense").sizes
        rows = [
            ("N", dense["n"], "outputs"),
            ("K", dense["k"], "inputs"),
            ("BLOCK_N", self.blocks["n"], "outputs per program"),
            ("BLOCK_K", self.blocks["k"], "inputs per program"),
        ]
        return constants(rows + (self.of_blocks() if self.in_blocks else []))

    @property
    def in_blocks(self) -> bool:
        """Whether a tile is whole stored blocks, which follow one another along k and then n."""
        layout = self.program.tile("codes.stored").layout
        if layout is None or layout.high is not None or layout.row_units() is not None or not layout.block_units:
            return False
        outside = [digit.axis for digit in layout.digits if digit.stride >= layout.block_units * layout.unit]
        whole = all(self.blocks[axis] % size == 0 for axis, size in layout.block.items())
        return whole and sorted(outside) == ["k", "n"]

    def load(self, operand: str, extra: str = "") -> str:
        return super().load(operand, extra) if self.in_blocks else Printer.load(self, operand, extra)

    def decode(self, operand: str) -> str:
        return super().decode(operand) if self.in_blocks else Printer.decode(self, operand)

    def store(self) -> str:
        """Round and write a block of the weight."""
        self.ledger["w.dense"] += 1
        element = tl.type_of(self.program.tile("w.dense"))
        value = tl.variable(self.program.source("w.dense"))
        at, inside = "n[:, None] * K + k[None, :]", "(n[:, None] < N) & (k[None, :] < K)"
        return f"tl.store(dense_ptr + {at}, {value}.to({element}), mask={inside})"


class GradientPrinter(DensePrinter):
    """Printer of dX = dY W: tiles of the weight, decoded as where it is dequantized, are multiplied where they are."""

    PLACE: Mapping[str, str] = {"n": "tl.arange(0, TALL) + step * TALL", "k": "column * WIDE + tl.arange(0, WIDE)"}
    STARTS: Mapping[str, str] = {"k": "column * BLOCK_K"}
    SHIFTED = staticmethod(joined)
    UNITS = (("mma", "right"),)
    WIDE = False

    def calls(self) -> dict[str, Any]:
        return super().calls() | {"pair_type": pair_type(self.program) if self.in_blocks else ""}

    def constants(self) -> str:
        """Sizes of the problem and of its tiles, as constants."""
        steps = -(-self.program.tile(self.program.source("w.tile")).sizes["n"] // self.blocks["n"])
        rows = [
            ("N", self.program.problem.n, "outputs, columns of dY"),
            ("K", self.program.problem.k, "inputs, columns of dX"),
            ("BLOCK_M", self.blocks["m"], "rows of dY per program"),
            ("BLOCK_N", self.blocks["n"], "outputs per step"),
            ("BLOCK_K", self.blocks["k"], "inputs per program"),
            ("STEPS", steps, "steps along n"),
            ("STAGES", self.schedule.stages, "steps asked for ahead"),
            ("TOGETHER", TOGETHER, "columns of programs that run through the rows of dY together"),
        ]
        return constants(rows + (self.of_blocks() if self.in_blocks else []))

    def magic(self) -> str:
        return "\n".join((self.in_blocks and magic(self.program)) or tl.magic(self.program, "(m_count >> 31)"))

    def view(self, names: list[str], extra: str = "") -> list[str]:
        """A scale for each row of a tile comes in the order in which scales are kept, so that it can be asked for ahead."""
        kept = self.program.tile(self.program.source(names[0]))
        one = self.in_blocks and names[-1].endswith(".at") and isinstance(kept.element, DType) and kept.element != U8
        if not one or kept.layout is None or kept.layout.row_major or kept.layout.axes != ("n", "g"):
            return super().view(names, extra)
        groups = [digit.stride // kept.layout.unit for digit in kept.layout.digits if digit.axis == "g" and digit.size > 1]
        if groups not in ([], [self.order.held["n"]]):
            return super().view(names, extra)
        self.ledger.update(names)
        return self.of_rows(names, kept.layout)

    def of_rows(self, names: list[str], layout: Layout) -> list[str]:
        """Load the scales of BLOCK_N rows from where they are kept: block by block of rows, each group by group."""
        program, value, held = self.program, tl.variable(names[-1]), self.order.held["n"]
        *inside, highest = (digit for digit in layout.digits if digit.axis == "n")
        kept = sorted(inside, key=lambda digit: -digit.stride)
        group = next(op.group for op in map(program.op, names) if isinstance(op, Repeat))
        column = Index((Term(self.STARTS["k"]),)).quotient(group).render(())
        padded = any(axis == "n" for op in map(program.op, names) if isinstance(op, Pad) for axis, _ in op.sizes)
        mask = f", mask=tall < {highest.size}, other=0.0" if padded else ""
        sizes, axes = [digit.size for digit in kept], [0, *(1 + kept.index(digit) for digit in reversed(inside))]
        return [
            f"tall = ({self.PLACE['n']})[:, None]",
            f"at = tall * {highest.stride // layout.unit} + {column} * {held} + tl.arange(0, {held})[None, :]",
            f"{value} = tl.load({tl.pointer(program, program.source(names[0]))} + at{mask})",
            f"{value} = {value}.reshape([TALL, {', '.join(map(str, sizes))}]).permute({axes}).reshape([BLOCK_N])",
        ]

    def store(self) -> str:
        """Round and write a block of dX."""
        value, element = tl.variable(self.program.source(self.out)), tl.type_of(self.program.tile(self.out))
        self.ledger[self.out] += 1
        inside = "(m[:, None] < m_count) & (k[None, :] < K)"
        return f"tl.store(y_ptr + m[:, None] * K + k[None, :], {value}.to({element}), mask={inside})"
