"""How fast templates load and decode scales: beside the codes in words of a lane, or one by one."""

from __future__ import annotations

import re

from w4gen.codegen import ptx, tl
from w4gen.codegen.blocks import Order
from w4gen.codegen.printer import Printer
from w4gen.codegen.walk import Walk
from w4gen.errors import TemplateError
from w4gen.ir.groups import beside, together
from w4gen.ir.tile import Convert, Repeat, RunOn
from w4gen.ir.types import E4M3, Format


def in_gluon(line: str) -> str:
    """A line of `triton.language` as one of Gluon, which has the same names."""
    return re.sub(r"\btl\.", "gl.", line)


def tuple_of(names: list[str]) -> str:
    """Names as a tuple, also of one."""
    return ", ".join(names) + ("," if len(names) == 1 else "")


class ScalePrinter(Printer):
    """What fast templates call for scales."""

    order: Order
    step_k: int

    @property
    def groups(self) -> int:
        """Scales that an output has in a step."""
        return self.step_k // self.blocks["k"]

    @property
    def apart(self) -> bool:
        """Whether scales are loaded one by one: where they are not just kept beside the codes, in whole words for a lane."""
        leaves = self.leaves(self.grouped["scale"])
        alone = len(leaves) > 1 or any(isinstance(op, RunOn) for op in map(self.program.op, tl.chain(self.program, leaves[0])))
        return alone or self.scale_bits < 8 or self.near * 2 * self.scale_bits % 32 > 0

    @property
    def scale_bits(self) -> int:
        """Bits of a scale as it is stored."""
        return tl.order(self.program, "scale").bits

    @property
    def near(self) -> int:
        """Groups of a step whose scales a lane loads at once."""
        return min(self.groups, together(self.group("scale"), tl.order(self.program, "scale").size("g"), self.scale_bits))

    def group(self, name: str) -> int:
        """Weights under one scale, or zero."""
        chain = tl.chain(self.program, self.leaves(self.grouped[name])[0])
        return next(op.group for op in map(self.program.op, chain) if isinstance(op, Repeat))

    def leaves(self, name: str) -> list[str]:
        """What a scale is computed from: slices of what is stored."""
        if not isinstance(self.program.op(name), Convert):
            return [name]
        return list(dict.fromkeys(leaf for source in self.program.operands(name).values() for leaf in self.leaves(source)))

    def stored_scale(self) -> list[str]:
        """Lines that load what the scale of output n at k is made of."""
        lines = []
        for leaf in self.leaves(self.grouped["scale"]):
            walk = Walk(self.program, leaf, 1, {"k": "k"})
            if walk.masks:
                raise TemplateError(f"{leaf} is padded where it is read: the words beside it are not, so take unit=vendor")
            self.ledger.update(tl.chain(self.program, leaf))
            lines += walk.load(leaf, ", mask=there, other=0")
        return [in_gluon(line) for line in lines]

    def whole_scale(self, name: str) -> list[str]:
        """Lines that compute a scale from its leaves."""
        if not isinstance(self.program.op(name), Convert):
            return []
        return [line for source in self.program.operands(name).values() for line in self.whole_scale(source)] + self.node(name)

    def of_scales(self) -> list[tuple[str, int, str]]:
        """Constants that tell where the scales of a step are."""
        return [
            ("ROW_SCALES", self.strides("scale")["n"][-1] * self.scale_bits // 32, "words of scales of 16 outputs"),
            ("NEAR", self.near, "groups whose scales a lane loads at once"),
            ("SCALE_LOADS", self.groups // self.near, "loads of these for the groups of a step"),
            ("SCALE_WORDS", self.near * 2 * self.scale_bits // 32, "words of a load"),
        ]

    def strides(self, name: str) -> dict[str, list[int]]:
        """Scales, or zeros, from one to the next along n (lanes, the two outputs of a lane, 16 outputs) and along g."""
        layout = tl.order(self.program, name)
        held = together(self.group(name), layout.size("g"), layout.bits)
        if layout != beside(self.order.layout, layout.size("g"), layout.bits, held):
            raise TemplateError(f"{name}.view reads {layout}, which is not beside the codes: a thread finds no {name} there")
        strides = {axis: [d.stride // layout.bits for d in layout.digits if d.axis == axis] for axis in layout.axes}
        if strides["n"][1] != 1:
            raise TemplateError(f"the {name}s of n and n + 8 are not neighbours: a thread loads them as one pair")
        return strides

    def beside(self, name: str) -> list[str]:
        """Lines that point a thread to the scales of a part of its worker's step, in words, or to its two zeros."""
        strides, group, groups = self.strides(name), self.group(name), self.groups
        unit, layout = (32 // self.scale_bits, "SCALES") if name == "scale" else (1, "TWO")
        lanes, each = strides["n"][0] // unit, strides["g"][-1] // unit
        held = together(group, tl.order(self.program, name).size("g"), self.scale_bits)
        if group < self.step_k and (name == "zero" or group * groups != self.step_k):
            raise TemplateError(f"{self.step_k // groups} k of a step are not under one {name}, which {group} k have")
        offset = ""
        if group > self.step_k:
            at = f"(turn * WORKERS + worker) * BLOCK_K // {group} * {each}"
        elif held > groups:
            at = f"(turn * WORKERS + worker) * {groups} // {held} * {each}"
            at += f" + (turn * WORKERS + worker) * {groups} % {held} * 2 // {unit}"
        else:
            at, offset = f"worker * {groups // held * each}", f" + turn * (WORKERS * {groups // held * each})"
            offset += f" + part * {each}" if groups > held else ""
        own = f"first * ROW_{name.upper()}S + lane // 4{f' * {lanes}' if lanes > 1 else ''}"
        pointer, count = ("scale_ptr.to(gl.pointer_type(gl.int32))", "SCALE_WORDS") if name == "scale" else ("zero_ptr", "2")
        return [
            f"at = {own} + {at}",
            f"inside = gl.arange(0, {count}, gl.SliceLayout(0, {layout}))[None, :]{offset}",
            f"{name}s = {pointer} + each_of(at, {layout}) + inside",
        ]

    def scale_ptx(self) -> str:
        """What turns a word of scales into f32."""
        whole = self.grouped["scale"]
        op, kind = self.program.op(whole), self.program.tile(self.leaves(whole)[0]).element
        if isinstance(op, Convert) and op.decode is not None:
            small = kind.minifloat if isinstance(kind, Format) else None
            return ptx.e4m3_scales() if small == E4M3 and "e4m3" in self.features else ptx.coded_scales(op.decode)
        return ptx.stored_scales(str(kind))

    def scale_words(self) -> list[str]:
        """Lines that give the scales of what a lane has loaded, in f32, group after group."""
        count, outputs = self.near * 2 * self.scale_bits // 32, 32 // self.scale_bits
        names, asm = [f"w{word}" for word in range(count)], f'"{",".join(["=&f"] * outputs)},r"'
        lines = ["w0, w1, w2, w3 = four_of(words)"] if count == 4 else ["w0, w1 = gl.split(words)"] if count == 2 else []
        if count < 4:
            taken = {"w0": "words.reshape([THREADS])"} if count == 1 else {name: name for name in names}
            lines += [f"{name} = gl.convert_layout({text}, EACH, assert_trivial=True)" for name, text in taken.items()]
        lines.append(f"kinds: gl.constexpr = ({tuple_of(['gl.float32'] * outputs)})")
        for name in names:
            lines.append(f"{name} = gl.inline_asm_elementwise(SCALE, {asm}, [{name}], dtype=kinds, is_pure=True, pack=1)")
        return [*lines, f"return {' + '.join(names)}"]
