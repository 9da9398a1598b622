"""Execute a program tile by tile, as the kernels of it would: slowly, for truth. The array module is passed in.

`offline` runs the part that packs a weight, in NumPy or torch (on a GPU too). `interpret` runs everything, in NumPy.
Sums are f64; every tile is rounded to its element, so the result shows what the chosen types cost.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from math import erf, pi, sqrt
from typing import Any

import networkx as nx
import numpy as np

from w4gen.errors import ShapeError
from w4gen.ir import layout as layouts
from w4gen.ir.program import Program
from w4gen.ir.tile import (
    Block,
    Const,
    Convert,
    Dot,
    Field,
    Fold,
    Input,
    Pack,
    Pad,
    Reduce,
    Repeat,
    RunOn,
    Slice,
    Split,
    Store,
    Tile,
    Unpack,
)  # fmt: skip
from w4gen.ir.types import DType

At = dict[str, int]


def round_to(element: DType, array: Any) -> Any:
    """`array` rounded to nearest even to a float type; bf16 stands as f32 with the low half zero."""
    with np.errstate(over="ignore", invalid="ignore"):
        if element.name != "bf16":
            return array.astype({"f16": np.float16, "f32": np.float32}[element.name])
        single = np.ascontiguousarray(array, np.float32)
        bits = single.view(np.uint32)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        return np.where(np.isnan(single), single, nearest.view(np.float32))


def activated(sums: Any, kind: str) -> Any:
    """An activation of f64[…, n], as `Problem` names them; of pairs along n, half as many."""
    match kind:
        case "relu":
            return np.maximum(sums, 0)
        case "gelu":
            return sums * (1 + np.vectorize(erf, otypes=[np.float64])(sums / sqrt(2))) / 2
        case "gelu_tanh":
            return sums * (1 + np.tanh(sqrt(2 / pi) * (sums + 0.044715 * sums**3))) / 2
        case "silu":
            return sums / (1 + np.exp(-sums))
        case "silu_mul":
            return activated(sums[..., 0::2], "silu") * sums[..., 1::2]
        case _:
            return sums


def offline(program: Program, data: dict[str, Any], xp: Any, names: Iterable[str] | None = None) -> dict[str, Any]:
    """The kept buffers of a weight: `data` maps each Const (`codes` u8[n, k], `scale` [n, g], …) to its array in `xp`.

    With `names`, only those buffers, of the constants that they need.
    """
    run = _Run(program, data, xp)
    return {name: run.value(name, {}) for name in (program.kept if names is None else names)}


def interpret(program: Program, data: dict[str, Any]) -> Any:
    """`y` for `data` = constants and inputs (`x` [m, k], `bias` [n]) as NumPy arrays."""
    return round_to(program.problem.y, _Run(program, data, np).value(list(program)[-1], {}))


class _Run:
    """One evaluation: what no Slice of the same kernel moves is computed once."""

    def __init__(self, program: Program, data: dict[str, Any], xp: Any) -> None:
        self.program, self.data, self.xp = program, data, xp
        self.whole: dict[str, Any] = {}
        # a Store puts blocks together, so what comes after it does not move with the blocks before it
        cut = nx.DiGraph(program.graph)
        cut.remove_edges_from([edge for name in program.of(Store) for edge in program.graph.out_edges(name)])
        slices = program.of(Slice)
        self.moving = set(slices).union(*(nx.descendants(cut, name) for name in slices)) - set(program.of(Store))
        self.grids = {name: self.loops(nx.ancestors(cut, name)) for name in program.of(Store)}

    def loops(self, among: set[str]) -> dict[str, int]:
        """Turns of every grid and step loop of the slices among some nodes."""
        turns: dict[str, int] = {}
        for name in self.program.of(Slice):
            sizes = self.program.tile(self.program.source(name)).sizes
            for block in self.program.op(name).blocks if name in among else ():  # type: ignore[union-attr]
                if block.loop:
                    turns[block.loop] = max(turns.get(block.loop, 1), -(-sizes[block.axis] // (block.size * block.every)))
        return turns

    def stored(self, name: str) -> Any:
        """What a Store writes, block by block of its grid."""
        tile = self.program.tile(name)
        whole = np.full(tile.shape, np.nan, np.float64)
        turns = [range(self.grids[name].get(axis, 1)) for axis in tile.axes]
        for place in product(*turns):
            at = dict(zip(tile.axes, place, strict=True))
            operands = {role: self.value(source, at) for role, source in self.program.operands(name).items()}
            block = operands["acc" if "acc" in operands else "of"].astype(np.float64)
            block = block + operands["bias"].astype(np.float64) if "bias" in operands else block
            block = activated(block, self.program.op(name).activation)  # type: ignore[union-attr]
            block = block + operands["residual"].astype(np.float64) if "residual" in operands else block
            order = [self.program.tile(self.program.source(name)).axes.index(axis) for axis in tile.axes]
            corner = [turn * block.shape[axis] for turn, axis in zip(place, order, strict=True)]
            if any(c >= end for c, end in zip(corner, whole.shape, strict=True)):
                continue  # rows of the layout that are all padding
            block = block.transpose(order)
            window = tuple(slice(c, min(c + s, end)) for c, s, end in zip(corner, block.shape, whole.shape, strict=True))
            whole[window] = block[tuple(slice(0, w.stop - w.start) for w in window)]
        return whole

    def value(self, name: str, at: At) -> Any:
        """The tile of a node at one place of the grid and the loops."""
        if name in self.whole:
            return self.whole[name]
        op, tile = self.program.op(name), self.program.tile(name)
        if isinstance(op, Const | Input):
            if tuple(self.data[name].shape) != tile.shape:
                raise ShapeError(f"{name} has shape {list(self.data[name].shape)}, the program needs {list(tile.shape)}")
            return self.data[name]
        if isinstance(op, Store):
            result = self.whole[name] = round_to(tile.element, self.stored(name))  # type: ignore[arg-type]
            return result
        if isinstance(op, Reduce) and op.loop:
            operands = {"of": np.stack([self.turns(name, at, part, op) for part in range(op.split)])}
            if op.split == 1:
                operands = {"of": operands["of"][0]}
        else:
            operands = {role: self.value(source, at) for role, source in self.program.operands(name).items()}
        result = self.apply(op, name, operands, at)
        if isinstance(op, Convert | Dot | Reduce) and isinstance(tile.element, DType):
            result = round_to(tile.element, result)
        if name not in self.moving:
            self.whole[name] = result
        return result

    def turns(self, name: str, at: At, part: int, op: Reduce) -> Any:
        """The sum over every split-th turn of a loop, from `part` on."""
        turns = range(part, self.loops(nx.ancestors(self.program.graph, name))[op.loop], op.split)
        each = (self.value(self.program.source(name), {**at, op.loop: turn}).astype(np.float64) for turn in turns)
        return sum(each)

    def apply(self, op: Any, name: str, operands: dict[str, Any], at: At) -> Any:
        xp, tile = self.xp, self.program.tile(name)
        first = next(iter(operands.values()))
        axes = list(self.program.tile(self.program.source(name)).axes)
        match op:
            case Slice(blocks):
                return _cut(first, axes, blocks, at)
            case Pad(sizes):
                grown = xp.zeros([dict(sizes).get(a, s) for a, s in zip(axes, first.shape, strict=True)], **_like(first))
                grown[tuple(slice(0, size) for size in first.shape)] = first
                return grown
            case Pack(layout):
                return layouts.pack(layout, first, xp).reshape(tile.shape)
            case Unpack(layout):
                return layouts.unpack(layout, first.reshape(-1), xp)
            case Field(layout, _):
                fields = [(first >> layout.bit(code)) & (2**layout.bits - 1) for code in range(layout.per_unit)]
                return np.stack(fields, -1).reshape(tile.shape)
            case Split(layout, _):
                word, code = np.arange(tile.sizes["word"])[:, None], np.arange(layout.per_unit)[None, :]
                gathered = np.take(first, layout.index("k", word, code), axis=axes.index("k"))
                return np.moveaxis(gathered, [axes.index("k"), axes.index("k") + 1], [-2, -1]).reshape(tile.shape)
            case Fold():
                return first.reshape([*tile.shape[: axes.index("word") + 2], *first.shape[axes.index("word") + 1 :]])
            case Repeat(group, size):
                return np.take(first, np.arange(size) // group, axis=axes.index("g"))
            case RunOn():
                stretch = np.arange(op.rows)[:, None] * op.columns + np.arange(op.size) // op.group
                return first[0][np.minimum(stretch // op.every, first.shape[1] - 1)]
            case Convert():
                return self.convert(name, op, operands)
            case Dot(over):
                return _dot(self.program, name, operands["w"], operands["x"], over, tile)
            case Reduce(over, _, split):
                before = (["part"] if split > 1 else []) + axes
                return first.sum(axis=tuple(before.index(axis) for axis in over), dtype=np.float64)

    def convert(self, name: str, op: Convert, operands: dict[str, Any]) -> Any:
        if "codes" in operands:
            form: Any = self.program.tile(self.program.operands(name)["codes"]).element
            table = np.asarray(operands["codebook"] if form.codebook is not None else form.values, np.float64)
            return (table - (op.decode.left_out if op.decode else 0))[operands["codes"]]
        value = next(iter(operands.values())).astype(np.float64)
        total = self.aligned(name, "sum", operands) if "sum" in operands else 1
        if "scale" in operands:
            return (value + op.origin * total if op.origin else value) * self.aligned(name, "scale", operands)
        return value - self.aligned(name, "zero", operands) * total if "zero" in operands else value

    def aligned(self, name: str, role: str, operands: dict[str, Any]) -> Any:
        """An operand in f64, with an axis of one for every axis of the result that it lacks."""
        have = self.program.tile(self.program.operands(name)[role]).sizes
        return operands[role].astype(np.float64).reshape([have.get(axis, 1) for axis in self.program.tile(name).axes])


def _like(array: Any) -> dict[str, Any]:
    return {"dtype": array.dtype, "device": array.device} if hasattr(array, "device") else {"dtype": array.dtype}


def _cut(array: Any, axes: list[str], blocks: tuple[Block, ...], at: At) -> Any:
    index: list[Any] = [slice(None)] * len(axes)
    for block in blocks:
        start = at.get(block.loop, 0) * block.size * block.every
        index[axes.index(block.axis)] = start if block.drop else slice(start, start + block.size)
    return array[tuple(index)]


def _dot(program: Program, name: str, w: Any, x: Any, over: tuple[str, ...], tile: Tile) -> Any:
    roles = program.operands(name)
    axes = {role: program.tile(roles[role]).axes for role in ("w", "x")}
    letter = {axis: chr(ord("a") + index) for index, axis in enumerate(dict.fromkeys((*axes["w"], *axes["x"])))}
    spec = ",".join("".join(letter[axis] for axis in axes[role]) for role in ("w", "x"))
    with np.errstate(invalid="ignore", over="ignore"):
        return np.einsum(f"{spec}->{''.join(letter[axis] for axis in tile.axes)}", w.astype(np.float64), x.astype(np.float64))
