"""Printer of the template for gradients: wgmma of the weight's columns, whose codes are turned in registers."""

from __future__ import annotations

from typing import Any

from w4gen.codegen import ptx
from w4gen.codegen.printer import constants
from w4gen.codegen.wgmma import WgmmaPrinter
from w4gen.errors import TemplateError
from w4gen.ir.program import Program
from w4gen.ir.tile import Dot
from w4gen.schedule.schedule import Schedule


class TurnedPrinter(WgmmaPrinter):
    """Printer of dgrad_wgmma: 16 outputs by 16 k are a word of each lane, which is turned before it is decoded."""

    DOT = Dot(("n",), "mma", "left")
    SHARED, ALONG, EACH = "k", "n", (64, "inputs")
    PLAIN = "dgrad"

    def __init__(self, program: Program, schedule: Schedule, features: frozenset[str] = frozenset()) -> None:
        super().__init__(program, schedule, features)
        form, least = program.problem.format, self.blocks["k"]
        if self.bits != 4 or self.scale_bits != 16 or self.span % least:
            raise TemplateError(
                f"dgrad_wgmma turns words of eight 4-bit codes, with one 16-bit scale for {least} k, which {form.label} in "
                f"groups of {self.span} does not have: take dgrad"
            )
        if self.schedule.block_n % 64 or self.strides("scale")["n"][0] != 2:
            raise TemplateError(f"dgrad_wgmma takes 64 outputs at a time: block_n={schedule.block_n}")

    @property
    def chunks(self) -> int:
        """Steps along n."""
        return self.program.tile(self.program.source("w.tile")).sizes["n"] // self.blocks["n"]

    def calls(self) -> dict[str, Any]:
        zero = ptx.turned_scales(str(self.program.problem.format.zero), self.program.problem.x) if self.centred else ""
        return super().calls() | {"zero_ptx": zero}

    def scale_ptx(self) -> str:
        """What turns the scales of two outputs and of the two 8 further into pairs."""
        return ptx.turned_scales(str(self.program.problem.format.scale), self.program.problem.x, self.summed)

    def constants(self) -> str:
        """Sizes of the problem, of a step and of what is in flight."""
        rows = [
            ("N", self.program.problem.n, "outputs, columns of x"),
            ("K", self.program.tile(self.out).sizes["k"], "inputs, columns of y"),
            ("BLOCK_M", self.blocks["m"], "rows of x per program"),
            ("BLOCK_N", self.blocks["n"], "outputs per step"),
            ("TEAMS", self.schedule.teams, "times 64 inputs per program"),
            ("PIECES", self.blocks["n"] // 64, "times 64 outputs in a step"),
            ("BLOCKS", self.blocks["n"] // 16, "times 16 outputs in a step"),
            ("ROW_SCALES", self.strides("scale")["n"][-1] // 2, "pairs of scales of 16 outputs"),
            *([("ROW_ZEROS", self.strides("zero")["n"][-1] // 2, "pairs of zeros of 16 outputs")] if self.centred else []),
            ("ROW_WORDS", self.order.stride("n"), "words of 16 outputs"),
            ("WARPS", self.schedule.warps, "warps of a team"),
            ("SPLIT", self.workers, "programs that share the steps"),
            ("STEPS", self.turns, "steps of a program"),
            ("AHEAD", min(int(self.schedule.stages), self.turns), "steps whose words are asked for ahead"),
            ("RING", self.schedule.ring, "steps of x in flight"),
        ]
        return constants(rows, "gl")

    def load(self, operand: str, extra: str = "") -> str:
        if operand == "x":
            self.ledger.update(self.chains["x"])
            return "x = x_ptr + first.to(gl.int64) * N + (m * N + n)"
        if operand == "w":
            super().load("w")  # its ledger, and what it refuses
            return f"codes = codes_ptr + (column * {self.order.units} + lane * 4 + thread // 32)"
        super().load(operand)
        each = self.strides(operand)["g"][-1] // 2
        return f"{operand}s = two_at({operand}_ptr.to(gl.pointer_type(gl.int32)) + column * 64 // {self.span} * {each}, lane)"

    def decode(self, operand: str) -> str:
        """Line that gives the pairs of a word, of n and n + 8, then of k + 8."""
        super().decode(operand)
        return f"w = values_of({', '.join(['word', *self.extra])})"

    def scale_pairs(self) -> list[str]:
        names = [*"ab", *(["a_rest", "b_rest"] if self.summed else [])]
        kinds, asm = ", ".join(["gl.int32"] * len(names)), ",".join(["=&r"] * len(names))
        call = f'gl.inline_asm_elementwise(SCALES, "{asm},r,r", [scales[0], scales[1]], dtype=kinds, is_pure=True, pack=1)'
        return [f"kinds: gl.constexpr = ({kinds})", f"{', '.join(names)} = {call}"]

    def store(self) -> str:
        """Round and write."""
        self.ledger[self.out] += 1
        return "\n".join(
            self.written_to("k", "column", "K", "start.to(gl.int64)", f"gl.convert_layout(acc.to({self.kind}), STORE)")
        )
