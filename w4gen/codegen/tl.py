"""Printer for `triton.language`: tiles and word operations as the lines of a kernel."""

from __future__ import annotations

from w4gen.codegen.index import Index, Term, suffixed
from w4gen.errors import TemplateError
from w4gen.ir import decode as d
from w4gen.ir.layout import Layout
from w4gen.ir.program import Program
from w4gen.ir.tile import Const, Convert, Dot, Field, Fold, Input, Pad, Reduce, Repeat, Slice, Space, Split, Tile, Unpack
from w4gen.ir.types import I32, DType

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


class Walk:
    """The address of every element of a tile, from its indices back through slices, pads and maps to memory."""

    def __init__(self, program: Program, name: str, spans: int) -> None:
        self.program, self.spans = program, spans
        tile = program.tile(name)
        self.dims = self.axes(tile)
        self.masks: list[str] = []
        self.lines: list[str] = []
        self.shift = ""
        self.index = {axis: Index((Term(*self.start(axis)),)) for axis in tile.axes if axis not in STATIC}
        self.code = Term("code") if "code" in tile.axes else Term("span * CODES" if spans > 1 else "0")
        while not program.tile(name).kept and not isinstance(program.op(name), Const | Input):
            self.step(name)
            name = program.source(name)
        self.memory = name
        if isinstance(program.op(name), Input) and "m" in self.dims:
            self.masks.insert(0, f"{suffixed('m', ('m',), self.dims)} < m_count")
        strides = _strides(program.tile(name))
        self.address = self.index.get("unit", Index(()))
        for axis in program.tile(name).axes if "unit" not in self.index else ():
            scaled = self.index[axis].times(strides[axis])
            self.address = Index(self.address.terms + (scaled.terms if scaled.floor == 1 else (self.named(axis, scaled),)))

    def axes(self, tile: Tile) -> tuple[str, ...]:
        """The axes of the tensor that is loaded."""
        return dims(self.program, tile)

    def start(self, axis: str) -> tuple[str, tuple[str, ...]]:
        """The variable that runs along an axis (of a codebook, its entries)."""
        if axis == "c":
            return f"tl.arange(0, {self.program.tile('codebook').sizes['c']})", ("c",)
        return (axis, (axis,)) if axis in self.dims else ("0", ())

    def step(self, name: str) -> None:
        op = self.program.op(name)
        match op:
            case Slice(blocks):
                for block in blocks:
                    if block.drop and block.axis not in STATIC:
                        start = f"step * {block.axis.upper()}S" if block.axis == "word" else "0"
                        self.index[block.axis] = Index((Term(start),))
            case Fold(quad):
                lane, inner = self.index.pop("lane"), self.index.pop("quad")
                self.index["word"] = Index((*lane.times(quad).terms, *(t for t in inner.terms if t.text != "0")))
            case Pad(sizes):
                held = self.program.tile(self.program.source(name)).sizes
                for axis, _ in sizes:
                    limit = "m_count" if axis == "m" else {"n": "N", "k": "K"}.get(axis, str(held[axis]))
                    self.masks.append(f"{self.index[axis].render(self.dims)} < {limit}")
            case Repeat(group):
                self.index["g"] = self.index.pop("k").quotient(group)
            case Unpack(layout):
                self.unpack(layout)
            case Split(layout):
                self.index["k"] = self.split(layout)
                if name == "x.order":
                    self.index["k"] = Index((self.named("k", self.index["k"]),))
            case _:
                raise TemplateError(f"{name} ({op}) cannot be read through: only slices, pads and maps are views")

    def unpack(self, layout: Layout) -> None:
        """The unit that holds an element, and the bit of it at which the element starts, digit by digit."""
        units: list[Term] = []
        bits: list[Term] = []
        for axis in layout.axes:
            index, below = self.index[axis], 1
            for digit in (digit for digit in layout.digits if digit.axis == axis):
                part = index.quotient(below)
                below *= digit.size
                part = part if below == layout.size(axis) else part.remainder(digit.size)
                inside = digit.stride < layout.unit
                (bits if inside else units).extend(part.times(digit.stride if inside else digit.stride // layout.unit).terms)
        self.index["unit"] = Index(tuple(term for term in units if term.modulo != 1))
        self.shift = Index(tuple(term for term in bits if term.modulo != 1)).render(self.dims)

    def split(self, layout: Layout) -> Index:
        """k as the digits of word and code."""
        word = self.index.pop("word")
        terms: list[Term] = []
        for place in layout.places("k"):
            at = word if place.source == "word" else Index((self.code,))
            digit = at.quotient(place.divide).remainder(place.modulo) if place.modulo else at.quotient(place.divide)
            terms += digit.times(place.weight).terms
        return Index(tuple(term for term in terms if term.text != "0" and term.modulo != 1))

    def named(self, axis: str, index: Index) -> Term:
        """A variable for an index that is too long to repeat."""
        along = tuple(each for each in self.dims if each in index.axes)
        self.lines.append(f"{axis} = {index.render(along)}")
        return Term(axis, along)

    def load(self, name: str, extra: str = "") -> list[str]:
        memory = pointer(self.program, self.memory)
        where = self.address.render(self.dims)
        lines, mask = list(self.lines), ""
        if self.masks:
            zero = "0" if self.program.tile(self.memory).element == I32 else "0.0"
            inside = self.masks[0] if len(self.masks) == 1 else " & ".join(f"({each})" for each in self.masks)
            if len(self.masks) > 1 or extra:
                lines, inside = [*lines, f"inside = {inside}"], "inside"
            mask = f", mask={inside}, other={zero}"
        if len(where) + len(mask) + len(extra) > 80:
            lines, where = [*lines, f"{variable(name)}_at = {where}"], f"{variable(name)}_at"
        shift = f" >> ({self.shift})" if self.shift else ""
        return [*lines, f"{variable(name)} = tl.load({memory} + {where}{mask}{extra}){shift}"]


class Gathered(Walk):
    """A walk whose indices n and word are tensors of the same shape, made by the template."""

    def axes(self, tile: Tile) -> tuple[str, ...]:
        return ()

    def start(self, axis: str) -> tuple[str, tuple[str, ...]]:
        return axis, ()


class Natural(Walk):
    """A walk along k itself, where the codes of a step's words, one position after the other, are neighbouring k."""

    def axes(self, tile: Tile) -> tuple[str, ...]:
        return ("m", "k")

    def split(self, layout: Layout) -> Index:
        run = next(digit.size for digit in layout.digits if digit.axis == "k")
        if run != self.program.tile("w.tile").sizes["word"]:
            raise TemplateError(
                f"a step of {self.program.tile('w.tile').sizes['word']} words does not hold whole runs of {run} k"
            )
        self.index.pop("word")
        return Index((Term("k", ("k",)),))

    def named(self, axis: str, index: Index) -> Term:
        return index.terms[0]


def _strides(tile: Tile) -> dict[str, int]:
    """Units between neighbours along each axis of a tile in memory: rows of words, or row-major."""
    strides, stride = {}, 1
    for axis, size in reversed(tile.sizes.items()):
        strides[axis] = stride
        stride *= size
    return strides


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
    bits = next(op.bits for op in how.value if isinstance(op, d.Or))
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
