"""A quantized weight: packed codes, scales, zeros, and how to read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from w4gen import quantize
from w4gen.errors import ShapeError
from w4gen.formats import named
from w4gen.ir import layout as layouts
from w4gen.ir.interpret import offline
from w4gen.ir.layout import Layout
from w4gen.ir.lower import lower
from w4gen.ir.problem import Problem
from w4gen.ir.program import Program
from w4gen.ir.types import Format
from w4gen.runtime import dtypes, repack
from w4gen.runtime.parts import check_parts
from w4gen.schedule.rewrite import pack


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """`w[n, k]` of codes, scales and zeros, one of each per group, as the format says; stored.

    `buffers` are the tensors called `names`, on one device, in the order in which the op and every kernel take them. codes:
    i32[words] as `layout` says · scale: in the format's scale type, one for each row and group, as `layout.beside` says (beside
    rows: [N, groups]) · zero: alike, in the format's zero type · codebook: f32[2**bits]. Scales and zeros that are themselves
    codes: u8, row after row of bytes, and `scale.scale` and so on beside them.
    """

    format: Format
    n: int
    k: int
    layout: Layout
    buffers: tuple[torch.Tensor, ...]

    @classmethod
    def from_float(cls, w: torch.Tensor, format: str | Format, clip: bool = False) -> Weight:
        """Round `w` float[N, K] to the nearest values of a format. Raises `FormatError` on NaN and infinity.

        With `clip` every group is first cut to the share of its largest weight that leaves the least squared error.
        """
        form = named(format)
        if w.dim() != 2 or not w.is_floating_point() or 0 in w.shape:
            raise ShapeError(f"a weight is a float tensor [N, K], not {w.dtype}{list(w.shape)}")
        return cls.from_parts(quantize.round_to_nearest(quantize.clipped(w, form) if clip else w, form), form)

    @classmethod
    def from_codes(
        cls,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        format: str | Format,
        layout: Layout | None = None,
        more: Mapping[str, torch.Tensor] | None = None,
    ) -> Weight:
        """Pack `codes` int[N, K] in 0…2**bits-1 with `scales` and, where the format has them, `zeros` [N, ceil(K / group)].

        An integer zero is one of the format's values, 0…2**bits-1 for unsigned codes, and may come in an integer tensor. Scales
        (or zeros) of a small float or of a Format come as its codes, u8, or in torch's type of that float; `more` holds what
        those are made of, and a codebook where it is per tensor: `{"scale.scale": …}`, named and shaped as `Format.parts` has
        them. Raises `FormatError` or `ShapeError` that names the first thing that does not fit.
        """
        given = {"codes": codes, "scale": scales, **({} if zeros is None else {"zero": zeros}), **(more or {})}
        return cls.from_parts(given, format, layout)

    @classmethod
    def from_parts(cls, parts: Mapping[str, torch.Tensor], format: str | Format, layout: Layout | None = None) -> Weight:
        """`from_codes`, of tensors by name."""
        form, parts = named(format), dict(parts)
        for name, table in form.tables().items():
            parts.setdefault(name, torch.tensor(table, dtype=torch.float32, device=parts["codes"].device))
        parts = check_parts(parts, form)
        codes = parts.pop("codes")
        n, k = codes.shape
        layout = layout or layouts.dense(n, k, form.bits)
        return cls._packed(repack.packed(codes, layout), parts, form, layout, n, k)

    @classmethod
    def _packed(
        cls, codes: torch.Tensor, rest: Mapping[str, torch.Tensor], form: Format, layout: Layout, n: int, k: int
    ) -> Weight:
        """A weight of codes as the layout has them, and of other parts that are known to be right."""
        program = _program(form, layout, n, k)
        names = [each if each in program.kept else f"{each}.stored" for each in form.parts(n, k)][1:]
        stored = offline(program, dict(rest), torch, names)
        return cls(form, n, k, layout, (codes.reshape(-1), *(stored[name].contiguous() for name in names)))

    @classmethod
    def paired(cls, gate: Weight, up: Weight) -> Weight:
        """The rows of two weights in turn, [2 N, K]: gate, up, gate, …, as the activation `silu_mul` takes them.

        Raises `ShapeError` where they are not of one format and size, or have parts that are not one for each row.
        """
        if (gate.format, gate.n, gate.k) != (up.format, up.n, up.k):
            raise ShapeError(f"{gate} and {up} make no pairs of rows: give two weights of one format and size")
        return cls._of_rows((gate, up), lambda parts: torch.stack(parts, 1).flatten(0, 1))

    def unpaired(self) -> tuple[Weight, Weight]:
        """The weights that `paired` was given, of every second row each."""
        parts, tables = self.parts(), self.format.tables()
        gate, up = (
            Weight.from_parts({name: each if name in tables else each[first::2] for name, each in parts.items()}, self.format)
            for first in range(2)
        )
        return gate, up

    @classmethod
    def stacked(cls, weights: Sequence[Weight]) -> Weight:
        """The rows of several weights, one weight after the other, [sum of N, K].

        Raises `ShapeError` where they are not of one format and K, or have parts that are not one for each row.
        """
        if len({(each.format, each.k) for each in weights}) != 1:
            raise ShapeError(f"{', '.join(map(repr, weights))} make no one weight: give some of one format and K")
        return cls._of_rows(weights, torch.cat)

    def reordered(self, order: torch.Tensor) -> Weight:
        """The same rows in another order. Raises `ShapeError` as `stacked` does."""
        return Weight._of_rows((self,), lambda parts: parts[0][order])

    @classmethod
    def _of_rows(cls, weights: Sequence[Weight], together: Callable[[list[torch.Tensor]], torch.Tensor]) -> Weight:
        """The weight whose rows are those of `weights`, put `together` part by part."""
        form, parts = weights[0].format, [each.parts() for each in weights]
        rows = [name for name in parts[0] if name not in form.tables()]
        whole = [name for name in rows if form.flat or any(of[name].shape[0] != w.n for of, w in zip(parts, weights))]
        if whole:
            raise ShapeError(f"{form.label}: {', '.join(whole)} belong to a whole weight: take a format with scales for each row")
        return cls.from_parts({name: together([of[name] for of in parts]) for name in rows}, form)

    @property
    def names(self) -> tuple[str, ...]:
        """What the buffers are called."""
        return tuple(self.format.parts(self.n, self.k))

    def part(self, name: str) -> torch.Tensor | None:
        """The buffer called `name`, None where the format has none."""
        return dict(zip(self.names, self.buffers)).get(name)

    @property
    def codes(self) -> torch.Tensor:
        return self.buffers[0]

    @property
    def scale(self) -> torch.Tensor:
        return self.buffers[1]

    @property
    def zero(self) -> torch.Tensor | None:
        return self.part("zero")

    @property
    def codebook(self) -> torch.Tensor | None:
        return self.part("codebook")

    def parts(self) -> dict[str, torch.Tensor]:
        """What was packed, by name, as `Format.parts` has it: codes u8[N, K], scales [N, groups], …"""
        return unpacked(self.buffers, self.format, self.layout, self.n, self.k)

    def unpack(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The codes u8[N, K], scales [N, groups] and zeros [N, groups] (None where there are none) that were packed."""
        parts = self.parts()
        return parts["codes"], parts["scale"], parts.get("zero")

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight [N, K]: the exact product of scale and value, rounded once to `dtype` (exact in float64)."""
        return dequantize(self.buffers, self.format, self.layout, self.n, self.k, dtype)

    def packed_as(self, layout: Layout) -> Weight:
        """The same weight in another layout."""
        if layout == self.layout:
            return self
        codes = repack.repacked(self.codes, self.layout, layout, self.n, self.k)
        rest = _rest(self.buffers[1:], self.format, self.layout, self.n, self.k)
        return Weight._packed(codes, rest, self.format, layout, self.n, self.k)

    def to(self, device: torch.device | str) -> Weight:
        return self._with(lambda held: held.to(device))

    def clone(self) -> Weight:
        """The same weight in buffers of its own."""
        return self._with(torch.clone)

    def _with(self, make: Callable[[torch.Tensor], torch.Tensor]) -> Weight:
        """The same weight, each buffer being what `make` makes of it."""
        return replace(self, buffers=tuple(map(make, self.buffers)))

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(each.nbytes for each in self.buffers)

    def __repr__(self) -> str:
        return f"Weight({self.format.label}, [{self.n}, {self.k}], {self.nbytes} bytes on {self.codes.device})"


@lru_cache(maxsize=256)
def _program(form: Format, layout: Layout, n: int, k: int) -> Program:
    """What packs a weight, as a graph."""
    return pack(lower(Problem(m=(1, 1), n=n, k=k, format=form, layout=layout)), layout)


@lru_cache(maxsize=256)
def _stored(form: Format, layout: Layout, n: int, k: int) -> dict[str, Layout | None]:
    """The layout of each buffer."""
    program = _program(form, layout, n, k)
    return {name.removesuffix(".stored"): program.tile(name).layout for name in program.kept}


@lru_cache(maxsize=256)
def stored_shapes(form: Format, layout: Layout, n: int, k: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The type and shape of each buffer, by name."""
    kinds = form.parts(n, k).items()
    rest = {name: torch.empty(shape, dtype=dtypes.stored_as(kind), device="meta") for name, (kind, shape) in kinds}
    codes = torch.empty(layout.length, dtype=torch.int32, device="meta")
    held = Weight._packed(codes, {name: each for name, each in rest.items() if name != "codes"}, form, layout, n, k)
    return {name: (each.dtype, tuple(each.shape)) for name, each in zip(held.names, held.buffers, strict=True)}


def unpacked(buffers: Iterable[torch.Tensor], form: Format, layout: Layout, n: int, k: int) -> dict[str, torch.Tensor]:
    """What `buffers` hold, by name."""
    shapes = {name: shape for name, (_, shape) in form.parts(n, k).items()}
    return _opened(dict(zip(shapes, buffers, strict=True)), _stored(form, layout, n, k), shapes)


def _opened(
    stored: Mapping[str, torch.Tensor], orders: Mapping[str, Layout | None], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, torch.Tensor]:
    """What each buffer holds, without padding."""
    found = {}
    for name, buffer in stored.items():
        order = orders[name]
        whole = buffer if order is None else layouts.unpack(order, buffer.reshape(-1), torch)
        found[name] = whole[tuple(slice(0, size) for size in shapes[name])]
    return found


def dequantize(buffers: Iterable[torch.Tensor], form: Format, layout: Layout, n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """The weight [N, K] from its buffers, in f32 (products of 16-bit scales and small codes are exact there), or in f64."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return quantize.values(unpacked(buffers, form, layout, n, k), form, wide).to(dtype)


SLAB, LEAST = 256, 2**16
"""A slab is one of so many of a weight, or so many weights where those are more."""


def slabs(buffers: Sequence[torch.Tensor], form: Format, layout: Layout, n: int, k: int) -> Iterator[torch.Tensor]:
    """The weight from its buffers in f32, some rows [rows, K] at a time, in order: little of it is in memory at once."""
    codes, *rest = buffers
    rows = repack.whole(max(n // SLAB, LEAST // k), layout)
    parts = _rest(rest, form, layout, n, k)
    return quantize.values_of_rows(repack.unpacked(codes, layout, n, k, rows), parts, form, torch.float32)


def _rest(rest: Iterable[torch.Tensor], form: Format, layout: Layout, n: int, k: int) -> dict[str, torch.Tensor]:
    """What the buffers after that of the codes hold, by name."""
    shapes = {name: shape for name, (_, shape) in form.parts(n, k).items()}
    return _opened(dict(zip(list(shapes)[1:], rest, strict=True)), _stored(form, layout, n, k), shapes)
