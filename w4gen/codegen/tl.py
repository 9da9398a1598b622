"""Printer for `triton.language`: tiles and word operations as the lines of a kernel."""

from __future__ import annotations

from w4gen.codegen.index import suffixed
from w4gen.errors import TemplateError
from w4gen.ir import decode as d
from w4gen.ir.program import Program
from w4gen.ir.tile import Const, Convert, Dot, Field, Input, Reduce, Space, Tile
from w4gen.ir.types import DType

TYPES = {"f16": "tl.float16", "bf16": "tl.bfloat16", "f32": "tl.float32", "i32": "tl.int32"}
STATIC = ("span", "code")
"""Axes that a kernel unrolls: loops over constants, not axes of its tensors."""
ORDER = ("m", "lane", "n", "word", "k", "quad", "c")
"""The order of a tensor's axes: lanes first, so that Triton spreads them over threads, then rows, then a thread's own words."""
LEFT = ("n", "m", "k", "c")
"""The order where w is the left operand of the Dot."""


def variable(name: str) -> str:
    """The Python name of a node."""
    return name.replace(".", "_")


def type_of(tile: Tile) -> str:
    """The Triton type of a tile's elements. Raises `TemplateError` for codes, which have none."""
    if not isinstance(tile.element, DType):
        raise TemplateError(f"{tile} holds codes: they have no type of their own in a kernel")
    return TYPES[tile.element.name]


def pointer(program: Program, name: str) -> str:
    """The argument that a global tile is passed as."""
    return f"{name.removesuffix('.stored').removeprefix('w.')}_ptr"


def dims(program: Program, tile: Tile) -> tuple[str, ...]:
    """The axes of the tensor that holds a tile: not those unrolled, and not m where there is one row."""
    order = LEFT if any(op.side == "left" for op in map(program.op, program.of(Dot)) if isinstance(op, Dot)) else ORDER
    return tuple(axis for axis in order if axis in tile.axes and not (axis == "m" and program.problem.m == (1, 1)))


def chain(program: Program, name: str) -> list[str]:
    """The nodes from a global tile (left out) to `name`, following first operands."""
    found: list[str] = []
    while not program.tile(name).kept and not isinstance(program.op(name), Const | Input):
        found.insert(0, name)
        name = program.source(name)
    return found


def low_bit(how: d.Decode) -> str:
    """The bit at which a code stands when it is decoded, as text; "" where it is always bit 0."""
    every, step = how.shift.every, how.shift.step
    if every == 1:
        return ""
    if every >= how.per_unit:
        return f"code * {how.bits}"
    return f"code % {every} * {how.bits}" if step == every * how.bits else f"code * {how.bits} - code // {every} * {step}"


def expression(op: d.Op, text: str, low: str) -> str:
    """One word operation applied to `text`; the code stands at bit `low` of it."""
    match op:
        case d.Shift(every, step):
            return f"{text} >> code // {every} * {step}" if every > 1 else f"{text} >> code * {step}"
        case d.Narrow():
            return f"({text}).to(tl.int16)"
        case d.And(mask):
            return f"({text} & (0x{int(mask.factor):X} << {low}))" if low else f"({text} & 0x{int(mask.value(0)):X})"
        case d.Or(bits):
            return f"({text} | {'magic' if bits > 0xFFFF else f'0x{bits:X}'})"
        case d.Bitcast(dtype):
            return f"{text}.to({TYPES[dtype.name]}, bitcast=True)"
        case d.Fma(_, plus) if low:
            bias = f"{-plus.factor!r} / (1 << {low})"
            return f"{text} - ({bias} + {-plus.base!r})".replace("+ -", "- ") if plus.base else f"{text} - {bias}"
        case d.Fma(times, plus):
            scaled = text if times.value(0) == 1 else f"{text} * {times.value(0)!r}"
            return f"{scaled} + {plus.value(0)!r}".replace("+ -", "- ")
        case d.Lookup(dtype):
            return f"look_up(codebook_tile, {bare(text)})" + ("" if dtype.name == "f32" else f".to({TYPES[dtype.name]})")


def pairs(program: Program, name: str) -> list[str]:
    """The lines that decode pairs of codes of `w_tile` into `name`, the left operand of a matrix instruction."""
    how, form, value = _decoding(program), program.problem.format, variable(name)
    if how != d.decode(form, how.dtype, how.per_unit, in_place=False) or how.dtype.bits != 16:
        raise TemplateError(
            f"{name}: pairs are decoded in 16 bits, every code at bit 0, not in {how.dtype}: take scale_at=accumulator"
        )
    mask, times, plus = 2**form.bits - 1, form.step, next(op.plus.value(0) for op in how.value if isinstance(op, d.Fma))
    scaled = "" if times == 1 else f" * {times!r}"
    return [
        "u, v = tl.split(w_tile.reshape([32 * WARPS, 4 * REPEAT, 2]))",
        "half = (span * CODES // PER_HALF + tl.arange(0, HALVES)) * 16",
        f"low = (span * CODES % PER_HALF + tl.arange(0, IN_HALF)) * {form.bits}",
        "pair = ((u[:, :, None] >> half[None, None, :]) & 0xFFFF) | ((v[:, :, None] >> half[None, None, :]) << 16)",
        f"w_bits = ((pair[:, :, :, None] >> low[None, None, None, :]) & 0x{mask << 16 | mask:08X}) | magic",
        f"{value} = halves(w_bits){scaled} + {plus!r}".replace("+ -", "- "),
        f"{value} = {value}.reshape([4, 8, WARPS, REPEAT, 2, 4 // VECTOR, VECTOR // 2, HALVES, IN_HALF, 2])",
        f"{value} = {value}.permute([3, 2, 4, 1, 7, 8, 5, 0, 6, 9]).reshape([BLOCK_N, 16 * CODES])",
    ]


def paired(program: Program) -> tuple[str, str]:
    """The exponent bits of a pair of values, and their type."""
    how = _decoding(program)
    bits = next((op.bits for op in how.value if isinstance(op, d.Or)), None)
    if bits is None:
        raise TemplateError(
            f"{program.problem.format.label} is looked up: only codes that are or-ed with an exponent come in pairs"
        )
    return f"0x{bits << 16 | bits:08X}", TYPES[how.dtype.name]


def magic(program: Program) -> list[str]:
    """The exponent bits that 32-bit codes are or-ed with, as a value that ptxas does not know: then and + or are one LOP3."""
    bits = [op.bits for op in _decoding(program).value if isinstance(op, d.Or) and op.bits > 0xFFFF]
    return [
        f"magic = 0x{each:X} + tl.num_programs(2) - 1  # {each:#x}, hidden from ptxas: and + or stay one LOP3" for each in bits
    ]


def bare(text: str) -> str:
    """`text` without the brackets around all of it."""
    return text[1:-1] if text.startswith("(") and text.endswith(")") else text


def value(name: str, codes: str, how: d.Decode) -> list[str]:
    """The lines that turn codes into values."""
    lines: list[str] = []
    text, low = codes, low_bit(how)
    for op in how.value:
        if isinstance(op, d.Bitcast):
            lines, text = [*lines, f"w_bits = {bare(text)}"], "w_bits"
        if isinstance(op, d.Fma):
            scaled = f" * ({op.times.factor!r} / (1 << {low}))" if low else ""
            lines, text = [*lines, f"w_float = {text}{scaled}"], "w_float"
        text = expression(op, text, low)
    return [*lines, f"{name} = {text}"]


def conversion(program: Program, name: str) -> list[str]:
    """The lines of one Convert, Field, Dot or Reduce of a loop."""
    op, tile, roles = program.op(name), program.tile(name), program.operands(name)
    source = variable(program.source(name))
    if tile.space is Space.SHARED or (tile.space is Space.GLOBAL and not isinstance(op, Reduce)):
        raise TemplateError(f"{name} lives in {tile.space.value} memory: this printer keeps what it converts in registers")
    match op:
        case Field():
            how, text = _decoding(program), source
            for step in how.field:
                text = expression(step, text, "")
            return [f"{variable(name)} = {text}"]
        case Convert(decode) if decode is not None:
            return value(variable(name), variable(roles["codes"]), decode)
        case Convert(_, origin) if "scale" in roles:
            if "acc" in roles and (power := _decoding(program).power):
                source = f"{source} * 2.0**{power}"
            if origin:
                source = f"({source} + {origin!r} * {operand(program, name, 'sum')})".replace("+ -", "- ")
            return assigned(program, name, f"{source} * {operand(program, name, 'scale')}")
        case Convert() if "zero" in roles:
            total = f" * {operand(program, name, 'sum')}" if "sum" in roles else ""
            return assigned(program, name, f"{source} - {operand(program, name, 'zero')}{total}")
        case Convert():
            return [f"{variable(name)} = {source}.to({TYPES[tile.element.name]})"]
        case Dot(_, "lanes"):
            x = variable(roles["x"])
            how = _decoding(program)
            if how.power:
                low = f" / (1 << {low_bit(how)})" if low_bit(how) else ""
                x = f"({x} * (2.0**{149 - how.power}{low}))"
            w, x = variable(roles["w"]), suffixed(x, *_dims(program, roles["x"], name))
            return [f"{variable(name)} += {suffixed(w, *_dims(program, roles['w'], name))} * {x}"]
        case Dot(_, _, "left"):
            # into a sum of its own: the next decoding must not overwrite an operand that an instruction still reads
            return [f"{variable(name)} = tl.dot({variable(roles['w'])}, tl.trans({variable(roles['x'])}))"]
        case Dot():
            return [f"{variable(name)} = tl.dot({variable(roles['x'])}, tl.trans({variable(roles['w'])}), {variable(name)})"]
        case Reduce(over, "") if not set(over) & set(STATIC):
            axes = dims(program, program.tile(program.source(name)))
            return [f"{variable(name)} = tl.sum({source}, axis={axes.index(over[0])})"]
        case Reduce():
            return [f"{variable(name)} += {source}"]
        case _:
            raise TemplateError(f"{name} ({op}) has no text of its own in a loop")


def operand(program: Program, name: str, role: str) -> str:
    """An operand of a node, brought to the node's axes and to the type of its first operand, in which it computes."""
    source, first = program.operands(name)[role], program.tile(program.source(name))
    text = suffixed(variable(source), *_dims(program, source, name))
    return text if program.tile(source).element == first.element else f"{text}.to({type_of(first)})"


def assigned(program: Program, name: str, text: str) -> list[str]:
    """The line that gives a node its value, rounded where the node is narrower than what it is made from."""
    same = program.tile(name).element == program.tile(program.source(name)).element
    return [f"{variable(name)} = {text if same else f'({text}).to({type_of(program.tile(name))})'}"]


def _dims(program: Program, name: str, user: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return dims(program, program.tile(name)), dims(program, program.tile(user))


def _decoding(program: Program) -> d.Decode:
    """How the codes of the weight are decoded."""
    for op in map(program.op, program):
        if isinstance(op, Convert) and op.decode is not None:
            return op.decode
    raise TemplateError("the program does not say how its codes are decoded: place its conversion first")
