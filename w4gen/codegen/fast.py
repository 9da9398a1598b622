"""Printers of the two fast templates, on matrix cores and in pairs of halves."""

from __future__ import annotations

import math
from typing import Any

from w4gen.codegen import epilogue, ptx, tl
from w4gen.codegen.gluon import GluonPrinter
from w4gen.codegen.printer import constants
from w4gen.codegen.scales import in_gluon
from w4gen.codegen.walk import Walk
from w4gen.errors import TemplateError
from w4gen.ir.groups import together
from w4gen.ir.problem import PAIRED
from w4gen.ir.program import Program
from w4gen.ir.tile import Dot
from w4gen.ir.types import F16
from w4gen.schedule.rewrite import GROUPED
from w4gen.schedule.schedule import Schedule


class MmaPrinter(GluonPrinter):
    """Printer of gemv_mma: mma.sync, the weights on the left, x through a ring in shared memory."""

    UNITS = (("mma", "left"),)

    DOT = Dot(("k",), "mma", "left")

    def __init__(self, program: Program, schedule: Schedule, features: frozenset[str] = frozenset()) -> None:
        super().__init__(program, schedule, features)
        copies, blocks = self.blocks["m"] // 4, self.blocks["n"] // 16
        if copies % schedule.teams or blocks % schedule.teams:
            raise TemplateError(
                f"gemv_mma gives each of {schedule.teams} teams as many of {blocks} times 16 outputs, and of {copies} copies of x"
            )

    @property
    def rows(self) -> int:
        return super().rows // int(self.schedule.teams)

    def calls(self) -> dict[str, Any]:
        each = self.blocks["m"] * 128
        own = {"ring": self.ring, "ring_bytes": self.ring * self.schedule.warps * each, "pair": self.pair}
        own["near"] = 2 if self.activation == PAIRED else 1
        own |= {"products": self.products()}
        return super().calls() | own | {"laps": self.laps}

    @property
    def ring(self) -> int:
        """Pieces of x in flight, of those that a warp has."""
        if self.schedule.ring < 2:
            raise TemplateError(f"gemv_mma asks for x while the piece before is read: ring={self.schedule.ring}, take 2 or more")
        return min(int(self.schedule.ring), self.turns * self.step_k // 64 + 1)

    LONG = 8500
    """Instructions, 128 KB, that stand one after another at most, by an estimate that is a little high. With more, the next
    program does not find them in the instruction cache, which was seen to double the time of a kernel."""

    @property
    def past(self) -> int:
        """Last steps of a warp that go past the inputs there are."""
        return int(self.turns - self.program.tile("x").sizes["k"] // (self.workers * self.step_k))

    @property
    def alike(self) -> int:
        """Steps before the end from which on none asks for what is past it, or for nothing."""
        return -(-(self.ring - 1) * 64 // self.step_k) + 1 + max(1, self.past)

    @property
    def lap(self) -> int:
        """Steps in the text of a loop: after them the ring is where it was."""
        whole = self.ring // math.gcd(self.ring, self.step_k // 64)
        return -(-4 // whole) * whole

    @property
    def laps(self) -> int:
        """Turns of the loop; 0 where all steps stand one after another, or scales do not come round with the steps.

        The last steps, and those in which these are asked for, stand behind the loop: only there something may be missing.
        """
        round_k = self.lap * self.workers * self.step_k
        whole = not self.apart and all(self.along(name, round_k) is not None for name in GROUPED)
        ahead = max(int(self.schedule.stages), self.alike - 2)
        laps = (self.turns - ahead - 1) // self.lap
        return laps if whole and laps > 1 and self.turns * self.instructions > self.LONG else 0

    @property
    def instructions(self) -> float:
        """About how many a step takes: those of decoding, products, their sums and scales, and what brings x."""
        tiles, words = self.blocks["m"] // 8, self.step_k * self.bits // 64
        scales = 0 if self.apart else self.groups * self.scale_bits / 16 * ptx.instructions(self.scale_ptx())
        products = self.step_k // 16 + 4 * self.groups * self.parallel + self.step_k // 8
        return self.rows * (words * ptx.instructions(self.decoding_ptx()) + scales + tiles * products)

    def along(self, name: str, k: int) -> int | None:
        """Scales, or zeros, from one to what is `k` inputs further; None where these are not whole pieces of what is stored."""
        if name not in self.grouped:
            return 0
        layout = tl.order(self.program, name)
        held = together(self.group(name), layout.size("g"), layout.bits) * self.group(name)
        if layout.size("g") == 1:
            return 0
        return k // held * self.strides(name)["g"][-1] if k % held == 0 else None

    def of_laps(self) -> list[tuple[str, int, str]]:
        """Constants of the loop."""
        k = self.lap * self.workers * self.step_k
        moves = [
            (f"LAP_{name.upper()}S", self.along(name, k) or 0, f"{name}s of these") for name in GROUPED if name in self.grouped
        ]
        return [
            ("LAP", self.lap, "steps of a warp in the text of the loop"),
            ("LAPS", self.laps, "turns of the loop; what is left of the steps comes after it"),
            ("LAP_K", k, "inputs of a turn"),
            ("LAP_WORDS", k // self.order.held["k"] * self.order.units, "words of these"),
            *moves,
        ]

    def constants(self) -> str:
        rows = [
            ("TILES", self.blocks["m"] // 8, "times 8 rows of x"),
            ("TEAMS", self.schedule.teams, "times the outputs of a warp, all with the same rows of x"),
            ("PIECES", self.step_k // 64, "times 64 inputs in a step"),
            ("RING", self.ring, "pieces of x in flight"),
            ("PAST", self.past, "last steps that go past the inputs there are"),
            ("FAR", self.alike, "steps before the end, up to which all are alike"),
            ("GROUPS", self.groups, "scales of an output in a step"),
            ("CHAINS", self.parallel, "sums of the instructions under one scale"),
            ("TOGETHER", self.together, "times 16 inputs multiplied by one text"),
            *(self.of_laps() if self.laps else []),
        ]
        return super().constants() + "\n" + constants(rows, "gl")

    def load(self, operand: str, extra: str = "") -> str:
        if operand == "x":
            self.ledger.update(self.chains["x"])
            return "x = x_ptr + ((base + own) * K + worker * BLOCK_K + lane % 8 * 8)"
        return super().load(operand, extra)

    @property
    def parallel(self) -> int:
        """Sums of their own of the instructions under one scale, which are two where they are many."""
        return 2 if self.blocks["k"] > 32 else 1

    @property
    def together(self) -> int:
        """Times 16 inputs that one text multiplies, under one scale; four took more registers for 32 rows."""
        return int(min(self.step_k // (16 * self.groups), self.order.held["k"] // 16, 2))

    def products(self) -> str:
        """The instructions that multiply so many fragments; even and odd ones have sums of their own, if there are two."""
        sums, ins = 4 * self.parallel, 4 * self.parallel + 6 * self.together

        def places(first: int, count: int) -> str:
            return "{" + ", ".join(f"${first + i}" for i in range(count)) + "}"

        lines = []
        for each in range(self.together):
            chain = each % self.parallel * 4
            added = (ins if each < self.parallel else 0) + chain
            operands = places(sums + 4 * each, 4), places(sums + 4 * self.together + 2 * each, 2), places(added, 4)
            lines.append(
                f"mma.sync.aligned.m16n8k16.row.col.f32.{self.how.dtype.name}.{self.how.dtype.name}.f32\n"
                f"{', '.join([places(chain, 4), *operands])};"
            )
        return "\n".join(lines)

    def dot(self) -> str:
        """The sum of the chains of instructions."""
        self.ledger["part"] += 1
        if self.parallel == 1:
            return "part = parts[tile]"
        sums = ", ".join(f"both[{i}] + both[{4 + i}]" for i in range(4))
        return f"both = parts[tile]\npart = ({sums})"

    def scale(self, operand: str) -> str:
        """Scale the sums: two of a thread belong to n, two to n + 8."""
        self.ledger["scaled"] += 1
        return "scaled = (part[0] * a, part[1] * a, part[2] * b, part[3] * b)"

    def pair(self) -> str:
        """The scales of n and n + 8 in a group, in f32."""
        if self.apart:
            return "\n".join(f"{name} = scale_of(scales[row * GROUPS + group][{index}])" for index, name in enumerate("ab"))
        return (
            "each = scales_of(scales[row * SCALE_LOADS + group // NEAR])\n"
            "a, b = each[group % NEAR * 2], each[group % NEAR * 2 + 1]"
        )

    def reduce(self, *names: str) -> str:
        self.ledger["acc"] += 1
        each = ", ".join(f"old[{i}] + scaled[{i}]" for i in range(4))
        return f"old = sums[0]\nsums = sums[1:] + (({each}),)"

    def store(self) -> str:
        """Multiply by what the sums were left without, a power of two and a scale for all k; add the bias, do the rest, write."""
        lines = [f"total *= 2.0**{self.how.power}"] if self.how.power else []
        if "rescaled" in self.program.graph:
            above = self.program.operands("rescaled")["scale"]
            self.ledger.update([*tl.chain(self.program, above), "rescaled"])
            lines += [in_gluon(line) for line in Walk(self.program, above, 1).load(above)]
            lines.append(f"total *= {tl.variable(above)}.to(gl.float32)")
        lines += self.added()
        at, there = "m * N + n", "(m < m_count) & (n < N)"
        if self.activation == PAIRED:
            pairs = {"at": "m * (N // 2) + n // 2", "there": there}
            lines += ["gate, up = gl.split(total.reshape([8, 8, 2]))", in_gluon(f"total = {epilogue.text('silu', 'gate')} * up")]
            lines += [f"{name}, _ = gl.split(({text}).reshape([8, 8, 2]))" for name, text in pairs.items()]
            at, there = "at", "there"
        else:
            lines += self.finished("total", at, there)
        return "\n".join([*lines, f"gl.store(y_ptr + {at}, total.to({self.kind}), mask={there})"])


class HalfPrinter(GluonPrinter):
    """Printer of gemv_half: one row of x, products added up in halves along 64 k, programs of a cluster sharing k."""

    DOT = Dot(("k",), "halves")
    UNITS = (("halves", "right"),)
    CHAIN = 8
    """Products that one half adds up."""

    def __init__(self, program: Program, schedule: Schedule, features: frozenset[str] = frozenset()) -> None:
        super().__init__(program, schedule, features)
        if self.activation or "residual" in program.operands(self.out):
            raise TemplateError("gemv_half stores sums as they are: take gemv_mma for an activation or a residual")
        if self.blocks["m"] != 1 or self.apart or program.problem.format.minifloat:
            asked = f"block_m={self.blocks['m']} of {program.problem.format}"
            raise TemplateError(f"gemv_half multiplies one row of x by whole halves of one scale, not {asked}: take gemv_mma")

    def calls(self) -> dict[str, Any]:
        split = int(self.schedule.split_k)
        texts = {"cluster_open": ptx.cluster_open(16, split), "cluster_sum": ptx.cluster_sum(16, split)} if split > 1 else {}
        return super().calls() | {"split": split, "x_bytes": self.loads * 512 * self.schedule.warps} | texts

    @property
    def loads(self) -> int:
        """16-byte loads with which a thread brings its share of its warp's x."""
        return -(-self.turns * self.step_k // 256)

    def constants(self) -> str:
        values = self.program.problem.format.values  # a zero is one of them
        largest = max(values) - min(values) if self.centred else max(map(abs, values))
        rows = [
            ("SPLIT", self.schedule.split_k, "programs of a cluster"),
            ("LOADS", self.loads, "16-byte loads of x by a thread"),
            (
                "RANGE",
                math.floor(math.log2(F16.max / (self.CHAIN * largest))),
                f"log2 of |x| up to which {self.CHAIN} products fit a half",
            ),
        ]
        return super().constants() + "\n" + constants(rows, "gl")

    def load(self, operand: str, extra: str = "") -> str:
        if operand == "x":
            self.ledger.update(self.chains["x"])
            k = self.program.problem.k
            inside = "" if self.loads * 256 * self.workers == k else ", mask=each_of(k < K, FOUR).broadcast_to(x.shape), other=0"
            point = "x = x_ptr.to(gl.pointer_type(gl.int32)) + each_of(k // 2, FOUR)"
            return f"{point} + gl.arange(0, 4, gl.SliceLayout(0, FOUR))[None, :]\npart = gl.load(x{inside})"
        return super().load(operand, extra)

    def dot(self) -> str:
        """Two products for each of the two outputs."""
        self.ledger["part"] += 1
        return "\n".join(
            [
                "x0, x1 = x[j % 2 * 2], x[j % 2 * 2 + 1]",
                "low = fma2(w[j % FRAGMENTS][0], x0, low) if j % 4 else mul2(w[j % FRAGMENTS][0], x0)",
                "high = fma2(w[j % FRAGMENTS][1], x0, high) if j % 4 else mul2(w[j % FRAGMENTS][1], x0)",
                "low = fma2(w[j % FRAGMENTS][2], x1, low)",
                "high = fma2(w[j % FRAGMENTS][3], x1, high)",
            ]
        )

    def scale(self, operand: str) -> str:
        self.ledger["scaled"] += 1
        return "a, b = scales_of(scales[0])\nscaled = (part[0] * a, part[1] * b)"

    def reduce(self, *names: str) -> str:
        self.ledger.update(name for name in ("acc", "parts") if name in self.program.graph)
        return "acc = (acc[0] + scaled[0], acc[1] + scaled[1])"

    def store(self) -> str:
        """Add the bias, round and write, in the first program of a cluster."""
        lines = self.added()
        inside = "(n < N) & (share == 0)" if self.schedule.split_k > 1 else "n < N"
        return "\n".join([*lines, f"gl.store(y_ptr + n, total.to({self.kind}), mask={inside})"])
