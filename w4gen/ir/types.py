"""Element types: machine types (`DType`, of `ir.dtype`) and low-bit formats (`Format`)."""

from __future__ import annotations

import ast
import math
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
    "dtype",
    "minifloat",
)  # fmt: skip

ZERO_MODES = {
    "integer": "integer", "quantized": "integer",
    "float": "float", "original": "float",
    "minimum": "minimum", "rescale": "minimum",
}  # fmt: skip
"""How a zero enters, and BitBLAS's names for it.

integer: (q - z) * s, z being one of the values (GPTQ, AWQ) · float: (q - z) * s, any z (HQQ) · minimum: q * s - z (GGUF's Q4_1,
which stores -z).
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
    `group` runs along K (the last may be partial); -1 is one scale for the whole row. `zero` is the type of a tensor of zeros,
    one per group, `zero_mode` how it enters. `str(f)` holds every field, and `Format.parse(str(f)) == f`: a stored weight
    describes itself. `label` is the short name for people, `int4_g128`.
    """

    name: str
    bits: int = 4
    step: float = 1.0
    origin: float = 0.0
    codebook: tuple[float, ...] | str | None = None
    group: int = 128
    scale: DType = F16
    zero: DType | None = None
    zero_mode: str | None = None
    minifloat: DType | None = None

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

    def _check_types(self) -> None:
        """The types of scale and zero, and the mode of the zero, which is made one of the three names."""
        for field, kind in (("scale", self.scale), ("zero", self.zero or F16)):
            if not isinstance(kind, DType) or kind.kind != "float":
                raise FormatError(f"{self.name}: {field}={kind} is not a float type: use f16, bf16 or f32")
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
    def suffixes(self) -> list[str]:
        """What `label` adds to the name: the group, the mode of the zero, the type of the scale."""
        mode = [suffix for suffix, mode in ZERO_SUFFIXES.items() if mode == self.zero_mode]
        return ["row" if self.group == -1 else f"g{self.group}", *mode, *([] if self.scale == F16 else [self.scale.name])]

    @property
    def label(self) -> str:
        return "_".join([self.name, *self.suffixes])

    def group_in(self, k: int) -> int:
        """Weights under one scale in a row of length k."""
        return k if self.group == -1 else self.group

    def groups(self, k: int) -> int:
        """Scales in a row of length k; the last group may be partial."""
        return -(-k // self.group_in(k))

    def with_suffixes(self, suffixes: list[str]) -> Format:
        """This format with the group, zero and scale type that `['g64', 'z', 'bf16']` names; zeros are of the scale's type."""
        changes: dict[str, Any] = {}
        for suffix in suffixes:
            if suffix == "row":
                changes["group"] = -1
            elif suffix[:1] == "g" and suffix[1:].lstrip("-").isdigit():
                changes["group"] = int(suffix[1:])
                if changes["group"] <= 0:
                    raise FormatError(f"{self.name}_{suffix}: the group must be positive: use _g64, or _row for the whole row")
            elif suffix in DTYPES:
                changes["scale"] = DTYPES[suffix]
            elif suffix in ZERO_SUFFIXES:
                changes["zero_mode"] = ZERO_SUFFIXES[suffix]
            else:
                raise FormatError(f"{self.name}: unknown suffix _{suffix}: use _g64, _row, _z, _zf, _m, _f16, _bf16 or _f32")
        if changes.get("zero_mode", self.zero_mode):
            changes["zero"] = changes.get("scale", self.scale)
        return replace(self, **changes)

    def __str__(self) -> str:
        parts = []
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value is not None:
                parts.append(f"{field.name}={str(list(value)).replace(' ', '') if isinstance(value, tuple) else value}")
        return f"{self.name}({','.join(parts)})"

    @classmethod
    def parse(cls, text: str) -> Format:
        """The format that `str()` wrote. Raises `FormatError` on anything else."""
        try:
            call = ast.parse(text, mode="eval").body
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
                raise ValueError("it is not of the form name(field=value,...)")
            words: dict[str, Any] = DTYPES | {word: word for word in (*ZERO_MODES, PER_TENSOR)}
            known: dict[str, Any] = {}
            for keyword in call.keywords:
                value = keyword.value.id if isinstance(keyword.value, ast.Name) else ast.literal_eval(keyword.value)
                if isinstance(keyword.value, ast.Name):
                    value = minifloat(value) if keyword.arg == "minifloat" else words[value]
                known[str(keyword.arg)] = tuple(value) if isinstance(value, list) else value
            return cls(call.func.id, **known)
        except (SyntaxError, ValueError, KeyError, TypeError) as error:
            raise FormatError(f"cannot read the format {text!r}: {error}; write it with str(format)") from error
