"""Codes from one layout to another: on a GPU by a kernel that reads and writes words, where the layouts let it.

Elsewhere some rows at a time: what is unpacked stays small, and near the processor.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from w4gen import knobs, toolchain
from w4gen.codegen import repack as permute
from w4gen.codegen.render import Kernel
from w4gen.errors import W4Error
from w4gen.ir import layout as layouts
from w4gen.ir.layout import Digit, Layout
from w4gen.runtime import launch

log = logging.getLogger("w4gen")

NEAR, FAR = 2**22, 2**28
"""Codes of a slab: on a CPU a few megabytes are near; on a GPU a launch costs more than memory."""
FEW = 2**26
"""Codes for which a kernel is compiled: PyTorch moves fewer in about a millisecond. One that is compiled takes any number."""
STORED = {8: torch.uint8, 32: torch.int32}
STARTS: dict[tuple[str, torch.device], Callable[..., None] | None] = {}
"""Kernels that are loaded, by text and device; None where one would not load."""


def repacked(codes: torch.Tensor, source: Layout, target: Layout, n: int, k: int) -> torch.Tensor:
    """What `target` stores of the codes [n, k] that are stored as `source`."""
    made = by_kernel(codes, source, target, n, k) if codes.is_cuda else None
    return in_slabs(codes, source, target, n, k) if made is None else made


def in_slabs(codes: torch.Tensor, source: Layout, target: Layout, n: int, k: int) -> torch.Tensor:
    """The same without a kernel, some rows after the others."""
    rows = whole(_rows(k, codes.device), source, target)
    planes = _planes(codes, source)

    def made(first: int) -> list[torch.Tensor]:
        return _stored(_unpacked(planes, source, n, k, first, rows), target)

    return _joined(made, range(0, n, rows), target, codes.device)


def packed(codes: torch.Tensor, layout: Layout) -> torch.Tensor:
    """What a layout stores of codes u8[n, k]."""
    n, k = codes.shape
    made = by_kernel(codes, layouts.matrix({"n": n, "k": k}, 8), layout, n, k) if codes.is_cuda else None
    if made is not None:
        return made
    rows = whole(_rows(k, codes.device), layout)
    return _joined(lambda first: _stored(codes[first : first + rows], layout), range(0, n, rows), layout, codes.device)


def by_kernel(codes: torch.Tensor, source: Layout, target: Layout, n: int, k: int) -> torch.Tensor | None:
    """What `target` stores, by one kernel; None where there is none for these layouts, or it is not worth a compile."""
    kernel = permute.kernel(source, target, n, k)
    start = kernel and _start(kernel, n * k, codes.device)
    if not start:
        return None
    made = torch.empty(target.length, dtype=STORED[target.unit], device=codes.device)
    grid = (-(-target.length // permute.BLOCK), 1, 1)
    with torch.cuda.device_of(codes):
        start(grid, (launch.aligned(codes.reshape(-1)), made, *permute.sizes(source, target, n, k)))
    return made


def _start(kernel: Kernel, count: int, device: torch.device) -> Callable[..., None] | None:
    """The kernel loaded on a device, to be launched for so many codes; the same for layers of other sizes."""
    key = kernel.source, device
    if key not in STARTS and not launch.capturing(device):
        try:
            new = not toolchain.built(kernel, launch.arch_of(device))
            if new and (count < FEW or knobs.JIT.chosen()):
                return None
            STARTS[key] = launch.loaded(kernel, kernel.pieces[0], device)
        except W4Error as error:
            log.warning("codes are repacked by PyTorch, a few times slower: %s", error)
            STARTS[key] = None
    return STARTS.get(key)


def unpacked(codes: torch.Tensor, layout: Layout, n: int, k: int, rows: int) -> Iterator[torch.Tensor]:
    """The codes u8[rows, k] of slabs, in order."""
    planes = _planes(codes, layout)
    return (_unpacked(planes, layout, n, k, first, rows) for first in range(0, n, rows))


def _planes(codes: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """The planes of stored codes, block by block of rows."""
    blocks = _blocks(layout)
    return [plane.reshape(blocks, -1) for plane in codes.reshape(-1).split([plane.length for plane in layout.planes])]


def _unpacked(planes: list[torch.Tensor], layout: Layout, n: int, k: int, first: int, rows: int) -> torch.Tensor:
    """The codes u8[rows, k] from row `first` on, where a block begins: a stretch of memory in each plane."""
    tall = _tall(layout)
    blocks = slice(first // tall, (first + rows) // tall)
    stretch = torch.cat([plane[blocks].reshape(-1) for plane in planes]) if len(planes) > 1 else planes[0][blocks].reshape(-1)
    order = first_rows(layout, len(planes[0][blocks]) * tall)
    found = torch.as_tensor(layouts.unpack(order, *_array(stretch)))
    return found[: n - first, :k]


def _stored(codes: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """What each plane of a layout stores of the codes u8[rows, k] of whole blocks, or of the last rows."""
    order = first_rows(layout, len(codes))
    short = order.size("k") - codes.shape[1], order.size("n") - len(codes)
    full = torch.nn.functional.pad(codes, (0, short[0], 0, short[1])) if any(short) else codes
    found = torch.as_tensor(layouts.pack(order, *_array(full)))
    return list(found.split([plane.length for plane in order.planes]))


def _array(tensor: torch.Tensor) -> tuple[Any, Any]:
    """A tensor as its device packs it fastest, and the module to do it with: a CPU's threads take a slab each, by NumPy."""
    return (tensor.numpy(), np) if tensor.device.type == "cpu" else (tensor, torch)


def _joined(made: Callable[[int], list[torch.Tensor]], firsts: range, layout: Layout, device: torch.device) -> torch.Tensor:
    """What slabs store, one after the other in each plane."""
    found: list[torch.Tensor] = []
    at = [0] * len(layout.planes)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        # on a GPU, the current stream is that of this thread
        for pieces in pool.map(made, firsts) if device.type == "cpu" else map(made, firsts):
            found = found or [piece.new_zeros(plane.length) for piece, plane in zip(pieces, layout.planes, strict=True)]
            for index, piece in enumerate(pieces):
                found[index][at[index] : at[index] + len(piece)] = piece
                at[index] += len(piece)
    return found[0] if len(found) == 1 else torch.cat(found)


def whole(rows: int, *orders: Layout) -> int:
    """About so many rows, in whole blocks of each layout."""
    least = math.lcm(*map(_tall, orders))
    return max(1, rows // least) * least


def _rows(k: int, device: torch.device) -> int:
    """Rows of a slab."""
    return (NEAR if device.type == "cpu" else FAR) // k


def first_rows(layout: Layout, rows: int) -> Layout:
    """A layout of the first `rows` rows at least, in whole blocks: the highest digit of n cut, in each plane."""
    if _blocks(layout) == 1:
        return layout
    top, size = _highest(layout), -(-rows // _tall(layout))
    digits = tuple(replace(digit, size=size) if digit == top else digit for digit in layout.digits)
    return replace(layout, digits=digits, high=layout.high and first_rows(layout.high, rows))


def _tall(layout: Layout) -> int:
    """Rows of a block."""
    return layout.size("n") // _blocks(layout)


def _blocks(layout: Layout) -> int:
    """Blocks of rows that follow one another in every plane: what n's highest digit counts, if it strides furthest; else one."""
    counts = set()
    for plane in layout.planes:
        top = _highest(plane)
        furthest = max((digit.stride for digit in plane.digits if digit.size > 1), default=0)
        counts.add(top.size if top is not None and top.stride == furthest >= plane.unit else 1)
    return counts.pop() if len(counts) == 1 else 1


def _highest(layout: Layout) -> Digit | None:
    """The highest digit of n that counts."""
    return next((digit for digit in reversed(layout.digits) if digit.axis == "n" and digit.size > 1), None)
