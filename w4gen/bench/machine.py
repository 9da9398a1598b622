"""What a GPU gives: its ceilings, each by a loop that does one thing and nothing else.

read, copy: memory · L2: reading what is in the cache · matrix: the vendor's matmul · decode: words of codes that are in L1 turned
into 16-bit values, the third ceiling of a kernel that decodes · launch: one empty kernel after another.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from w4gen.bench import host
from w4gen.bench.facts import facts, here
from w4gen.bench.floors import SETTINGS, floor, let_next_start, read, wait_for_last
from w4gen.codegen import ptx
from w4gen.errors import FormatError
from w4gen.formats import named
from w4gen.ir import decode as d
from w4gen.ir.types import BF16, F16, DType, Format
from w4gen.runtime.dtypes import torch_dtype
from w4gen.runtime.launch import arch_of
from w4gen.runtime.timer import Timing, time_calls

GIGA, MEGA = 1e9, 1 << 20
READ_BYTES, COPY_BYTES = 1 << 30, 1 << 29
CACHED_MB = (4, 8, 16, 32)
SIZES = (1024, 2048, 4096, 8192)
FORMATS = ("int2_g128", "int4_g128", "int8_g128", "nf4_g64", "e2m1_g32", "mxfp4", "fp8_e4m3")
BLOCK, WARPS, PROGRAMS, BLOCKS, TURNS = 2048, 8, 4, 2, 512
"""Words and warps of a program, programs of an SM, blocks of words that all read in turn (16 KB: they stay in L1), turns."""
CHAIN = 1024
"""Kernels of a chain."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One ceiling: its value, the half range of the replays as a share, how it was measured, and the format that it is of."""

    name: str
    value: float
    unit: str
    spread: float
    method: str
    of: str = ""


@triton.jit
def nothing(out_ptr, OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Start, and end."""
    let_next_start(OVERLAP)
    wait_for_last(OVERLAP)


@triton.jit
def decode_only(  # type: ignore[no-untyped-def]
    words_ptr, out_ptr, turns, SETUP: tl.constexpr, DECODE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    """Decode the same words again and again; what they come to is written only where it has one value in 2**32."""
    if SETUP != "":
        tl.inline_asm_elementwise(SETUP, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    total = tl.zeros([BLOCK], tl.int32)
    for turn in range(turns):
        words = tl.load(words_ptr + turn % BLOCKS * BLOCK + tl.arange(0, BLOCK))
        total ^= tl.inline_asm_elementwise(DECODE, "=&r,r", [words], dtype=tl.int32, is_pure=False, pack=1)
    folded = tl.xor_sum(total, axis=0)
    if folded == 0x5EED1234:
        tl.store(out_ptr, folded)


def decoding(form: Format, kind: DType) -> tuple[str, str]:
    """PTX that makes ready, and that decodes a word ($1) as fast kernels do and folds the pairs into $0. Raises `FormatError`."""
    if form.bits not in (1, 2, 4, 8) or (form.codebook is not None and form.bits > 4):
        raise FormatError(f"{form.label}: only codes that fill a word, and tables of up to 4 bits, are decoded in pairs")
    pairs = 16 // form.bits
    if form.codebook is not None:
        table = f".shared .align 16 .b8 pairs[{4**form.bits * 128}];\nmov.u32 $0, pairs;"
        return table, folded(ptx.look_up_pairs(form.bits), pairs)
    return "", folded(ptx.decode_pairs(d.decode_pairs(form, kind, pairs)), pairs)


def folded(text: str, outputs: int) -> str:
    """PTX whose outputs $0 … are folded into one word, $0, by xor; its operand after them is $1."""
    own = re.sub(r"\$(\d+)", lambda found: f"v{found[1]}" if int(found[1]) < outputs else "$1", text)
    fold = ["mov.b32 $0, v0;", *(f"xor.b32 $0, $0, v{each};" for each in range(1, outputs))]
    inner = own.strip().removeprefix("{").removesuffix("}").strip()
    return "\n".join(["{", f".reg .b32 {', '.join(f'v{each}' for each in range(outputs))};", inner, *fold, "}"])


def figures(device: torch.device) -> Iterator[Figure]:
    """Every ceiling of a GPU."""
    yield from memory(device)
    yield from matrix(device)
    yield from decodes(device)
    yield from launches(device)


def memory(device: torch.device) -> Iterator[Figure]:
    """Bandwidths, in 1e9 bytes a second."""
    timing, fastest = floor(READ_BYTES, device, False), f"the fastest of {len(SETTINGS)} kernels that only read"
    yield Figure("read", rate(READ_BYTES, timing), "GB/s", timing.spread, f"{fastest} 1 GiB, cold, in a graph")
    a, b = (torch.empty(COPY_BYTES // 4, dtype=torch.int32, device=device).fill_(1) for _ in range(2))
    timing = time_calls([lambda: torch.bitwise_not(a, out=b)])
    how = "bitwise_not of 512 MiB into 512 MiB, both counted, in a graph"
    yield Figure("copy", rate(2 * COPY_BYTES, timing), "GB/s", timing.spread, how)
    for size in CACHED_MB:
        timing = read(size * MEGA, device, False, 1, "evict_last")
        how = f"{fastest} the same {size} MiB again, warm, in a graph"
        yield Figure(f"L2 read, {size} MB", rate(size * MEGA, timing), "GB/s", timing.spread, how)


def matrix(device: torch.device) -> Iterator[Figure]:
    """Multiply-adds of the vendor's matmul, two operations each."""
    for kind in (F16, BF16):
        for size in SIZES:
            a, b = (torch.randn(size, size, device=device).to(torch_dtype(kind)) for _ in range(2))
            timing = time_calls([lambda a=a, b=b: torch.mm(a, b)])  # type: ignore[misc]
            speed, how = 2 * size**3 / timing.us / 1e6, "torch.mm of square matrices of normal data, in a graph"
            yield Figure(f"matrix {kind.name}, {size}", speed, "TFLOP/s", timing.spread, how)


def decodes(device: torch.device) -> Iterator[Figure]:
    """Weights decoded a second, in 1e9, of formats whose values `kind` holds."""
    programs = PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count
    words = torch.randint(-(2**31), 2**31 - 1, (BLOCKS * BLOCK,), dtype=torch.int32, device=device)
    out = torch.empty(1, dtype=torch.int32, device=device)
    method = "words in L1 decoded to pairs of 16-bit values as fast kernels do, folded by an xor a pair, no memory traffic"
    for kind in (F16, BF16):
        for form in map(named, FORMATS):
            if form.affine and form.bits > kind.mantissa:  # the trick that decodes integers needs as many bits
                continue
            texts = decoding(form, kind)
            start = partial(decode_only[programs,], words, out, TURNS, *texts, BLOCK, BLOCKS, num_warps=WARPS)  # type: ignore[index]
            timing = time_calls([start])
            speed = programs * BLOCK * TURNS * (32 // form.bits) / timing.us / 1e3
            yield Figure(f"decode {form.label} to {kind.name}", speed, "Gweight/s", timing.spread, method, form.label)


def launches(device: torch.device) -> Iterator[Figure]:
    """What an empty kernel costs."""
    out = torch.empty(1, dtype=torch.int32, device=device)
    early = "dependent_launch" in arch_of(device).features

    def call(overlap: bool) -> Callable[[], object]:
        return lambda: nothing[1,](out, overlap, num_warps=1, launch_pdl=overlap)  # type: ignore[index]

    for overlap in (False, True)[: 1 + early]:
        timing = time_calls([call(overlap)] * CHAIN)
        name, how = ("dependent launch", "each started early, ") if overlap else ("launch", "")
        yield Figure(name, timing.us, "us", timing.spread, f"an empty Triton kernel, {how}in a graph of {CHAIN}")
    (spent,) = host.turns({"launch": call(False)}, 5, torch.cuda.synchronize).values()
    yield Figure(
        "host launch", spent, "us", 0.0, f"the host's time of an eager launch of it by Triton, median of turns of {host.TURN}"
    )


def rate(nbytes: int, timing: Timing) -> float:
    """Bytes in a time, as GB/s."""
    return nbytes / timing.us / 1e3


def roofline(progress: Callable[[Figure], Any] = lambda figure: None) -> dict[str, Any]:
    """All ceilings of the GPU here, with what it is, as JSON has them; `progress` is told each. Takes about a minute."""
    device = here()
    about, start = torch.cuda.get_device_properties(device), time.perf_counter()
    found = []
    for each in figures(device):
        progress(each)
        found.append(each)
        torch.cuda.empty_cache()
    sizes = {"sms": about.multi_processor_count, "l2_mb": about.L2_cache_size / MEGA, "memory_gb": about.total_memory / GIGA}
    made = facts("w4gen.cli") | {"title": f"Ceilings of one {about.name}", "took_s": round(time.perf_counter() - start, 1)}
    return made | sizes | {"figures": [asdict(each) for each in found]}
