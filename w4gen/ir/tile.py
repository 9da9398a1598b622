"""Tiles and what makes them: the four transforms (Slice, Pad, Map, Convert) and Const, Input, Dot, Reduce, Store."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from w4gen.errors import ShapeError
from w4gen.ir.decode import Decode
from w4gen.ir.layout import Layout
from w4gen.ir.types import DType, Format


class Space(Enum):
    """Where a tile lives while a kernel runs."""

    GLOBAL = "global"
    SHARED = "shared"
    REGISTER = "register"


@dataclass(frozen=True, slots=True)
class Tile:
    """A block of elements with named axes (Ladder's tTile). A kept tile is a buffer of a weight."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    element: DType | Format
    space: Space = Space.REGISTER
    layout: Layout | None = None
    kept: bool = False

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape) or any(size < 1 for size in self.shape):
            raise ShapeError(f"tile axes {self.axes} and shape {self.shape}: give one positive size per axis")

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(self.axes, self.shape, strict=True))

    def __str__(self) -> str:
        element = self.element.label if isinstance(self.element, Format) else self.element.name
        shape = " ".join(f"{axis}={size}" for axis, size in self.sizes.items())
        return f"{element}[{shape}] {self.space.value}{', kept' if self.kept else ''}"


@dataclass(frozen=True, slots=True)
class Const:
    """Data known before any call: the codes, scales, zeros or codebook of a weight."""

    def __str__(self) -> str:
        return "const"


@dataclass(frozen=True, slots=True)
class Input:
    """Data of a call."""

    def __str__(self) -> str:
        return "input"


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of `axis`: `size` elements from `loop * size * every` on; `drop` takes one element and drops the axis."""

    axis: str
    size: int = 1
    loop: str = ""
    every: int = 1
    drop: bool = False

    def __str__(self) -> str:
        if self.drop and not self.loop:
            return f"{self.axis}=0"
        return f"{self.axis}={self.loop}*{self.size * self.every}" + ("" if self.drop else f"+{self.size}")


@dataclass(frozen=True, slots=True)
class Slice:
    """Take one block along each named axis, and all of every other axis."""

    blocks: tuple[Block, ...]

    def __str__(self) -> str:
        return f"slice {', '.join(map(str, self.blocks))}"


@dataclass(frozen=True, slots=True)
class Pad:
    """Grow each named axis to `size`, filling with zero."""

    sizes: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return f"pad {', '.join(f'{axis}={size}' for axis, size in self.sizes)}"


@dataclass(frozen=True, slots=True)
class Pack:
    """Map: elements -> the units that `layout` stores them in."""

    layout: Layout

    def __str__(self) -> str:
        return f"map to {self.layout}"


@dataclass(frozen=True, slots=True)
class Unpack:
    """Map: stored units -> elements, the inverse of Pack."""

    layout: Layout

    def __str__(self) -> str:
        return f"map from {self.layout}"


@dataclass(frozen=True, slots=True)
class Field:
    """Map: a 32-bit word -> its codes, in `spans` stretches; axes (…, word) -> (…, word, span, code)."""

    layout: Layout
    spans: int

    def __str__(self) -> str:
        return f"map word to {self.spans} x {self.layout.per_unit // self.spans} codes"


@dataclass(frozen=True, slots=True)
class Split:
    """Map: k -> (word, span, code), as `layout` stores the codes of a row."""

    layout: Layout
    spans: int

    def __str__(self) -> str:
        return f"map k to word, {self.spans} x {self.layout.per_unit // self.spans} codes"


@dataclass(frozen=True, slots=True)
class Repeat:
    """Map: one group g -> its `group` elements of k, `size` in all."""

    group: int
    size: int

    def __str__(self) -> str:
        return f"map each g to {self.group} k"


@dataclass(frozen=True, slots=True)
class RunOn:
    """Map: g -> (n, k). The `columns` stretches of `group` k of each row follow one another, and `every` of them share a g."""

    group: int
    columns: int
    every: int
    rows: int
    size: int

    @property
    def single(self) -> bool:
        """Whether one g is shared by the whole tensor."""
        return self.every >= self.rows * self.columns

    def __str__(self) -> str:
        return f"map each g to {self.every} x {self.group} k, over rows"


@dataclass(frozen=True, slots=True)
class Fold:
    """Map: word -> (lane, quad), `quad` neighbouring words a lane: 16 bytes that one load brings to one thread."""

    quad: int

    def __str__(self) -> str:
        return f"map word to lane, {self.quad}"


Map: TypeAlias = Pack | Unpack | Field | Split | Repeat | RunOn | Fold


@dataclass(frozen=True, slots=True)
class Convert:
    """Change the element: `codes` -> values (by `decode`, once placed), `value` or `acc` times `scale`, minus `zero`, or a cast.

    On the sums, `origin` is what `decode` left out of every value, (acc + origin * sum of x) * scale, and a zero takes the sum
    of x along: acc - zero * sum of x.
    """

    decode: Decode | None = None
    origin: float = 0.0

    def __str__(self) -> str:
        how = f" by {len(self.decode.field + self.decode.value)} word operations" if self.decode else ""
        return f"convert{how}" + (f", origin {self.origin:g}" if self.origin else "")


@dataclass(frozen=True, slots=True)
class Dot:
    """Multiply `w` by `x` and sum over the axes `over`; `unit` is lanes (multiply-add), mma (matrix cores) or vendor.

    On matrix cores w is the `left` operand (y^T = w x^T, decoded in registers) or the `right` one (through shared memory).
    `vendor` is a kernel that is not ours: the vendor's matmul of two matrices in memory.
    """

    over: tuple[str, ...]
    unit: str = "lanes"
    side: str = "right"

    def __str__(self) -> str:
        return f"dot over {', '.join(self.over)} on {self.unit}" + (f", w {self.side}" if self.unit == "mma" else "")


@dataclass(frozen=True, slots=True)
class Reduce:
    """Sum over axes of the tile and, where `loop` names one, over the turns of a loop.

    With `split` above 1 the turns are dealt out in rotation, and the result has an axis `part` of that many partial sums.
    """

    over: tuple[str, ...] = ()
    loop: str = ""
    split: int = 1

    def __str__(self) -> str:
        parts = f", in {self.split} parts" if self.split > 1 else ""
        return f"sum over {', '.join([*self.over, *([self.loop] if self.loop else [])])}{parts}"


@dataclass(frozen=True, slots=True)
class Store:
    """Put the blocks of a grid together in memory: crop to `sizes` and round to the element.

    Before that a bias is added, an `activation` applied and a residual added, where there are any.
    """

    sizes: tuple[tuple[str, int], ...]
    activation: str = ""

    def __str__(self) -> str:
        return f"store {self.activation}".strip()


Op: TypeAlias = Const | Input | Slice | Pad | Map | Convert | Dot | Reduce | Store


def sizes(op: Op, operands: dict[str, Tile]) -> dict[str, int]:
    """Axes and sizes of what `op` makes of its operands (Const and Input state their own)."""
    first = next(iter(operands.values())).sizes
    match op:
        case Slice(blocks):
            cut = {block.axis: block for block in blocks}
            return {a: cut[a].size if a in cut else s for a, s in first.items() if a not in cut or not cut[a].drop}
        case Pad(grown):
            return {**first, **dict(grown)}
        case Store(grown):
            return dict(grown)
        case Pack(layout):
            if layout.bits == layout.unit and layout.row_major:
                return first
            units = layout.row_units() if layout.bits < layout.unit else None
            plain = units is not None and layout.high is None and layout.unit == 32
            return {"n": layout.size("n"), "word": units or 1} if plain else {"word": layout.length}
        case Unpack(layout):
            return {axis: layout.size(axis) for axis in layout.axes}
        case Field(layout, spans):
            return {**first, "span": spans, "code": layout.per_unit // spans}
        case Split(layout, spans):
            kept = {axis: size for axis, size in first.items() if axis != "k"}
            return {**kept, "word": layout.size("k") // layout.per_unit, "span": spans, "code": layout.per_unit // spans}
        case Fold(quad):
            folded = ((("lane", s // quad), ("quad", quad)) if a == "word" else ((a, s),) for a, s in first.items())
            return dict(pair for pairs in folded for pair in pairs)
        case Repeat(_, size):
            return {**{axis: size for axis, size in first.items() if axis != "g"}, "k": size}
        case RunOn(rows=rows, size=size):
            return {"n": rows, "k": size}
        case Dot(over):
            w, x = operands["w"].sizes, operands["x"].sizes
            return {a: {**w, **x}[a] for a in dict.fromkeys(("m", "n", *w)) if a in {**w, **x} and a not in over}
        case Reduce(over, _, split):
            parts = {"part": split} if split > 1 else {}
            return parts | {axis: size for axis, size in first.items() if axis not in over}
        case _:
            return first
