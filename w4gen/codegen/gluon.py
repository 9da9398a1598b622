"""Printers for Gluon templates: a tensor has one element, or a few neighbours, a thread; lanes are those of the fragment."""

from __future__ import annotations

import math
from typing import Any

from w4gen.codegen import ptx, tl
from w4gen.codegen.blocks import Order
from w4gen.codegen.printer import Printer, constants
from w4gen.errors import TemplateError
from w4gen.ir import decode as d
from w4gen.ir.groups import beside
from w4gen.ir.program import Program
from w4gen.ir.tile import Block, Convert, Dot, Reduce, Repeat, Slice
from w4gen.ir.types import F16, F32
from w4gen.schedule.arch import M16K16
from w4gen.schedule.schedule import Schedule
from w4gen.schedule.stored import fragment_order


class GluonPrinter(Printer):
    """What both fast templates call: words and scales of a thread, and the left operands they decode to."""

    DOT: Dot
    FAR = False

    def __init__(self, program: Program, schedule: Schedule) -> None:
        super().__init__(program, schedule)
        if self.activation or "residual" in program.operands(self.out):
            raise TemplateError(f"{schedule.template} stores sums as they are: an activation or a residual is for gemm")
        layout = tl.order(program, "codes")
        self.order = Order(layout, 2)
        self.how, self.bits = tl.decoding(program), program.problem.format.bits
        self.looked_up = any(isinstance(op, d.Lookup) for op in self.how.value)
        if self.how.dtype.bits != 16 or self.how.per_unit * self.bits != (32 if self.looked_up else 16):
            raise TemplateError(f"{schedule.template} decodes the pairs of a word in 16 bits, not by {self.how}")
        if self.blocks["k"] % 64 or self.blocks["n"] % 16:
            raise TemplateError(f"{schedule.template} takes 16 outputs and 64 k at a time: block_k={self.blocks['k']}")
        if layout != fragment_order(program.problem.format, M16K16, layout.size("n"), layout.size("k")):
            raise TemplateError(
                f"{schedule.template} reads codes in the order of {M16K16.name}, not {layout}: pack the weight again"
            )

    @property
    def workers(self) -> int:
        """Warps that share the steps along k."""
        return int(self.schedule.warps) * int(self.schedule.split_k)

    @property
    def turns(self) -> int:
        """Steps of a worker."""
        return -(-self.chunks // self.workers)

    @property
    def chunks(self) -> int:
        """Steps along k, of all workers."""
        return self.program.tile(self.program.source("w.tile")).sizes["k"] // self.blocks["k"]

    def calls(self) -> dict[str, Any]:
        texts: dict[str, Any] = {"ptx": ptx.decode_pairs(self.how, 2 * len(self.centred))}
        if self.looked_up:
            texts = {"ptx": ptx.look_up_pairs(self.bits), "fill": ptx.fill_pairs(), "entries": 4**self.bits}
        also = "".join(f", {name}" for name in self.extra)
        return super().calls() | texts | {"values": self.values, "kind": self.how.dtype.name, "also": also}

    @property
    def centred(self) -> list[str]:
        """The nodes that subtract a zero from the weight."""
        return [name for name in ("w.centred",) if name in self.program.graph]

    def constants(self) -> str:
        """Sizes of the problem, of a step and of what the warps share."""
        rows = [
            ("N", self.program.tile(self.out).sizes["n"], "outputs"),
            ("K", self.program.tile("x").sizes["k"], "inputs"),
            ("ROWS", self.blocks["n"] // 16, "times 16 outputs per program"),
            ("BLOCK_K", self.blocks["k"], "inputs per step, under one scale"),
            ("QUADS", self.blocks["k"] // self.order.held["k"], f"quads of {self.order.held['k']} inputs in a step"),
            ("FRAGMENTS", self.order.held["k"] // 16, "times 16 inputs in a quad"),
            ("WORDS", self.order.units, "words of a quad's 32 lanes"),
            ("ROW_WORDS", self.order.stride("n"), "words of 16 outputs"),
            ("ROW_SCALES", self.scale_strides["n"][-1], "scales of 16 outputs"),
            *([("ENTRIES", 4**self.bits, "pairs of codes")] if self.looked_up else []),
            ("WARPS", self.schedule.warps, "warps per program"),
            ("WORKERS", self.workers, "warps that share the steps along k"),
            ("STEPS", self.turns, "steps of a warp"),
            ("LAST", self.chunks - (self.turns - 1) * self.workers, "warps that have a last step"),
            ("AHEAD", min(int(self.schedule.stages), self.turns), "steps whose words are asked for ahead"),
        ]
        return constants(rows, "gl")

    def load(self, operand: str, extra: str = "") -> str:
        if operand == "w":
            self.ledger.update(self.parted("w")[0])
            return "\n".join(self.words())
        if operand == "codebook":
            self.ledger["codebook.tile"] += 1
            return "\n".join(self.codebook())
        self.ledger.update(tl.chain(self.program, self.grouped[operand]))
        return "\n".join(self.beside(operand))

    def codebook(self) -> list[str]:
        """Lines that load the two values of an entry of the table of pairs."""
        entries = 2**self.bits
        return [f"low = gl.load(codebook_ptr + entry % {entries})", f"high = gl.load(codebook_ptr + entry // {entries})"]

    def words(self) -> list[str]:
        """Lines that point a thread to its words of the worker's first step."""
        sizes, layout = self.program.tile(self.program.source("w.tile")).sizes, self.order.layout
        if sizes["n"] != layout.size("n"):
            raise TemplateError(f"block_n={self.blocks['n']} does not divide the {layout.size('n')} outputs stored: take 16")
        if sizes["k"] != layout.size("k"):
            raise TemplateError(f"block_k={self.blocks['k']} does not divide the {layout.size('k')} inputs stored: take 64")
        return [
            "at = first * ROW_WORDS + worker * (QUADS * WORDS) + lane * 4",
            "words = codes_ptr + each_of(at, FOUR) + gl.arange(0, 4, gl.SliceLayout(0, FOUR))[None, :]",
        ]

    @property
    def scale_strides(self) -> dict[str, list[int]]:
        """Scales from one to the next along n (lanes, the two outputs of a lane, 16 outputs) and along g."""
        layout = tl.order(self.program, "scale")
        if layout != beside(self.order.layout, layout.size("g"), layout.bits):
            raise TemplateError(f"scale.view reads {layout}, which is not beside the codes: a thread finds no scale there")
        return {axis: [d.stride // layout.bits for d in layout.digits if d.axis == axis] for axis in layout.axes}

    def beside(self, name: str) -> list[str]:
        """Lines that point a thread to the scales, or zeros, of a worker's step."""
        group = next(
            op.group for op in map(self.program.op, tl.chain(self.program, self.grouped[name])) if isinstance(op, Repeat)
        )
        lanes, pair, _ = self.scale_strides["n"]
        if pair != 1:
            raise TemplateError("the scales of n and n + 8 are not neighbours: a thread loads them as one pair")
        own, each = f"first * ROW_SCALES + lane // 4 * {lanes}", self.scale_strides["g"][0]
        if group == self.blocks["k"]:
            lines = [f"at = {own} + worker * {each}"]
            offset = f" + turn * (WORKERS * {each})"
        else:
            lines = [f"at = {own} + (turn * WORKERS + worker) * BLOCK_K // {group} * {each}"]
            offset = ""
        return [*lines, f"{name}s = {name}_ptr + each_of(at, TWO) + gl.arange(0, 2, gl.SliceLayout(0, TWO))[None, :]{offset}"]

    def values(self) -> str:
        """Lines that decode a word."""
        outputs, kinds = ",".join(["=&r"] * self.pairs), ", ".join(["gl.int32"] * self.pairs)
        operands = ", ".join(["word", *self.extra])
        inputs = ",".join("r" for _ in operands.split())
        return (
            f"kinds: gl.constexpr = ({kinds})\n"
            f'return gl.inline_asm_elementwise(DECODE, "{outputs},{inputs}", [{operands}], dtype=kinds, is_pure=True, pack=1)'
        )

    @property
    def extra(self) -> list[str]:
        """What decoding a word takes beside it: the zeros of n and n + 8; a table's promise to be full."""
        return ["zero", "other"] if self.centred else ["full"] if self.looked_up else []

    @property
    def pairs(self) -> int:
        """Pairs of values in a word."""
        return 16 // self.bits

    def decode(self, operand: str) -> str:
        """Lines that give the fragments of a quad, in the order of k, from the layout's digits."""
        self.ledger.update(self.parted("w")[1])
        lines, decoded = ["w = four_of(words)"], [f"values_of({', '.join([f'w[{word}]', *self.extra])})" for word in range(4)]
        if self.pairs >= 4:
            lines += [f"v{word} = {text}" for word, text in enumerate(decoded)]
            starts = range(0, self.pairs, 4)
            each = [f"v{word}[{at}:{at + 4}]" if self.pairs > 4 else f"v{word}" for word in range(4) for at in starts]
        else:
            each = [f"{decoded[word]} + {decoded[word + 1]}" for word in (0, 2)]
        return "\n".join([*lines, f"return {', '.join(each)}"])

    def settle(self, template: str) -> None:
        """The ledger; and the nodes whose lines are the same in every kernel must be just those."""
        super().settle(template)
        split = int(self.schedule.split_k)
        sums = {"acc": Reduce((), "step")} if split == 1 else {"parts": Reduce((), "step", split), "acc": Reduce(("part",))}
        for name, op in {"part": self.DOT, "scale.at": Slice((Block("k", drop=True),)), "scaled": Convert(), **sums}.items():
            found, element = self.program.op(name), self.program.tile(name).element
            if found != op or (name != "scale.at" and element != F32):
                raise TemplateError(f"{template} prints {name} as {op}, in f32, not as {found} in {element}")

    @property
    def kind(self) -> str:
        """The type of y."""
        return tl.type_of(self.program.tile(self.out)).replace("tl.", "gl.")

    def added(self) -> list[str]:
        """Lines that add the bias to `total`."""
        roles = self.program.operands(self.out)
        self.ledger[self.out] += 1
        if "bias" not in roles:
            return []
        self.ledger.update(tl.chain(self.program, roles["bias"]))
        return ["bias = gl.load(bias_ptr + n, mask=n < N, other=0.0)", "total += bias.to(gl.float32)"]


class MmaPrinter(GluonPrinter):
    """Printer of gemv_mma: mma.sync, the weights on the left, x through a ring in shared memory."""

    UNITS = (("mma", "left"),)

    DOT = Dot(("k",), "mma", "left")

    def calls(self) -> dict[str, Any]:
        each = self.blocks["m"] * 128
        return super().calls() | {"ring": self.ring, "ring_bytes": self.ring * self.schedule.warps * each}

    @property
    def ring(self) -> int:
        """Pieces of x in flight, of those that a warp has."""
        return min(int(self.schedule.ring), self.turns * self.blocks["k"] // 64 + 1)

    def constants(self) -> str:
        rows = [
            ("TILES", self.blocks["m"] // 8, "times 8 rows of x"),
            ("PIECES", self.blocks["k"] // 64, "times 64 inputs in a step"),
            ("RING", self.ring, "pieces of x in flight"),
        ]
        return super().constants() + "\n" + constants(rows, "gl")

    def load(self, operand: str, extra: str = "") -> str:
        if operand == "x":
            self.ledger.update(self.chains["x"])
            return "x = x_ptr + ((base + lane // 8) * K + worker * BLOCK_K + lane % 8 * 8)"
        return super().load(operand, extra)

    def dot(self) -> str:
        """The sum of the two chains of instructions."""
        self.ledger["part"] += 1
        return f"part = ({', '.join(f'low[{i}] + high[{i}]' for i in range(4))})"

    def scale(self, operand: str) -> str:
        """Scale the sums: two of a thread belong to n, two to n + 8."""
        self.ledger["scaled"] += 1
        a, b = (f"({each} * 2.0**{self.how.power})" if self.how.power else each for each in "ab")
        return f"a, b = two_of(scales[row])\nscaled = (part[0] * {a}, part[1] * {a}, part[2] * {b}, part[3] * {b})"

    def reduce(self, *names: str) -> str:
        self.ledger["acc"] += 1
        return f"sums = sums + (({', '.join(f'old[{i}] + scaled[{i}]' for i in range(4))}),)"

    def store(self) -> str:
        """Add the bias, round and write."""
        return "\n".join([*self.added(), f"gl.store(y_ptr + m * N + n, total.to({self.kind}), mask=(m < m_count) & (n < N))"])


class HalfPrinter(GluonPrinter):
    """Printer of gemv_half: one row of x, products added up in halves along 64 k, programs of a cluster sharing k."""

    DOT = Dot(("k",), "halves")
    UNITS = (("halves", "right"),)
    CHAIN = 8
    """Products that one half adds up."""

    def calls(self) -> dict[str, Any]:
        split = int(self.schedule.split_k)
        texts = {"cluster_open": ptx.cluster_open(16, split), "cluster_sum": ptx.cluster_sum(16, split)} if split > 1 else {}
        return super().calls() | {"split": split, "x_bytes": self.loads * 512 * self.schedule.warps} | texts

    @property
    def loads(self) -> int:
        """16-byte loads with which a thread brings its share of its warp's x."""
        return -(-self.turns * self.blocks["k"] // 256)

    def constants(self) -> str:
        if self.blocks["m"] != 1 or self.program.problem.format.minifloat:
            raise TemplateError(f"gemv_half multiplies one row of x, not block_m={self.blocks['m']}, and no small floats")
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
        return "a, b = two_of(scales[0])\nscaled = (part[0] * a, part[1] * b)"

    def reduce(self, *names: str) -> str:
        self.ledger.update(name for name in ("acc", "parts") if name in self.program.graph)
        return "acc = (acc[0] + scaled[0], acc[1] + scaled[1])"

    def store(self) -> str:
        """Add the bias, round and write, in the first program of a cluster."""
        lines = self.added()
        inside = "(n < N) & (share == 0)" if self.schedule.split_k > 1 else "n < N"
        return "\n".join([*lines, f"gl.store(y_ptr + n, total.to({self.kind}), mask={inside})"])
