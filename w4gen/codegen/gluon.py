"""Printers for Gluon templates: a tensor has one element, or a few neighbours, a thread; lanes are those of the fragment."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from w4gen.codegen import epilogue, ptx, tl
from w4gen.codegen.blocks import Order
from w4gen.codegen.printer import constants
from w4gen.codegen.scales import ScalePrinter, in_gluon, tuple_of
from w4gen.errors import TemplateError
from w4gen.ir import decode as d
from w4gen.ir.program import Program
from w4gen.ir.tile import Block, Convert, Dot, Op, Reduce, Slice
from w4gen.ir.types import F32
from w4gen.schedule.arch import M16K16
from w4gen.schedule.schedule import Schedule
from w4gen.schedule.stored import fragment_order


class GluonPrinter(ScalePrinter):
    """What both fast templates call: words and scales of a thread, and the left operands they decode to."""

    DOT: Dot
    FAR = False

    def __init__(self, program: Program, schedule: Schedule, features: frozenset[str] = frozenset()) -> None:
        super().__init__(program, schedule, features)
        layout = tl.order(program, "codes")
        self.order = Order(layout, 2)
        self.how, self.bits = tl.decoding(program), program.problem.format.bits
        self.looked_up = any(isinstance(op, d.Lookup) for op in self.how.value)
        if self.how.dtype.bits != 16 or self.how.per_unit * self.bits != (32 if self.looked_up else 16):
            raise TemplateError(f"{schedule.template} decodes the pairs of a word in 16 bits, not by {self.how}")
        self.step_k = schedule.block_k
        if self.step_k % 64 or self.blocks["n"] % 16:
            raise TemplateError(f"{schedule.template} takes 16 outputs and 64 k at a time: block_k={self.step_k}")
        if layout != fragment_order(program.problem.format, M16K16, layout.size("n"), layout.size("k")):
            raise TemplateError(
                f"{schedule.template} reads codes in the order of {M16K16.name}, not {layout}: pack the weight again"
            )

    @property
    def rows(self) -> int:
        """Times 16 outputs that a warp has."""
        return int(self.blocks["n"] // 16)

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
        return self.program.tile(self.program.source("w.tile")).sizes["k"] // self.step_k

    def calls(self) -> dict[str, Any]:
        texts: dict[str, Any] = {"ptx": self.decoding_ptx()}
        texts |= {"fill": ptx.fill_pairs(), "entries": 4**self.bits} if self.looked_up else {}
        also = "".join(f", {name}" for name in self.extra)
        parts = [part for part in self.program.problem.format.parts(1, 1) if part.partition(".")[0] == "scale"]
        of_scale = {
            "apart": self.apart,
            "scale_ptx": "" if self.apart else self.scale_ptx(),
            "pointers": tuple_of([tl.pointer(self.program, part) for part in parts]),
            "leaves": tuple_of([tl.variable(leaf) for leaf in self.leaves(self.grouped["scale"])]),
        }
        return super().calls() | texts | of_scale | {"values": self.values, "kind": self.how.dtype.name, "also": also}

    @property
    def centred(self) -> list[str]:
        """The nodes that subtract a zero from the weight."""
        return [name for name in ("w.centred",) if name in self.program.graph]

    def constants(self) -> str:
        """Sizes of the problem, of a step and of what the warps share."""
        rows = [
            ("N", self.sums, "outputs"),
            ("K", self.program.tile("x").sizes["k"], "inputs"),
            ("ROWS", self.rows, "times 16 outputs of a warp"),
            ("BLOCK_K", self.step_k, f"inputs per step, under {'one scale' if self.groups == 1 else f'{self.groups} scales'}"),
            ("QUADS", self.step_k // self.order.held["k"], f"quads of {self.order.held['k']} inputs in a step"),
            ("FRAGMENTS", self.order.held["k"] // 16, "times 16 inputs in a quad"),
            ("WORDS", self.order.units, "words of a quad's 32 lanes"),
            ("ROW_WORDS", self.order.stride("n"), "words of 16 outputs"),
            *([] if self.apart else self.of_scales()),
            *([("ROW_ZEROS", self.strides("zero")["n"][-1], "zeros of 16 outputs")] if self.centred else []),
            *([("ENTRIES", 4**self.bits, "pairs of codes")] if self.looked_up else []),
            ("WARPS", self.schedule.launched, "warps per program"),
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
        if operand == "scale" and self.apart:
            return "\n".join(self.stored_scale())
        self.ledger.update(tl.chain(self.program, self.leaves(self.grouped[operand])[0]))
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
            raise TemplateError(f"block_k={self.step_k} does not divide the {layout.size('k')} inputs stored: take 64")
        return [
            "at = first * ROW_WORDS + worker * (QUADS * WORDS) + lane * 4",
            "words = codes_ptr + each_of(at, FOUR) + gl.arange(0, 4, gl.SliceLayout(0, FOUR))[None, :]",
        ]

    def decoding_ptx(self) -> str:
        """What turns a word of codes into pairs."""
        return ptx.look_up_pairs(self.bits) if self.looked_up else ptx.decode_pairs(self.how, 2 * len(self.centred))

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
        """Lines that give the fragments of a quad, in the order of k, or a scale from what is stored of it."""
        whole = self.grouped["scale"]
        if operand == "scale" and not self.apart:
            self.ledger[whole] += isinstance(self.program.op(whole), Convert)
            return "\n".join(self.scale_words())
        if operand == "scale":
            lines = [in_gluon(line) for line in self.whole_scale(whole)]
            return "\n".join([*lines, f"return {tl.variable(whole)}.to(gl.float32)"])
        self.ledger.update(takewhile(lambda name: "scale" not in self.program.operands(name), self.parted("w")[1]))
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
        for name, op in self.fixed().items():
            found, element = self.program.op(name), self.program.tile(name).element
            if found != op or (name != "scale.at" and element != F32):
                raise TemplateError(f"{template} prints {name} as {op}, in f32, not as {found} in {element}")

    def fixed(self) -> dict[str, Op]:
        """The nodes whose lines are the same in every kernel."""
        split = int(self.schedule.split_k)
        sums: dict[str, Op] = {"acc": Reduce((), "step")}
        if split > 1:
            sums = {"parts": Reduce((), "step", split), "acc": Reduce(("part",))}
        return {"part": self.DOT, "scale.at": Slice((Block("k", drop=True),)), "scaled": Convert(), **sums}

    @property
    def kind(self) -> str:
        """The type of y."""
        return tl.type_of(self.program.tile(self.out)).replace("tl.", "gl.")

    def finished(self, value: str, at: str, inside: str) -> list[str]:
        """Lines that apply the activation to `value` and add the residual `at` its place, where there are any."""
        lines, roles = [], self.program.operands(self.out)
        if self.activation:
            lines.append(in_gluon(f"{value} = {epilogue.text(self.activation, value)}"))
        if "residual" in roles:
            self.ledger.update(tl.chain(self.program, roles["residual"]))
            lines.append(f"residual = gl.load(residual_ptr + {at}, mask={inside}, other=0.0)")
            lines.append(f"{value} += residual.to(gl.float32)")
        return lines

    def added(self, n: str = "n", total: str = "total", spread: str = "") -> list[str]:
        """Lines that add the bias of outputs `n` to `total`."""
        roles = self.program.operands(self.out)
        self.ledger[self.out] += 1
        if "bias" not in roles:
            return []
        self.ledger.update(tl.chain(self.program, roles["bias"]))
        return [f"bias = gl.load(bias_ptr + {n}, mask={n} < N, other=0.0)", f"{total} += bias.to(gl.float32){spread}"]
