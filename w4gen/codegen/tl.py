"""Printer for `triton.language`: tiles and word operations as the lines of a kernel."""

from __future__ import annotations

from w4gen.codegen.index import suffixed
from w4gen.errors import TemplateError
from w4gen.ir import decode as d
from w4gen.ir.layout import Layout
from w4gen.ir.program import Program
from w4gen.ir.tile import Const, Convert, Dot, Field, Input, Reduce, Space, Tile, Unpack
from w4gen.ir.types import DType

TYPES = {"f16": "tl.float16", "bf16": "tl.bfloat16", "f32": "tl.float32", "i32": "tl.int32", "u8": "tl.uint8"}
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
    return f"{variable(name.removesuffix('.stored').removeprefix('w.'))}_ptr"


def dims(program: Program, tile: Tile) -> tuple[str, ...]:
    """The axes of the tensor that holds a tile: not those unrolled, and not m where w is on the right of one row."""
    order = LEFT if any(op.side == "left" for op in map(program.op, program.of(Dot)) if isinstance(op, Dot)) else ORDER
    alone = order == ORDER and program.problem.m == (1, 1) and not program.problem.gradient
    return tuple(axis for axis in order if axis in tile.axes and not (axis == "m" and alone))


def chain(program: Program, name: str) -> list[str]:
    """The nodes from a global tile (left out) to `name`, following first operands."""
    found: list[str] = []
    while not program.tile(name).kept and not isinstance(program.op(name), Const | Input):
        found.insert(0, name)
        name = program.source(name)
    return found


def order(program: Program, name: str) -> Layout:
    """The layout by which a view reads codes, scales or zeros out of blocks. Raises `TemplateError` for what is kept in rows."""
    op = program.op(f"{name}.view") if f"{name}.view" in program.graph else None
    if not isinstance(op, Unpack):
        raise TemplateError(f"{name}.stored is kept in rows: a template that takes w on the left reads blocks")
    return op.layout


def low_bit(how: d.Decode) -> str:
    """The bit at which a code stands when it is decoded, as text; "" where it is always bit 0."""
    every, step = how.shift.every, how.shift.step
    if every == 1:
        return ""
    if every >= how.per_unit:
        return f"code * {how.bits}"
    return f"code % {every} * {how.bits}" if step == every * how.bits else f"code * {how.bits} - code // {every} * {step}"


def expression(op: d.Op, text: str, low: str, table: str = "") -> str:
    """One word operation applied to `text`; the code stands at bit `low` of it, and is looked up in `table`."""
    match op:
        case d.Shift(every, step):
            return f"{text} >> code // {every} * {step}" if every > 1 else f"{text} >> code * {step}"
        case d.Narrow():
            return f"({text}).to(tl.int16)"
        case d.And(mask):
            return f"({text} & (0x{int(mask.factor):X} << {low}))" if low else f"({text} & 0x{int(mask.value(0)):X})"
        case d.Or(bits):
            return f"({text} | {'magic' if bits > 0xFFFF else f'0x{bits:X}'})"
        case d.Left(by):
            return f"({text} << {by})"
        case d.Right(by):
            return f"({text} >> {by})"
        case d.Clear(bits):
            return f"({text} & ~0x{bits:X})"
        case d.AtLeast(bits):
            return f"tl.maximum({bare(text)}, 0x{bits:X})"
        case d.Except(ones, bits):
            return f"tl.where(({text} & 0x{ones:X}) == 0x{ones:X}, {text} | 0x{bits:X}, {text})"
        case d.Bitcast(dtype):
            return f"{text}.to({TYPES[dtype.name]}, bitcast=True)"
        case d.Fma(times, plus) if low and times.factor:
            bias = f"{-plus.factor!r} / (1 << {low})"
            return f"{text} - ({bias} + {-plus.base!r})".replace("+ -", "- ") if plus.base else f"{text} - {bias}"
        case d.Fma(times, plus):
            whole = text if text.isidentifier() or text.endswith(")") else f"({text})"
            scaled = text if times.value(0) == 1 else f"{whole} * {times.value(0)!r}"
            return f"{scaled} + {plus.value(0)!r}".replace("+ -", "- ") if plus.value(0) else scaled
        case d.Lookup(dtype):
            return f"look_up({table}, {bare(text)})" + ("" if dtype.name == "f32" else f".to({TYPES[dtype.name]})")


def magic(program: Program, hidden: str) -> list[str]:
    """The exponent bits that 32-bit codes are or-ed with, plus `hidden`, a 0 that ptxas cannot see."""
    bits = [op.bits for op in decoding(program).value if isinstance(op, d.Or) and op.bits > 0xFFFF]
    return [f"magic = 0x{each:X} + {hidden}  # {each:#x}, hidden from ptxas: and + or stay one LOP3" for each in bits]


def bare(text: str) -> str:
    """`text` without the brackets around all of it."""
    return text[1:-1] if text.startswith("(") and text.endswith(")") else text


def value(program: Program, name: str, how: d.Decode, codes: str = "") -> list[str]:
    """The lines that turn codes, those of the node's operand if not said otherwise, into values."""
    lines: list[str] = []
    held, table = (variable(program.operands(name).get(role, "")) for role in ("codes", "codebook"))
    text, low, own = codes or held, low_bit(how), variable(name.partition(".value")[0])
    for op in how.value:
        if isinstance(op, d.Bitcast | d.Except):
            lines, text = [*lines, f"{own}_bits = {bare(text)}"], f"{own}_bits"
        if isinstance(op, d.Fma):
            scaled = f" * ({op.times.factor!r} / (1 << {low}))" if low and op.times.factor else ""
            lines, text = [*lines, f"{own}_float = {text}{scaled}"], f"{own}_float"
        # a constant in a register, for weights; scales are few
        text = f"({text} | 0x{op.bits:X})" if isinstance(op, d.Or) and own != "w" else expression(op, text, low, table)
    return [*lines, f"{variable(name)} = {text}"]


def conversion(program: Program, name: str) -> list[str]:
    """The lines of one Convert, Field, Dot or Reduce of a loop."""
    op, tile, roles = program.op(name), program.tile(name), program.operands(name)
    source = variable(program.source(name))
    if tile.space is Space.SHARED or (tile.space is Space.GLOBAL and not isinstance(op, Reduce)):
        raise TemplateError(f"{name} lives in {tile.space.value} memory: this printer keeps what it converts in registers")
    match op:
        case Field():
            how, text = decoding(program), source
            for step in how.field:
                text = expression(step, text, "")
            return [f"{variable(name)} = {text}"]
        case Convert(decode) if decode is not None:
            return value(program, name, decode)
        case Convert(_, origin) if "scale" in roles:
            if "acc" in roles and (power := decoding(program).power):
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
            how = decoding(program)
            if how.power:
                low = f" / (1 << {low_bit(how)})" if low_bit(how) else ""
                x = f"({x} * (2.0**{how.below - how.power}{low}))"
            w, x = variable(roles["w"]), suffixed(x, *_dims(program, roles["x"], name))
            return [f"{variable(name)} += {suffixed(w, *_dims(program, roles['w'], name))} * {x}"]
        case Dot(_, _, "left"):
            # into a sum of its own: the next decoding must not overwrite an operand that an instruction still reads
            return [f"{variable(name)} = tl.dot({variable(roles['w'])}, tl.trans({variable(roles['x'])}))"]
        case Dot(("n",)):
            return [f"{variable(name)} = tl.dot({variable(roles['x'])}, {variable(roles['w'])})"]
        case Dot():
            return [f"{variable(name)} = tl.dot({variable(roles['x'])}, tl.trans({variable(roles['w'])}), {variable(name)})"]
        case Reduce(over, "") if not set(over) & set(STATIC):
            before = program.tile(program.source(name))
            text = source if before.element == tile.element else f"{source}.to({type_of(tile)})"  # Triton adds up in x's type
            return [f"{variable(name)} = tl.sum({text}, axis={dims(program, before).index(over[0])})"]
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


def decoding(program: Program) -> d.Decode:
    """How the codes of the weight are decoded."""
    op = program.op("w.value")
    if isinstance(op, Convert) and op.decode is not None:
        return op.decode
    raise TemplateError("the program does not say how its codes are decoded: place its conversion first")
