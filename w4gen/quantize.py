"""Weights to codes, scales and zeros by rounding to nearest, and back: one recursion over the tree of a format's scales."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping

import torch

from w4gen.errors import FormatError
from w4gen.ir.types import DType, Format, decoded
from w4gen.runtime import dtypes

log = logging.getLogger("w4gen")

Parts = dict[str, torch.Tensor]
"""The tensors that a format's values are made of, by the names of `Format.parts`."""


def values(parts: Mapping[str, torch.Tensor], form: Format, wide: torch.dtype, at: str = "") -> torch.Tensor:
    """The values [rows, columns] that the parts whose names start with `at` stand for, worked out in the type `wide`."""
    codes = parts[at or "codes"]
    book, each = _made_of(parts, form, wide, at)
    return _scaled(book[codes.long()], form, {role: _spread(grid, form, *codes.shape) for role, grid in each.items()})


def values_of_rows(
    codes: Iterable[torch.Tensor], parts: Mapping[str, torch.Tensor], form: Format, wide: torch.dtype
) -> Iterator[torch.Tensor]:
    """`values`, some rows [rows, K] at a time: those of `codes`, which follow one another; `parts` has what goes with them."""
    book, each = _made_of(parts, form, wide, "")
    first = 0
    for slab in codes:
        rows, k = slab.shape
        grids = {role: _of_rows(grid, form, first, rows, k) for role, grid in each.items()}
        yield _scaled(book[slab.int()], form, grids)
        first += rows


def _made_of(
    parts: Mapping[str, torch.Tensor], form: Format, wide: torch.dtype, at: str
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The value of each code, and the scales and zeros as `Format.grid` has them."""
    inside = f"{at}." if at else ""
    device = next(iter(parts.values())).device
    own = isinstance(form.codebook, str)
    book = parts[f"{inside}codebook"].to(wide) if own else torch.tensor(form.values, dtype=wide, device=device)
    kinds = {role: decoded(kind) for role, kind in (("scale", form.scale), ("zero", form.zero)) if kind is not None}
    return book, {
        role: values(parts, kind, wide, f"{inside}{role}") if isinstance(kind, Format) else parts[f"{inside}{role}"].to(wide)
        for role, kind in kinds.items()
    }


def _scaled(value: torch.Tensor, form: Format, spread: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Values under the scale and the zero of each."""
    if "zero" in spread and not form.zero_after_scale:
        value = value - spread["zero"]
    if "scale" in spread:
        value = value * spread["scale"]
    return value - spread["zero"] if "zero" in spread and form.zero_after_scale else value


def _of_rows(each: torch.Tensor, form: Format, first: int, rows: int, k: int) -> torch.Tensor:
    """The scales of some rows of a weight, one for every value."""
    if not form.flat:
        return _spread(each[first : first + rows], form, rows, k)
    if form.group == -1:
        return each.reshape(1, 1).expand(rows, k)
    groups = k // form.group  # of a row: none goes on in the next one
    own = each.reshape(-1)[first * groups : (first + rows) * groups]
    return own.repeat_interleave(form.group).reshape(rows, k)


def _spread(each: torch.Tensor, form: Format, rows: int, columns: int) -> torch.Tensor:
    """Scales as `Format.grid` has them, one for every value."""
    if form.flat:
        return each.reshape(-1).repeat_interleave(form.group_in(rows * columns))[: rows * columns].reshape(rows, columns)
    return each.repeat_interleave(form.group_in(columns), 1)[:, :columns]


def round_to_nearest(w: torch.Tensor, form: Format) -> Parts:
    """The parts of `w` float[N, K] in a format: codes u8[N, K], scales [N, groups] and so on, as `Format.parts` names them.

    The scale of a group is the smallest that brings its extremes into the range of the format's values, which a zero can shift;
    of e8m0 the next power of two. Scales that are themselves codes are rounded the same way. Codes are the nearest values under
    scale and zero *as stored*. A group of zeros gives zeros. A codebook per tensor is learned. Raises `FormatError` where a
    weight is not finite or a scale or zero does not fit its type.
    """
    refuse_non_finite(w, "weight")
    return _rounded(w.detach(), form, "")


SLAB = 2**22
"""Weights of the rows that are worked on at a time: what is made of them in between stays small beside a large layer."""


def _rounded(w: torch.Tensor, form: Format, at: str) -> Parts:
    """The parts of values float[rows, columns], named from `at` on."""
    inside = f"{at}." if at else ""
    lines = w.reshape(1, -1) if form.flat else w
    parts: Parts = {}
    if isinstance(form.codebook, str):
        parts[f"{inside}codebook"] = book = _learned(_filled(lines, form), form)
    else:
        book = torch.tensor(form.values, dtype=torch.float32, device=w.device)
    extents = [torch.cat(each) for each in zip(*(_extent(_filled(slab, form)) for slab in _slabs(lines)), strict=True)]
    scale, zero = _scales(*extents, form, book, inside, parts)
    codes, first = torch.empty(lines.shape, dtype=torch.uint8, device=w.device), 0
    for slab in _slabs(lines):
        own = slice(first, first + len(slab))
        found = _nearest(_filled(slab, form), scale[own], None if zero is None else zero[own], form, book)
        codes[own] = found.reshape(len(slab), -1)[:, : lines.shape[1]]
        first += len(slab)
    return {at or "codes": codes.reshape(w.shape), **parts}


def _slabs(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Some rows of a matrix after the others."""
    return rows.split(max(1, SLAB // max(1, rows.shape[1])))


def _filled(lines: torch.Tensor, form: Format) -> torch.Tensor:
    """f32[lines, groups, group]. A partial last group repeats its first weight, which does not widen its range."""
    length, group, padded = lines.shape[1], form.group_in(lines.shape[1]), _per_group(lines.float(), form)
    inside = torch.arange(padded.shape[1] * group, device=lines.device).reshape(-1, group) < length
    return torch.where(inside, padded, padded[..., :1])


def _extent(filled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The least, the largest, and the average size of weights in each group [lines, groups]."""
    return filled.amin(-1), filled.amax(-1), filled.abs().mean(-1)


def _scales(
    low: torch.Tensor, high: torch.Tensor, size: torch.Tensor, form: Format, book: torch.Tensor, inside: str, parts: Parts
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales and zeros as stored [lines, groups] of groups with these extents; what they are made of goes into `parts`.

    A zero that is subtracted before scaling must leave a scale to multiply: there the range takes 0 in.
    """
    finite = book[torch.isfinite(book)]
    least, most = float(finite.min()), float(finite.max())
    if form.scale is None:
        scale = torch.ones_like(low)
    elif form.zero is None:
        sides = [low / least] * (least < 0) + [high / most] * (most > 0)
        # a format without negative values clips negative weights to its least
        need = torch.stack(sides).amax(0).clamp(min=0)
        if least >= 0 and bool((low < 0).any()):
            _tell_clipped(form.label)
        if len(finite) == 2 and least == -most:  # no value is small: the two stand for the average size, not the extremes
            need = size / most
        scale = _stored(need, form.scale, f"{inside}scale", form, parts)
    else:
        if not form.zero_after_scale:
            low, high = low.clamp(max=0), high.clamp(min=0)
        scale = _stored((high - low) / (most - least), form.scale, f"{inside}scale", form, parts)
    if form.zero is None:
        return scale, None
    need = least * scale - low if form.zero_after_scale else least - low / _not_zero(scale)
    if form.zero_mode == "integer":
        need = need.round().clamp(least, most)
    return scale, _stored(need, form.zero, f"{inside}zero", form, parts)


@functools.cache
def _tell_clipped(label: str) -> None:
    """Say once of a format that it has no negative values."""
    log.warning(
        "%s has no values below 0 and no zeros: negative weights become 0 there; int4, or _z with zeros, keeps them", label
    )


def _nearest(w: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, form: Format, book: torch.Tensor) -> torch.Tensor:
    """The codes [lines, groups, group] of the values that come nearest to w under scale and zero."""
    by, shift = _not_zero(scale)[..., None], 0 if zero is None else zero[..., None]
    wanted = (w + shift) / by if form.zero_after_scale else w / by + shift
    order = torch.argsort(book)
    order = order[torch.isfinite(book[order])]
    middles = (book[order][1:] + book[order][:-1]) / 2
    return order[torch.bucketize(wanted, middles)]


def _not_zero(scale: torch.Tensor) -> torch.Tensor:
    """`scale` as something to divide by: where it is 0, nothing is left to choose."""
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def _stored(need: torch.Tensor, kind: DType | Format, at: str, form: Format, parts: Parts) -> torch.Tensor:
    """`need` [lines, groups] as it comes back from what it is stored in, which goes into `parts`."""
    kind = decoded(kind)
    if isinstance(kind, Format):
        if kind.minifloat is not None and not kind.minifloat.signed:  # rounded up, so that nothing is clipped
            need = torch.exp2(torch.ceil(torch.log2(need.double()).clamp(min=-127))).float()
        if kind.scale is None:
            _refuse_beyond(need, max(value for value in kind.values if math.isfinite(value)), kind, at, form)
        parts |= _rounded(need, kind, at)
        return values(parts, kind, torch.float32, at)
    parts[at] = need.to(dtypes.torch_dtype(kind))
    _refuse_beyond(need, kind.max, kind, at, form)
    return parts[at].float()


def _refuse_beyond(need: torch.Tensor, largest: float, kind: DType | Format, at: str, form: Format) -> None:
    """Raise `FormatError` naming the first scale or zero that its type cannot hold."""
    beyond = torch.nonzero(~(need.abs() <= largest * (1 + 2.0**-12)))
    if len(beyond):
        row, column = beyond[0].tolist()
        raise FormatError(
            f"the {at} {need[row, column].item():.3g} of row {row}, group {column} does not fit {kind.name} "
            f"(max {largest:.3g}): use {form.name} with a scale of bf16 or f32, as in {form.label}_f32"
        )


SHARES = tuple(1 - step / 20 for step in range(11))
"""What `clipped` tries: the shares of its largest weight that a group keeps."""


def clipped(w: torch.Tensor, form: Format) -> torch.Tensor:
    """`w` float[N, K], every group cut to the share of its largest weight with which rounding to nearest comes nearest to w.

    Nearest in squared error, among `SHARES`: a smaller scale brings most weights nearer and the few largest farther. Scales that
    are codes under scales are rounded anew once every group has chosen, which may cost a little of what was gained.
    """
    lines = w.detach().float()
    lines = lines.reshape(1, -1) if form.flat else lines
    largest = _spread(_per_group(lines.abs(), form).amax(-1), form, *w.shape).reshape(lines.shape)
    best, least = lines, torch.full_like(_per_group(lines, form)[..., 0], math.inf)
    for share in SHARES:
        cut = lines.clamp(-share * largest, share * largest)
        found = values(_rounded(cut.reshape(w.shape), form, ""), form, torch.float32).reshape(lines.shape)
        error = _per_group((found - lines) ** 2, form).sum(-1)
        better = _spread(error < least, form, *w.shape).reshape(lines.shape)
        best, least = torch.where(better, cut, best), torch.minimum(error, least)
    return best.reshape(w.shape)


def _per_group(lines: torch.Tensor, form: Format) -> torch.Tensor:
    """[lines, groups, group], the last group of a line filled up with zeros."""
    group = form.group_in(lines.shape[1])
    padded = torch.nn.functional.pad(lines, (0, form.groups(lines.shape[1]) * group - lines.shape[1]))
    return padded.reshape(len(lines), -1, group)


SAMPLE, ROUNDS = 2**18, 40
"""Groups that a codebook is learned from at most, in how many rounds."""


def _learned(filled: torch.Tensor, form: Format) -> torch.Tensor:
    """A codebook f32[2**bits] for weights [lines, groups, group] over the largest of their group: k-means in one dimension.

    Each weight counts with the square of its scale, as its error does. The ends stay at the extremes, which are in every group.
    """
    size = filled.abs().amax(-1, keepdim=True)
    x = (filled / _not_zero(size)).reshape(-1, filled.shape[-1])
    every = max(1, x.shape[0] // SAMPLE)
    x, weight = x[::every].flatten(), (size.expand_as(filled).reshape(-1, filled.shape[-1])[::every] ** 2).flatten()
    low, high = (-1.0 if bool((x < 0).any()) else 0.0), 1.0
    count = 2**form.bits
    book = torch.quantile(x[:: max(1, x.numel() // 2**20)], torch.linspace(0, 1, count, device=x.device))
    book[0], book[-1] = low, high
    for _ in range(ROUNDS):
        code = torch.bucketize(x, (book[1:] + book[:-1]) / 2)
        total = torch.bincount(code, weight, count)
        mean = torch.bincount(code, weight * x, count) / _not_zero(total)
        book = torch.where(total > 0, mean, book).float()
        book[0], book[-1] = low, high
    return book


def refuse_non_finite(tensor: torch.Tensor, what: str) -> None:
    """Raise `FormatError` naming the first NaN or infinity of a [rows, columns] tensor."""
    first = 0
    for slab in _slabs(tensor):
        bad = torch.nonzero(~torch.isfinite(slab))
        if len(bad):
            row, column = bad[0].tolist()
            where, value = [first + row, column], slab[row, column].item()
            raise FormatError(f"{what}{where} is {value}: only finite values can be quantized, mend it first")
        first += len(slab)
