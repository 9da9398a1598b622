"""What a program rounds on the way to y, and how far from the truth that may take it: the limit of every check.

A rounding to nearest is off by at most half a unit in the last place, evenly spread: relative to a value with mantissa 1 at most
`unit` = 2**-(fraction bits + 1), in the root mean square unit / sqrt(3). That is 2.82e-4 in f16 and 2.26e-3 in bf16; over all
mantissas it averages 0.74 of that. Roundings of different values do not know of each other, so their squares add.
"""

from __future__ import annotations

from math import hypot, log, sqrt

import numpy as np

from w4gen.ir.interpret import round_to
from w4gen.ir.program import Program
from w4gen.ir.tile import Convert, Dot
from w4gen.ir.types import PER_TENSOR, DType

AVERAGE = sqrt(3 / (8 * log(2)))
"""Root mean square of 1 / mantissa, for mantissas that are as even as those of products are (their logarithm is uniform)."""

DEVIATIONS = 5
"""Standard deviations that an error worked out from few outputs may lie above its expectation."""


def roundings(program: Program) -> int:
    """How often a value is rounded to 16 bits between the codes and y: y itself, and each conversion that is not exact."""
    return 1 + sum(not exact(program, name) for name in program.of(Convert))


def exact(program: Program, name: str) -> bool:
    """Whether a conversion keeps every value that it can be given, or keeps f32."""
    element = program.tile(name).element
    if not isinstance(element, DType) or element.bits == 32:
        return True
    values = held(program, name)
    return values is not None and bool((round_to(element, values) == values).all())


def held(program: Program, name: str) -> np.ndarray | None:
    """Every value f64[…] that a node on the path of the weight can hold, before it is rounded; None where it may be any."""
    form, roles = program.problem.format, program.operands(name)
    if "codes" in roles:
        return None if form.codebook == PER_TENSOR else np.array([value for value in form.values if np.isfinite(value)])
    if "scale" in roles or ("zero" in roles and form.zero_mode != "integer") or not {"value", "zero"} & set(roles):
        return None
    below = held(program, program.source(name))
    return below if below is None or "zero" not in roles else np.unique(below[:, None] - np.array(form.values))


HALVES = 6e-4
"""The limit of sums that are halves for eight products, and f32 beyond: each of these additions rounds to 11 bits."""


def limit_of_few(y: DType, outputs: int) -> float:
    """What the rounding of y alone may come to where nothing averages it."""
    return 1.5 * 2.0 ** -(y.mantissa + 1) if outputs < 1000 else 0.0


STEEP = {"": 1.0, "silu_mul": 1.45}
"""How much larger, relative to y, an error of the sums is after an activation than before, in the root mean square.

For normal sums a of deviation s that is rms(f') * s / rms(f): over all s at most 1.034 for silu, 1.037 for gelu (at s = 1.33 and
0.77), 1 for relu. In silu(a) * b errors of both count: sqrt(1.034**2 + 1).
"""


def limit(program: Program, outputs: int) -> float:
    """The relative Frobenius error to the truth that `outputs` elements of y may have, if sums are f32 and roundings as stated.

    Squares of n errors, weighted by the squares of n normal outputs, have a mean that varies by sqrt(2.4 / n) of itself (0.8 for
    an even error, times 3 for the weights), and its root by half of that: few outputs may lie above the average. But y alone is
    never off by more than a unit. Sums of k terms are rounded k times in f32, each partial sum being smaller than y.
    """
    problem = program.problem
    if any(op.unit == "halves" for op in map(program.op, program.of(Dot)) if isinstance(op, Dot)):
        return max(HALVES, limit_of_few(problem.y, outputs))
    unit, count, steep = 2.0 ** -(problem.y.mantissa + 1), roundings(program), STEEP.get(problem.activation, 1.04)
    share = max(1.0, AVERAGE * (1 + DEVIATIONS * sqrt(0.6 / outputs))) / sqrt(3)
    sums = 2.0 ** -(problem.accumulate.mantissa + 1) * sqrt(problem.inputs / 3)
    return hypot(unit * min(1.0, share), steep * unit * share * sqrt(count - 1), steep * sums)
