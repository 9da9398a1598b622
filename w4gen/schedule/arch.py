"""Hardware as data: what a compile needs to know of a GPU, with no GPU present.

Rates are those of one named board, as its vendor states them: NVIDIA's data sheets of T4, A100 (80 GB SXM), H200 (SXM) and HGX
B200, its white papers on GA102 (RTX 3090), Ada (RTX 4090) and RTX Blackwell (RTX 5090), AMD's pages on MI300X and RX 7900 XTX.
Matrix rates are dense, with f32 sums: half of what is printed for sparse operands, and of a GeForce's rate with f16 sums. Shared
memory and threads: CUDA programming guide, table of compute capabilities; AMD's CDNA 3 and RDNA 3 ISA guides. Rates only rank
schedules and bound times; a floor worked out from them is a bound that no kernel beats on that board, not a measurement.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, replace

from w4gen.errors import ArchError


@dataclass(frozen=True, slots=True)
class Fragment:
    """The left operand of a matrix instruction: which lane and register holds which row (n) and column (k).

    `digits` are (axis, size, place), the digits of one axis from the least significant on; place is `pair` (the two elements
    that share a 32-bit register), `lane` or `register`.
    """

    name: str
    digits: tuple[tuple[str, int, str], ...]

    def size(self, axis: str) -> int:
        """Elements along an axis."""
        return math.prod(size for each, size, _ in self.digits if each == axis)

    def at(self, place: str) -> list[int]:
        """Positions of the digits at one place."""
        return [index for index, digit in enumerate(self.digits) if digit[2] == place]


M16K16 = Fragment("m16k16", (("k", 2, "pair"), ("k", 4, "lane"), ("k", 2, "register"), ("n", 8, "lane"), ("n", 2, "register")))
"""The 16 x 16 left operand of mma.m16n8k16 and of wgmma (PTX ISA, matrix fragments): lane 4g+t holds rows g and g+8."""


@dataclass(frozen=True, slots=True)
class Arch:
    """A GPU architecture. Capacities are per program (shared), per thread (registers) and per GPU (the rest).

    matrix_tflops: dense f16 products with f32 sums · lane_tflops: f32 multiply-adds, two operations each · 0: not known.
    device, device_sms: the GPU present, where one is. Tuned schedules go by them; rules go by `sms`, that of the board, so that
    kernels made on another machine are the same.
    """

    name: str
    backend: str
    target: int | str
    board: str
    sms: int
    bandwidth_gbs: float
    shared_bytes: int
    warp: int = 32
    max_threads: int = 1024
    registers: int = 255
    fragment: Fragment | None = M16K16
    features: frozenset[str] = frozenset({"async_copy", "gluon"})
    matrix_tflops: float = 0.0
    lane_tflops: float = 0.0
    device: str = ""
    device_sms: int = 0

    def __post_init__(self) -> None:
        if self.backend not in ("cuda", "hip"):
            raise ArchError(f"{self.name}: backend {self.backend!r} is not one that Triton compiles for: use cuda or hip")
        for field in ("sms", "bandwidth_gbs", "shared_bytes", "warp", "max_threads", "registers"):
            if getattr(self, field) <= 0:
                raise ArchError(f"{self.name}: {field}={getattr(self, field)} is not positive")
        if self.max_threads % self.warp:
            raise ArchError(f"{self.name}: {self.max_threads} threads are not whole warps of {self.warp}")

    def __str__(self) -> str:
        return f"{self.name} ({self.board}: {self.sms} SMs, {self.bandwidth_gbs:g} GB/s)"


ADA = frozenset({"async_copy", "gluon", "e4m3"})
HOPPER = ADA | {"wgmma", "dependent_launch", "cluster"}
BLACKWELL = ADA | {"dependent_launch", "cluster"}
SM_80 = Arch("sm_80", "cuda", 80, "A100 SXM 80 GB", 108, 2039, 163 * 1024, matrix_tflops=312, lane_tflops=19.5)
GFX942 = Arch(
    "gfx942", "hip", "gfx942", "MI300X", 304, 5300, 64 * 1024, warp=64, registers=512, fragment=None, features=frozenset(),
    matrix_tflops=1307.4, lane_tflops=163.4,
)  # fmt: skip

ARCHES = {
    arch.name: arch
    for arch in (
        replace(SM_80, name="portable", fragment=None, features=frozenset({"async_copy"})),
        SM_80,
        Arch(
            "sm_75", "cuda", 75, "T4", 40, 320, 64 * 1024, fragment=None, features=frozenset(), matrix_tflops=65, lane_tflops=8.1
        ),
        Arch("sm_86", "cuda", 86, "RTX 3090", 82, 936, 99 * 1024, matrix_tflops=71, lane_tflops=35.6),
        Arch("sm_89", "cuda", 89, "RTX 4090", 128, 1008, 99 * 1024, features=ADA, matrix_tflops=165.2, lane_tflops=82.6),
        Arch("sm_90", "cuda", 90, "H200 SXM", 132, 4800, 227 * 1024, features=HOPPER, matrix_tflops=989.5, lane_tflops=67),
        Arch("sm_100", "cuda", 100, "B200", 148, 8000, 227 * 1024, features=BLACKWELL, matrix_tflops=2250, lane_tflops=75),
        Arch("sm_120", "cuda", 120, "RTX 5090", 170, 1792, 99 * 1024, features=BLACKWELL, matrix_tflops=209.5, lane_tflops=104.8),
        GFX942,
        replace(
            GFX942,
            name="gfx1100",
            target="gfx1100",
            board="RX 7900 XTX",
            sms=96,
            bandwidth_gbs=960,
            warp=32,
            registers=255,
            matrix_tflops=122.8,
            lane_tflops=61.4,
        ),
    )
}


RELATIVES = {"sm_87": "sm_86", "sm_103": "sm_100", "sm_121": "sm_120"}
"""Archs by whose data another one is compiled, for a target of its own: binaries of Blackwell run on their very target only."""

GRID = 65535
"""Programs that a grid has at most along its second and third axis, on every GPU."""


def arch(name: str) -> Arch:
    """The arch called `name`. Raises `ArchError` with the nearest, by its name or that of its board."""
    if name in ARCHES:
        return ARCHES[name]
    if name in RELATIVES:
        relative = ARCHES[RELATIVES[name]]
        return replace(relative, name=name, target=int(name[3:]), board=f"taken for like {relative.board}")
    words = {
        word.lower(): each for each in ARCHES.values() for word in (*each.board.split(), each.name) if each.name != "portable"
    }
    found = difflib.get_close_matches(name.lower(), words, n=1, cutoff=0)
    nearest = words[found[0]] if found else ARCHES["portable"]
    raise ArchError(f"unknown arch {name!r}: the nearest is {nearest.name} ({nearest.board}); known are {', '.join(ARCHES)}")


def for_capability(major: int, minor: int) -> Arch:
    """The arch of a CUDA device, or the closest older one of its family; `portable` where there is none."""
    exact = f"sm_{major}{minor}"
    older = [a for a in ARCHES.values() if a.backend == "cuda" and isinstance(a.target, int) and a.target // 10 == major]
    fits = [a for a in older if a.name != "portable" and int(str(a.target)) <= 10 * major + minor]
    if exact in ARCHES or exact in RELATIVES:
        return arch(exact)
    return max(fits, key=lambda a: int(str(a.target))) if fits else ARCHES["portable"]
