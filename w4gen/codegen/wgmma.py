"""Printer of the template for many rows of x: wgmma, by warps that multiply and warps that bring x and words."""

from __future__ import annotations

from typing import Any

from w4gen.codegen import epilogue, tl
from w4gen.codegen.blocks import SumsPrinter
from w4gen.codegen.gluon import GluonPrinter
from w4gen.codegen.printer import constants
from w4gen.codegen.scales import in_gluon
from w4gen.errors import TemplateError
from w4gen.ir.problem import PAIRED
from w4gen.ir.program import Program
from w4gen.ir.tile import Dot, Op, Space
from w4gen.schedule.many import SCALES
from w4gen.schedule.rewrite import padded_group
from w4gen.schedule.schedule import Schedule


class WgmmaPrinter(SumsPrinter, GluonPrinter):
    """Printer of gemm_wgmma: words and x wait in shared memory; weights are decoded in registers, as the left operand."""

    UNITS = (("mma", "left"),)
    DOT = Dot(("k",), "mma", "left")
    FAR = True
    SHARED, ALONG, EACH = "n", "k", (64, "outputs")
    """The axis of the weight that teams share, the one they walk along, and what a team of four warps has of the first."""
    PLAIN = "gemm"
    """The template for what this one does not take."""
    REGISTERS = 65536 // 128
    """Registers of an SM for each of 128 threads."""

    def __init__(self, program: Program, schedule: Schedule, features: frozenset[str] = frozenset()) -> None:
        super().__init__(program, schedule, features)
        problem = program.problem
        if self.looked_up or self.how.power or self.apart or program.tile(self.grouped["scale"]).element not in SCALES[problem.x]:
            raise TemplateError(
                f"{schedule.template} multiplies pairs of weights by pairs of scales in {problem.x}, which do not hold those of "
                f"{problem.format.label}: take {self.PLAIN}"
            )
        if problem.residual and schedule.split_k == 1:
            raise TemplateError(f"{schedule.template} adds no residual, unless programs share k: take {self.PLAIN}")
        if schedule.warps != 4 or schedule.teams * self.EACH[0] != self.blocks[self.SHARED]:
            asked = f"warps={schedule.warps} teams={schedule.teams} block_{self.SHARED}={self.blocks[self.SHARED]}"
            raise TemplateError(f"{schedule.template} has teams of 4 warps for {self.EACH[0]} {self.EACH[1]}, not {asked}")
        if program.tile("x.tile").space is not Space.SHARED:
            raise TemplateError(f"{schedule.template} keeps x in shared memory: take x_at=shared")
        if self.step_k % self.span and self.span % self.step_k:
            raise TemplateError(f"group {self.span} and block_k={self.step_k}: take a block_k that divides it, or is a multiple")
        if self.centred and self.span < self.step_k:
            raise TemplateError(f"gemm_wgmma takes one zero in a step of {self.step_k} k, not for {self.span}: shorten the step")

    @property
    def held(self) -> bool:
        """Whether words wait in the ring, beside x."""
        return self.program.tile("w.tile").space is Space.SHARED

    @property
    def span(self) -> int:
        """Inputs under one scale."""
        return padded_group(self.program.problem, self.order.layout)

    @property
    def groups(self) -> int:
        """Scales that an output has in a step: the program scales weights, and says nothing of it."""
        return max(1, self.step_k // self.span)

    @property
    def workers(self) -> int:
        """Programs that share the steps along k."""
        return int(self.schedule.split_k)

    @property
    def registers(self) -> list[int]:
        """Registers a thread of each further group of warps: those that bring x need few, and give theirs away."""
        teams, alone = int(self.schedule.teams), not self.schedule.maxnreg
        bring = 80 if self.blocks["m"] > 128 else 32 if teams > 2 else 56 if alone else 40
        average = int(self.schedule.maxnreg) or self.REGISTERS // (teams + 1) // 8 * 8
        multiply = (average * (teams + 1) - bring) // teams // 8 * 8
        return [multiply] * (teams - 1) + [bring]

    def calls(self) -> dict[str, Any]:
        out = "parts_ptr" if "parts" in self.program.graph else "y_ptr"
        return super().calls() | {
            "out": out,
            "half": self.half,
            "summed": self.summed,
            "registers": self.registers,
            "finish": self.finish,
            "along": self.ALONG,
            "in_pairs": self.in_pairs,
            "held": self.held,
            "turns": self.turns,
            "rings": "held, ring, filled, drained" if self.held else "ring, filled, drained",
            "words": "TEAM" if self.held else "codes",
        }

    def constants(self) -> str:
        """Sizes of the problem, of a step and of what is in flight."""
        rows = [
            ("N", self.sums, "outputs"),
            ("K", self.program.tile("x").sizes["k"], "inputs"),
            ("BLOCK_M", self.blocks["m"], "rows of x per program"),
            ("BLOCK_K", self.step_k, "inputs per step"),
            ("TEAMS", self.schedule.teams, "times 64 outputs per program"),
            ("PIECES", self.step_k // 64, "times 64 inputs in a step"),
            ("QUADS", self.step_k // self.order.held["k"], f"quads of {self.order.held['k']} inputs in a step"),
            ("FRAGMENTS", self.order.held["k"] // 16, "times 16 inputs in a quad"),
            ("GROUPS", self.groups, "scales of an output in a step"),
            *self.of_scales(),
            *([("ROW_ZEROS", self.strides("zero")["n"][-1], "zeros of 16 outputs")] if self.centred else []),
            ("WORDS", self.order.units, "words of a quad's 32 lanes"),
            ("ROW_WORDS", self.order.stride("n"), "words of 16 outputs"),
            ("WARPS", self.schedule.warps, "warps of a team"),
            ("SPLIT", self.workers, "programs that share the steps along k"),
            ("WORKERS", self.workers, "the same"),
            ("STEPS", self.turns, "steps of a program"),
            ("AHEAD", min(int(self.schedule.stages), self.turns), "steps whose scales are asked for ahead"),
            ("RING", self.schedule.ring, "steps of words and x in flight"),
        ]
        return constants(rows, "gl")

    def load(self, operand: str, extra: str = "") -> str:
        if operand == "x":
            self.ledger.update(self.chains["x"])
            return "x = x_ptr + first.to(gl.int64) * K + (m * K + k)"
        return super().load(operand, extra)

    def dot(self) -> str:
        self.ledger["part"] += 1
        return "acc = hopper.warpgroup_mma(left[piece], ring.index(slot * PIECES + piece).permute((1, 0)), acc, is_async=True)"

    @property
    def half(self) -> str:
        """The type of x, and of weights."""
        return in_gluon(tl.type_of(self.program.tile("x")))

    @property
    def summed(self) -> bool:
        """Whether a scale is the sum of two numbers of x's type."""
        return self.program.tile(self.grouped["scale"]).element != self.program.problem.x

    def scale(self, operand: str) -> str:
        """Multiply the pairs of n, and of n + 8, by their scales, rounding once.

        A scale of more bits is a sum, of which the products with the smaller part come first: they are exact, or 2**-16 off.
        """
        self.ledger["w"] += 1
        pairs = [(f"w[{i}]", name) for i, name in enumerate("abab")]
        each = [f"fma2({w}, {name}, mul2({w}, {name}_rest))" if self.summed else f"mul2({w}, {name})" for w, name in pairs]
        return "\n".join([*self.scale_pairs(), f"w = ({', '.join(each)})"])

    def scale_pairs(self) -> list[str]:
        """Lines that make pairs of the scales a and b, and of what is left of them."""
        rest = [f"{name}_rest = pair_of({name} - {name}.to({self.half}).to(gl.float32))" for name in "ab"]
        return [*(rest if self.summed else []), "a, b = pair_of(a), pair_of(b)"]

    def reduce(self, *names: str) -> str:
        """Wait for the products; what they are computed from stays in its registers until then."""
        self.written += "parts" in self.program.graph
        self.ledger[names[0]] += 1
        left = ", ".join(f"left[{piece}]" for piece in range(self.step_k // 64))
        return f"done = hopper.warpgroup_mma_wait(0, deps=[acc, {left}])\nacc = done[0]"

    def store(self) -> str:
        """Add the bias, apply the activation, round and write; or write the partial sums."""
        if "parts" in self.program.graph:  # 32 bytes of f32 lie together in a product
            place = "(share.to(gl.int64) * m_count + start)"
            return "\n".join(self.written_to("n", "row", "N", place, "acc", "PRODUCT"))
        if self.in_pairs:
            return "\n".join([*self.ended(), *self.pairs_written()])
        value = f"gl.convert_layout(acc.to({self.kind}), STORE)"
        return "\n".join([*self.ended(), *self.written_to("n", "row", "N", "start.to(gl.int64)", value)])

    @property
    def in_pairs(self) -> bool:
        """Whether pairs of outputs become one here."""
        return self.activation == PAIRED and "parts" not in self.program.graph

    def ended(self) -> list[str]:
        """Lines that add the bias to the sums and apply the activation.

        The rows of a pair are in lanes four apart: of 16 columns one takes the first half from the other, and gives the second.
        """
        lines = self.added("column", "acc", "[:, None]")
        if not self.in_pairs:
            lines += self.finished("acc", "", "")
        else:
            lines += [
                "a, b = gl.split(acc.reshape([64, BLOCK_M // 16, 2, 8]).permute([0, 1, 3, 2]))",
                "row_of = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, a.type.layout)))",
                "first = (row_of % 2 == 0)[:, None, None]",
                "kept, sent = gl.where(first, a, b), gl.where(first, b, a)",
                'taken = gl.inline_asm_elementwise(SWAP, "=f,f", [sent], dtype=gl.float32, is_pure=True, pack=1)',
                "gate, up = gl.where(first, kept, taken), gl.where(first, taken, kept)",
                in_gluon(f"acc = {epilogue.text('silu', 'gate')} * up"),
            ]
        column = "column = row * 64 + gl.arange(0, 64, gl.SliceLayout(1, PRODUCT))"
        return [column, *lines] if any("column" in line for line in lines) else lines

    def pairs_written(self) -> list[str]:
        """Lines that write what pairs of outputs came to: of each 16 columns the first of a pair has the first half."""
        return [
            f"acc = gl.convert_layout(acc.to({self.kind}).reshape([64, BLOCK_M // 2]), STORE)",
            "pairs = gl.split(acc.reshape([32, 2, BLOCK_M // 2]).permute([0, 2, 1]))",
            "n = row * 32 + gl.arange(0, 32, gl.SliceLayout(1, PAIRS))[:, None]",
            "m = gl.arange(0, BLOCK_M // 2, gl.SliceLayout(0, PAIRS))[None, :]",
            "for i in gl.static_range(2):",
            "    m_of = m // 8 * 16 + m % 8 + 8 * i",
            "    at = start.to(gl.int64) * (N // 2) + (m_of * (N // 2) + n)",
            "    y = gl.convert_layout(pairs[i], PAIRS, assert_trivial=True)",
            "    gl.store(out_ptr + at, y, mask=(m_of < m_count - start) & (n < (N // 2)))",
        ]

    def written_to(self, axis: str, part: str, size: str, place: str, value: str, layout: str = "STORE") -> list[str]:
        """Lines that write a team's values, 64 by BLOCK_M, to rows of y."""
        return [
            f"{axis} = {part} * 64 + gl.arange(0, 64, gl.SliceLayout(1, {layout}))[:, None]",
            f"m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, {layout}))[None, :]",
            f"at = {place} * {size} + (m * {size} + {axis})",
            f"gl.store(out_ptr + at, {value}, mask=(m < m_count - start) & ({axis} < {size}))",
        ]

    def fixed(self) -> dict[str, Op]:
        return {name: op for name, op in super().fixed().items() if name not in ("scale.at", "scaled")}  # it is on the weight
