"""Activations as `triton.language`, in f32, so that NaN stays NaN; Gluon has the same names."""

from __future__ import annotations

from math import pi, sqrt

from w4gen.errors import TemplateError


def text(kind: str, value: str) -> str:
    """An activation of the variable `value`, as an expression."""
    match kind:
        case "relu":
            return f"tl.where({value} < 0.0, 0.0, {value})"
        case "gelu":
            return f"0.5 * {value} * (1.0 + tl.erf({value} * {sqrt(0.5)!r}))"
        case "gelu_tanh":
            return f"{value} / (1.0 + tl.exp({-2 * sqrt(2 / pi)!r} * ({value} + 0.044715 * {value} * {value} * {value})))"
        case "silu":
            return f"{value} / (1.0 + tl.exp(-{value}))"
        case _:
            raise TemplateError(f"activation {kind} has no text of its own: add it to codegen/epilogue.py")
