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


def decode_pairs(how: d.Decode, zeros: int = 0) -> str:
    """Turn the pairs of a word, whose codes are half a word apart, into pairs of values $0, $1, …

    The operand after the outputs is the word; after it come `zeros` pairs, of which number i % zeros is subtracted, exactly, from
    output i.
    """
    if (moves := d.moved(how)) is not None:
        return small_floats(how, moves)
    word, kind = f"${how.per_unit}", f"{how.dtype}x2"
    lines, source, shifted = ["{", ".reg .b32 t, a, b;"], word, 0
    for code in range(how.per_unit):
        low, out = how.low(code), f"${code}"
        for op in how.field + how.value:
            match op:
                case d.Shift(every, step):
                    if code // every * step != shifted:
                        shifted, source = code // every * step, "t"
                        lines.append(f"shr.u32 t, {word}, {shifted};")
                case d.And(mask):
                    masked = int(mask.value(low))
                case d.Or(bits):
                    lines.append(f"lop3.b32 {out}, {source}, {twice(masked)}, {twice(bits)}, 0xea;")
                case d.Fma(times, plus):
                    plain = how.dtype.name == "f16" and times.value(low) == 1
                    lines.append(f"mov.b32 b, {both(plus.value(low), how.dtype)};")
                    if zeros:
                        lines += minus("b", f"${how.per_unit + 1 + code % zeros}", how.dtype)
                    lines += [] if plain else [f"mov.b32 a, {both(times.value(low), how.dtype)};"]
                    lines.append(f"add.{kind} {out}, {out}, b;" if plain else f"fma.rn.{kind} {out}, {out}, a, b;")
    return "\n".join([*lines, "}"])


def small_floats(how: d.Decode, moves: d.Moved) -> str:
    """`decode_pairs` for small floats: the sign goes to the top of its half, the rest below it, of both at once."""
    word, lines = f"${how.per_unit}", ["{", ".reg .b32 t, u, a, b;"]
    for code in range(how.per_unit):
        out, at = f"${code}", code * how.bits
        before, sign = shifted(word, moves.sign - at, "t")
        if moves.sign == moves.rest:
            lines += [*before, f"and.b32 {out}, {sign}, {twice(moves.sign_mask | moves.rest_mask)};"]
        else:
            also, rest = shifted(word, moves.rest - at, "u")
            lines += [*before, *also, f"and.b32 u, {rest}, {twice(moves.rest_mask)};"]
            lines.append(f"lop3.b32 {out}, {sign}, {twice(moves.sign_mask)}, u, 0xea;")
        for op in how.value:
            if isinstance(op, d.Except):
                lines += excepted(out, op)
            elif isinstance(op, d.Fma):
                factor, nothing = both(op.times.base, how.dtype), both(-0.0, how.dtype)
                lines += [f"mov.b32 a, {factor};", f"mov.b32 b, {nothing};", f"fma.rn.{how.dtype}x2 {out}, {out}, a, b;"]
    return "\n".join([*lines, "}"])


def twice(bits: int) -> str:
    """Sixteen bits, in both halves of a word."""
    return f"0x{bits << 16 | bits:08x}"


def shifted(word: str, up: int, register: str) -> tuple[list[str], str]:
    """The line that shifts a word up (or down) into a register, and where the result is; none for no shift."""
    if up == 0:
        return [], word
    return [f"sh{'l.b32' if up > 0 else 'r.u32'} {register}, {word}, {abs(up)};"], register


def excepted(out: str, op: d.Except) -> list[str]:
    """Lines that make no number of each half in which all of `ones` are set: one more carries into the bit above them."""
    return [
        f"and.b32 t, {out}, {twice(op.ones)};",
        f"add.u32 t, t, {twice(op.lowest)};",
        f"and.b32 t, t, {twice(1 << op.carry)};",
        f"shl.b32 u, t, {15 - op.carry};",
        f"shr.u32 t, t, {op.carry - op.fill};",
        "sub.u32 t, u, t;",
        f"or.b32 {out}, {out}, t;",
    ]


def minus(register: str, other: str, dtype: DType) -> list[str]:
    """Subtract a pair; bf16 has no subtraction before sm_90."""
    if dtype.name == "f16":
        return [f"sub.f16x2 {register}, {register}, {other};"]
    return [f"mov.b32 a, {both(-1.0, dtype)};", f"fma.rn.bf16x2 {register}, {other}, a, {register};"]


def instructions(text: str) -> int:
    """Instructions that a text becomes: what is moved becomes an operand, what is added before a load a part of its address."""
    return sum(not line.startswith((".", "{", "}", "mov")) for line in text.splitlines()) - text.count("\nld.")


def stored_scales(kind: str) -> str:
    """Turn a word (the last operand) of scales of a machine type into f32 $0 …"""
    if kind == "f16":
        return "{\n.reg .b16 low, high;\nmov.b32 {low, high}, $2;\ncvt.f32.f16 $0, low;\ncvt.f32.f16 $1, high;\n}"
    if kind == "bf16":
        return "{\n.reg .b32 t;\nshl.b32 t, $2, 16;\nmov.b32 $0, t;\nand.b32 t, $2, 0xffff0000;\nmov.b32 $1, t;\n}"
    return "mov.b32 $0, $1;"


def turned_scales(kind: str, x: DType, summed: bool = False) -> str:
    """Turn two words, each of a scale (of type `kind`) and of that 8 outputs further, into two pairs of type x, $0 and $1.

    With `summed` what is left of the scales after rounding to x follows, again in two pairs. The words are the last operands.
    """
    if kind == str(x):
        return "prmt.b32 $0, $2, $3, 0x5410;\nprmt.b32 $1, $2, $3, 0x7632;"
    words = ("$4", "$5") if summed else ("$2", "$3")
    lines = ["{", ".reg .b16 ha, hb, ia, ib;", ".reg .f32 fa, fb, ga, gb, t;", ".reg .b32 u;"]
    lines += [f"mov.b32 {{ha, hb}}, {words[0]};", f"mov.b32 {{ia, ib}}, {words[1]};"]
    lines += [f"cvt.f32.{kind} {to}, {of};" for to, of in (("fa", "ha"), ("fb", "hb"), ("ga", "ia"), ("gb", "ib"))]
    lines += [f"cvt.rn.{x}x2.f32 $0, ga, fa;", f"cvt.rn.{x}x2.f32 $1, gb, fb;"]
    for i, name in enumerate("ab" if summed else ""):
        for half, value in ((f"shl.b32 u, ${i}, 16;", f"f{name}"), (f"and.b32 u, ${i}, 0xffff0000;", f"g{name}")):
            lines += [half, "mov.b32 t, u;", f"sub.f32 {value}, {value}, t;"]
        lines.append(f"cvt.rn.{x}x2.f32 ${i + 2}, g{name}, f{name};")
    return "\n".join([*lines, "}"])


def e4m3_scales() -> str:
    """Turn the four e4m3 of a word ($4) into f32 $0 … by the machine's own conversion (PTX ISA, cvt: sm_89 on)."""
    lines = ["{", ".reg .b16 first, second, low, high;", ".reg .b32 t;", "mov.b32 {first, second}, $4;"]
    for at, pair in enumerate(("first", "second")):
        lines += [f"cvt.rn.f16x2.e4m3x2 t, {pair};", "mov.b32 {low, high}, t;"]
        lines += [f"cvt.f32.f16 ${2 * at}, low;", f"cvt.f32.f16 ${2 * at + 1}, high;"]
    return "\n".join([*lines, "}"])


def coded_scales(how: d.Decode) -> str:
    """Turn the four 8-bit codes of a word ($4) into f32 $0 …, each by the word operations `how`."""
    up, mask, rest = 0, 255, how.value
    if isinstance(rest[0], d.Left):
        up, mask, rest = rest[0].by, 255 << rest[0].by & 2**32 - 1, rest[1:]
    if isinstance(rest[0], d.And):  # what it keeps are bits of the code
        mask, rest = mask & int(rest[0].mask.value(0)), rest[1:]
    lines = ["{", ".reg .b32 t, u;", ".reg .pred p;"]
    for code in range(4):
        before, moved = shifted("$4", up - 8 * code, "t")
        lines += [*before, f"and.b32 t, {moved}, 0x{mask:08x};"]
        lines += [line for op in rest for line in whole_word(op, f"${code}")]
        if any(isinstance(op, d.Except) and op.ones == INF for op in rest):
            lines.append(f"fma.rn.f32 ${code}, ${code}, 0f00000000, ${code};")  # inf times 0 is no number, others stay
    return "\n".join([*lines, "}"])


INF = 0x7F800000
"""The exponent bits of an f32."""


def whole_word(op: d.Op, out: str) -> list[str]:
    """Lines for one word operation on `t`, or on the f32 `out` that it has become."""
    match op:
        case d.Or(bits):
            return [f"or.b32 t, t, 0x{bits:08x};"]
        case d.Right(by):
            return [f"shr.s32 t, t, {by};"]
        case d.Clear(bits):
            return [f"and.b32 t, t, 0x{~bits & 2**32 - 1:08x};"]
        case d.AtLeast(bits):
            return [f"max.u32 t, t, 0x{bits:08x};"]
        case d.Except(ones, bits):
            found = [f"and.b32 u, t, 0x{ones:08x};", f"setp.eq.u32 p, u, 0x{ones:08x};"]
            return [] if ones == INF else [*found, f"@p or.b32 t, t, 0x{bits:08x};"]
        case d.Bitcast():
            return [f"mov.b32 {out}, t;"]
        case d.Fma(times, plus):
            factor, added = (f"0f{int(np.float32(each.value(0)).view(np.uint32)):08X}" for each in (times, plus))
            return [f"fma.rn.f32 {out}, {out}, {factor}, {added};" if plus.value(0) else f"mul.rn.f32 {out}, {out}, {factor};"]
        case _:
            raise TemplateError(f"a scale's code is not decoded by {op} here: take unit=vendor")


def look_up_pairs(bits: int) -> str:
    """Turn the pairs of a word ($n), whose codes are neighbours, into pairs of values $0 … from this lane's table `pairs`."""
    count = 32 // (2 * bits)
    lines = ["{", ".reg .b32 t, lane, table;", "mov.u32 lane, %laneid;", "shl.b32 lane, lane, 2;", "mov.u32 table, pairs;"]
    for pair in range(count):
        move = 2 * bits * pair - 7  # an entry is 128 bytes: four for each lane
        lines.append(f"shl.b32 t, ${count}, {-move};" if move < 0 else f"shr.u32 t, ${count}, {move};")
        lines += [f"lop3.b32 t, t, 0x{(2 ** (2 * bits) - 1) << 7:x}, lane, 0xea;", "add.u32 t, t, table;"]
        lines.append(f"ld.shared.b32 ${pair}, [t];")
    return "\n".join([*lines, "}"])


def fill_pairs() -> str:
    """Store $2 in all 32 words of entry $1 of `pairs`; threads begin at different words, so that they do not meet in a bank."""
    lines = ["{", ".reg .b32 entry, at;", "mov.u32 entry, pairs;", "mad.lo.u32 entry, $1, 128, entry;"]
    for part in range(8):
        lines += [f"add.u32 at, $1, {part};", "and.b32 at, at, 7;", "mad.lo.u32 at, at, 16, entry;"]
        lines.append("st.shared.v4.b32 [at], {$2, $2, $2, $2};")
    return "\n".join([*lines, "mov.u32 $0, 0;", "}"])


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
