"""Element types: machine types (`DType`, of `ir.dtype`) and low-bit formats (`Format`)."""

from __future__ import annotations

import ast
import math
import re
from dataclasses import dataclass, fields, replace
from typing import Any

from w4gen.errors import FormatError
from w4gen.ir.dtype import ALIASES, BF16, DTYPES, E4M3, E5M2, E8M0, F16, F32, I32, U8, DType, dtype, minifloat

__all__ = (
    "ALIASES",
    "BF16",
    "DTYPES",
    "E4M3",
    "E5M2",
    "E8M0",
    "F16",
    "F32",
    "I32",
    "PER_TENSOR",
    "U8",
    "ZERO_MODES",
    "ZERO_SUFFIXES",
    "DType",
    "Format",
    "decoded",
    "dtype",
    "minifloat",
)  # fmt: skip

ZERO_MODES = {
    "integer": "integer", "quantized": "integer",
    "float": "float", "original": "float",
    "minimum": "minimum", "rescale": "minimum",
}  # fmt: skip
"""How a zero enters, and BitBLAS's names for it.

integer: (q - z) * s, z being one of the values (GPTQ, AWQ, compressed-tensors, AutoRound; GPTQ's older files store z - 1)
float: (q - z) * s, any z (HQQ)
minimum: q * s - z (GGUF's Q4_1 and Q5_1, which store -z, and its K-quants)
"""

PER_TENSOR = "tensor"
"""The codebook of a format whose weights bring one each."""

ZERO_SUFFIXES = {"z": "integer", "zf": "float", "m": "minimum"}
"""The zero modes in the names of formats."""


@dataclass(frozen=True, slots=True)
class Format:
    """What a low-bit code means: `weight = scale[n, k // group] * value(code)`, or with a zero as `ZERO_MODES` says.

    Values are affine, `step * code + origin`; or those of a small float, `minifloat` (a DType, or its name `e2m1`); or
    `codebook[code]`, 2**bits entries, which `PER_TENSOR` leaves to each weight: layers with tables of their own share a kernel.
    `group` runs along K (the last may be partial); -1 is one scale for the whole row. With `flat` groups run on over the ends of
    rows, and -1 is one for the whole tensor. `scale` is the type of the scales, one per group; `zero` that of zeros, `zero_mode`
    how they enter. Either may again be a Format, whose values are the scales: with a group, along the scales, and a scale of its
    own, or with scale=None the values themselves. Products of scales are f32. `str(f)` holds every field, and
    `Format.parse(str(f)) == f`: a stored weight describes itself. `label` is the short name for people, `int4_g128`.
    """

    name: str
    bits: int = 4
    step: float = 1.0
    origin: float = 0.0
    codebook: tuple[float, ...] | str | None = None
    group: int = 128
    scale: DType | Format | None = F16
    zero: DType | Format | None = None
    zero_mode: str | None = None
    minifloat: DType | None = None
    flat: bool = False

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise FormatError(f"format name {self.name!r} is not an identifier: use letters, digits and underscores")
        if self.bits not in range(1, 9):
            raise FormatError(f"{self.name}: bits={self.bits} is not stored: use 1 to 8")
        if not isinstance(self.group, int) or (self.group != -1 and self.group <= 0):
            raise FormatError(
                f"{self.name}: group={self.group} is not positive and whole: use 32, 64, 128 …, or -1 for the whole row"
            )
        self._check_values()
        self._check_types()

    def _check_values(self) -> None:
        """What a code is worth: one of the three kinds, and exactly decodable."""
        if isinstance(self.minifloat, str):
            object.__setattr__(self, "minifloat", minifloat(self.minifloat))
        if self.minifloat is not None and (self.codebook is not None or (self.step, self.origin) != (1.0, 0.0)):
            raise FormatError(
                f"{self.name}: minifloat={self.minifloat} and other values too: give one of step, minifloat, codebook"
            )
        if self.minifloat is not None and self.minifloat.bits != self.bits:
            own = self.minifloat.bits
            raise FormatError(f"{self.name}: minifloat={self.minifloat} has {own} bits, not {self.bits}: say bits={own}")
        if self.codebook is not None and self.codebook != PER_TENSOR:
            self._check_codebook()
        step, origin = self.step, self.origin
        if step <= 0 or math.frexp(step)[0] != 0.5 or origin % (step / 2) or abs(origin) > 128 * step:
            raise FormatError(
                f"{self.name}: step={step:g} and origin={origin:g} do not decode exactly: take a power of two and a multiple "
                "of half of it, at most 128 steps from 0 (the rest belongs in the scale), or list the values as a codebook"
            )

    def _check_codebook(self) -> None:
        """A table of the right length, of finite numbers."""
        if isinstance(self.codebook, str):
            raise FormatError(
                f"{self.name}: codebook={self.codebook!r}: give 2**bits values, or {PER_TENSOR!r} for one per weight"
            )
        table = tuple(float(value) for value in self.codebook or ())
        object.__setattr__(self, "codebook", table)
        if len(table) != 2**self.bits:
            raise FormatError(f"{self.name}: codebook has {len(table)} entries, {self.bits} bits need {2**self.bits}")
        if not all(map(math.isfinite, table)):
            raise FormatError(f"{self.name}: codebook {list(table)} holds values that are not finite: a weight cannot")
        if not any(table):
            raise FormatError(f"{self.name}: codebook {list(table)} holds 0 alone: give a value that a scale can multiply")

    def _check_types(self) -> None:
        """The types of scale and zero, and the mode of the zero, which is made one of the three names."""
        for field in ("scale", "zero"):
            if (found := {**DTYPES, **ALIASES}.get(str(getattr(self, field)))) is not None:
                object.__setattr__(self, field, found)  # it may be given by its name
        for field, kind in (("scale", self.scale or F16), ("zero", self.zero or F16)):
            if not isinstance(kind, Format) and not (isinstance(kind, DType) and kind.kind == "float"):
                known = ", ".join(each.name for each in DTYPES.values() if each.kind == "float")
                raise FormatError(f"{self.name}: {field}={kind} is not a float type: use {known}, or a Format of its own")
        if self.zero is None:
            if self.zero_mode is not None:
                raise FormatError(f"{self.name}: zero_mode={self.zero_mode} without zeros: add zero=f16, or leave it out")
            return
        mode = ZERO_MODES.get(self.zero_mode or "integer")
        if mode is None:
            raise FormatError(f"{self.name}: zero_mode={self.zero_mode!r}: use one of {', '.join(ZERO_MODES)}")
        if mode == "integer" and not self.whole:
            raise FormatError(f"{self.name}: only codes that step by 1 have an integer zero: use zero_mode=float or minimum")
        object.__setattr__(self, "zero_mode", mode)

    @property
    def affine(self) -> bool:
        """Whether the values are `step * code + origin`."""
        return self.minifloat is None and self.codebook is None

    @property
    def whole(self) -> bool:
        """Whether the values are whole numbers that step by 1."""
        return self.affine and self.step == 1.0 and float(self.origin).is_integer()

    @property
    def values(self) -> tuple[float, ...]:
        """The value of every code, before scaling. Raises `FormatError` where each weight has a codebook of its own."""
        if self.codebook == PER_TENSOR:
            raise FormatError(f"{self.name}: its values are per tensor: the weight holds them, `w.codebook`")
        if isinstance(self.codebook, tuple):
            return self.codebook
        if self.minifloat is not None:
            return self.minifloat.values
        return tuple(self.step * code + self.origin for code in range(2**self.bits))

    @property
    def zero_after_scale(self) -> bool:
        """Whether a zero is subtracted from the scaled value, not from the value."""
        return self.zero_mode == "minimum"

    @property
    def nested(self) -> bool:
        """Whether both scales and zeros are of a format."""
        return isinstance(self.scale, Format) and isinstance(self.zero, Format)

    @property
    def suffixes(self) -> list[str]:
        """What `label` adds to the name: the group, the mode of the zero, the type of the scale."""
        mode = [suffix for suffix, mode in ZERO_SUFFIXES.items() if mode == self.zero_mode]
        group = ("tensor" if self.flat else "row") if self.group == -1 else f"{'flat' if self.flat else 'g'}{self.group}"
        return [group, *mode, *([] if self.scale == F16 else [self.scale.name if self.scale else "unscaled"])]

    @property
    def label(self) -> str:
        return "_".join([self.name, *self.suffixes])

    def group_in(self, k: int) -> int:
        """Weights under one scale in a row of length k."""
        return k if self.group == -1 else self.group

    def groups(self, k: int) -> int:
        """Scales in a row of length k; the last group may be partial."""
        return -(-k // self.group_in(k))

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """Rows and columns of the scales of [rows, columns] values; one row where groups are flat."""
        if not self.flat:
            return rows, self.groups(columns)
        return 1, self.groups(rows * columns)

    def parts(self, rows: int, columns: int) -> dict[str, tuple[DType | Format, tuple[int, ...]]]:
        """The tensors that [rows, columns] weights are made of: name -> element and shape, the codes of a Format among them.

        `codes`, `scale`, `zero` and `codebook` come first, then `scale.scale` and so on: what the scales are made of.
        """
        return {"codes": (self, (rows, columns)), **self._parts("", rows, columns)}

    def _parts(self, at: str, rows: int, columns: int) -> dict[str, tuple[DType | Format, tuple[int, ...]]]:
        grid, found = self.grid(rows, columns), dict[str, tuple[DType | Format, tuple[int, ...]]]()
        kinds = {f"{at}{role}": decoded(kind) for role, kind in (("scale", self.scale), ("zero", self.zero)) if kind is not None}
        found |= {name: (kind, grid) for name, kind in kinds.items()}
        if self.codebook is not None:
            found[f"{at}codebook"] = (F32, (2**self.bits,))
        for name, kind in kinds.items():
            found |= kind._parts(f"{name}.", *grid) if isinstance(kind, Format) else {}
        return found

    def stated_bits(self, n: int, k: int) -> float:
        """Bits of a weight, in [n, k] of them, with its share of scales and the rest; nothing is padded."""
        return sum(math.prod(shape) * kind.bits for kind, shape in self.parts(n, k).values()) / (n * k)

    @property
    def decoding(self) -> str:
        """How a code becomes a value."""
        if self.codebook is not None:
            return "look-up"
        return "exponent trick" if self.minifloat is None else "exponent shift"

    def tables(self) -> dict[str, tuple[float, ...]]:
        """The codebooks that are fixed, by the names of `parts`."""
        books = {name: kind for name, (kind, _) in self.parts(1, 1).items() if isinstance(kind, Format)}
        named = {("" if name == "codes" else f"{name}.") + "codebook": kind.codebook for name, kind in books.items()}
        return {name: book for name, book in named.items() if isinstance(book, tuple)}

    def with_suffixes(self, suffixes: list[str]) -> Format:
        """This format with the group, zero and scale type that `['g64', 'z', 'bf16']` names; zeros are of the scale's type."""
        changes: dict[str, Any] = {}
        for suffix in suffixes:
            if suffix in ("row", "tensor"):
                changes |= {"group": -1, "flat": suffix == "tensor"}
            elif match := re.fullmatch(r"(g|flat)(-?\d+)", suffix):
                changes |= {"group": int(match[2]), "flat": match[1] == "flat"}
                if changes["group"] <= 0:
                    raise FormatError(f"{self.name}_{suffix}: the group must be positive: use _g64, or _row for the whole row")
            elif isinstance(self.scale, Format) and suffix == self.scale.name:
                continue
            elif suffix in DTYPES:
                changes["scale"] = DTYPES[suffix]
            elif suffix in ZERO_SUFFIXES:
                changes["zero_mode"] = ZERO_SUFFIXES[suffix]
            else:
                raise FormatError(
                    f"{self.name}: unknown suffix _{suffix}: use _g64, _row, _tensor, _z, _zf, _m, or a type of scale, as _bf16"
                )
        new = changes.get("zero_mode", self.zero_mode) != self.zero_mode or "scale" in changes
        if changes.get("zero_mode", self.zero_mode) and new:
            changes["zero"] = changes.get("scale", self.scale)
        return replace(self, **changes)

    def __str__(self) -> str:
        parts = []
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if isinstance(value, tuple):
                value = str(list(value)).replace(" ", "")
            if (value is not None and value is not False) or field.name == "scale":
                parts.append(f"{field.name}={value}")
        return f"{self.name}({','.join(parts)})"

    @classmethod
    def parse(cls, text: str) -> Format:
        """The format that `str()` wrote. Raises `FormatError` on anything else."""
        try:
            if not isinstance(text, str):
                raise TypeError("it is no text")
            return cls._read(ast.parse(text, mode="eval").body)
        except (SyntaxError, ValueError, KeyError, TypeError) as error:
            raise FormatError(f"cannot read the format {text!r}: {error}; write it with str(format)") from error

    @classmethod
    def _read(cls, call: ast.expr) -> Format:
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError("it is not of the form name(field=value,...)")
        words: dict[str, Any] = DTYPES | {word: word for word in (*ZERO_MODES, PER_TENSOR)}
        known: dict[str, Any] = {}
        for keyword in call.keywords:
            given = keyword.value
            if isinstance(given, ast.Call):
                value: Any = cls._read(given)
            elif isinstance(given, ast.Name):
                value = minifloat(given.id) if keyword.arg == "minifloat" and given.id not in DTYPES else words.get(given.id)
                if value is None:
                    raise ValueError(f"{given.id} is no type")
            else:
                value = ast.literal_eval(given)
            if keyword.arg not in {field.name for field in fields(cls)}:
                raise ValueError(f"a format has no {keyword.arg}")
            known[str(keyword.arg)] = tuple(value) if isinstance(value, list) else value
        return cls(call.func.id, **known)


def decoded(kind: DType | Format) -> DType | Format:
    """A type of scales as kernels take it: a small float is a format of its own, without a scale; any other type is itself."""
    if isinstance(kind, DType) and kind.small:
        return Format(kind.name, bits=kind.bits, minifloat=kind, scale=None)
    return kind
