"""Printer for PTX: word operations on pairs of 16-bit values, as inline assembly."""

from __future__ import annotations

import numpy as np

from w4gen.errors import TemplateError
from w4gen.ir import decode as d
from w4gen.ir.types import DType


def both(value: float, dtype: DType) -> str:
    """A constant in both halves of a word. Raises `TemplateError` where `dtype` does not hold it exactly."""
    if dtype.name == "bf16":
        wide = int(np.float32(value).view(np.uint32))
        bits, exact = wide >> 16, wide & 0xFFFF == 0
    else:
        half = np.float16(value)
        bits, exact = int(half.view(np.uint16)), float(half) == value
    if not exact:
        raise TemplateError(f"{value!r} is not a number of type {dtype}: decoding in pairs needs exact constants")
    return f"0x{bits:04x}{bits:04x}"


def decode_pairs(how: d.Decode) -> str:
    """Turn the pairs of a word (the last operand), whose codes are half a word apart, into pairs of values $0, $1, …"""
    lines, source, shifted = ["{", ".reg .b32 t, a, b;"], f"${how.per_unit}", 0
    kind = f"{how.dtype}x2"
    for code in range(how.per_unit):
        low, out = how.low(code), f"${code}"
        for op in how.field + how.value:
            match op:
                case d.Shift(every, step):
                    if code // every * step != shifted:
                        shifted = code // every * step
                        lines.append(f"shr.u32 t, ${how.per_unit}, {shifted};")
                        source = "t"
                case d.And(mask):
                    masked = int(mask.value(low))
                case d.Or(bits):
                    lines.append(f"lop3.b32 {out}, {source}, 0x{masked << 16 | masked:08x}, 0x{bits << 16 | bits:08x}, 0xea;")
                case d.Fma(times, plus):
                    factor, summand = times.value(low), plus.value(low)
                    if how.dtype.name == "f16" and factor == 1:
                        lines += [f"mov.b32 b, {both(summand, how.dtype)};", f"add.{kind} {out}, {out}, b;"]
                    else:
                        lines += [f"mov.b32 a, {both(factor, how.dtype)};", f"mov.b32 b, {both(summand, how.dtype)};"]
                        lines.append(f"fma.rn.{kind} {out}, {out}, a, b;")
    return "\n".join([*lines, "}"])


def cluster_open(count: int, split: int) -> str:
    """Make ready, in the first of `split` programs of a cluster, a barrier and slots for `count` f32 of each, at address $0."""
    return f""".shared .align 16 .b8 slots[{16 + 4 * count * split}];
{{
.reg .b32 rank, thread;
.reg .pred chosen;
mov.u32 rank, %cluster_ctarank;
mov.u32 thread, %tid.x;
or.b32 rank, rank, thread;
setp.eq.u32 chosen, rank, 0;
mov.u32 $0, slots;
@chosen mbarrier.init.shared::cta.b64 [$0], 1;
@chosen mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {4 * count * split};
@chosen fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.relaxed.aligned;
}}"""


def cluster_sum(count: int, split: int) -> str:
    """Send $1 of the first `count` threads to the first program's slots ($2); there $0 is their sum, in the order of programs."""
    adds = "\n".join(f"ld.shared.f32 other, [at + {16 + 4 * count * rank}];\nadd.f32 $0, $0, other;" for rank in range(split))
    return f"""{{
.reg .b32 rank, thread, at, there, barrier;
.reg .pred sends, adds, ready;
.reg .f32 other;
mov.u32 rank, %cluster_ctarank;
mov.u32 thread, %tid.x;
mad.lo.u32 at, rank, {4 * count}, $2;
mad.lo.u32 at, thread, 4, at;
add.u32 at, at, 16;
mapa.shared::cluster.u32 there, at, 0;
mapa.shared::cluster.u32 barrier, $2, 0;
setp.lt.u32 sends, thread, {count};
setp.eq.and.u32 adds, rank, 0, sends;
barrier.cluster.wait.acquire.aligned;
@sends st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], $1, [barrier];
mov.f32 $0, 0f00000000;
@!adds bra done;
wait: mbarrier.try_wait.parity.shared::cta.b64 ready, [$2], 0;
@!ready bra wait;
mad.lo.u32 at, thread, 4, $2;
{adds}
done:
}}"""
