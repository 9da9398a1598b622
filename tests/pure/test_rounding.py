"""What a program rounds, and the limit of every check: no wider than theory says, and tight enough to see a fault."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import oracle
import pytest
import weights

from w4gen import Format
from w4gen.formats import named
from w4gen.ir.interpret import interpret
from w4gen.ir.lower import lower
from w4gen.ir.problem import Problem
from w4gen.ir.program import Program
from w4gen.ir.rounding import limit, roundings
from w4gen.ir.types import BF16, F16, DType
from w4gen.schedule.apply import apply
from w4gen.schedule.arch import ARCHES, SM_80
from w4gen.schedule.rules import bucket, pick

PLAIN = replace(SM_80, features=SM_80.features - {"gluon"})
"""Several rows go through gemm there, which scales sums where a group holds its 64 k."""
CUBES = Format("cubes", bits=4, codebook=tuple((code - 8.0) ** 3 for code in range(16)), group=64)


def scheduled(form: str | Format, m: int, x: DType = F16, n: int = 64, k: int = 512) -> Program:
    program = lower(Problem(m=bucket(m), n=n, k=k, format=named(form), x=x, y=x))
    arch = ARCHES["portable"] if m == 1 else PLAIN
    return apply(program, pick(program, arch), arch)


@pytest.mark.parametrize("x", [F16, BF16], ids=str)
@pytest.mark.parametrize(
    ("form", "m", "expected"),
    [
        ("int4_g128", 1, 1),
        ("int4_g50", 1, 1),
        ("nf4_g64", 1, 1),
        ("uint4_g64_zf", 1, 1),
        ("int4_g128", 16, 1),
        ("int8_g128", 16, 1),
        ("int4_g128", 64, 1),
        ("e2m1_g64", 16, 1),
        ("e2m1_g32", 16, 2),
        ("uint4_g128_z", 16, 1),
        ("int8_g64_z", 16, 1),
        ("uint4_g64_m", 16, 1),
        ("uint4_g32_m", 16, 2),
        ("int4_g50", 16, 2),
        ("nf4_g64", 16, 2),
        ("uint4_g64_zf", 16, 2),
        ("int4_g128", 512, 2),
        ("e2m1_g32", 512, 2),
    ],
)
def test_a_rounding_is_y_or_a_weight_that_sixteen_bits_do_not_hold(form: str, m: int, expected: int, x: DType) -> None:
    assert roundings(scheduled(form, m, x)) == expected


@pytest.mark.parametrize(("x", "expected"), [(F16, 1), (BF16, 2)], ids=str)
def test_a_codebook_is_exact_where_the_type_holds_its_entries(x: DType, expected: int) -> None:
    assert roundings(scheduled(CUBES, 16, x)) == expected


@pytest.mark.parametrize("outputs", [1, 2, 24, 64, 200, 1000, 10**6])
@pytest.mark.parametrize("x", [F16, BF16], ids=str)
@pytest.mark.parametrize(("m", "count"), [(1, 1), (512, 2)])
def test_the_limit_is_the_oracles(m: int, count: int, x: DType, outputs: int) -> None:
    found = limit(scheduled("int4_g128", m, x), outputs)
    assert found == pytest.approx(oracle.limit(x.name, outputs, count, 512), rel=1e-4)


@pytest.mark.parametrize(("x", "at_most"), [(F16, 3e-4), (BF16, 2.4e-3)], ids=str)
def test_a_full_shape_that_rounds_y_alone_keeps_the_strict_limit(x: DType, at_most: float) -> None:
    assert limit(scheduled("int4_g128", 1, x), 200) <= at_most


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("outputs", [1, 4, 32, 128, 4096])
def test_one_rounding_is_within_the_limit_and_not_far_from_it(outputs: int, kind: str, rng: np.random.Generator) -> None:
    """10,000 times, for normal outputs of any size; where mantissas are all 1, the root mean square comes to the limit."""
    y = rng.standard_normal((10_000, outputs)) * 2.0 ** rng.uniform(0, 1, (10_000, 1))
    off = weights.ROUND[kind](y).astype(np.float64) - y
    errors = np.sqrt((off**2).sum(1) / (y**2).sum(1))
    assert (errors <= oracle.limit(kind, outputs)).mean() >= 0.9999
    assert np.median(errors) >= 0.25 * oracle.limit(kind, outputs)
    ones = 1 + rng.uniform(0, 2.0**-4, 100_000)
    worst = oracle.error(weights.ROUND[kind](ones), ones)
    assert 0.9 * oracle.limit(kind, 10**6) <= worst <= oracle.limit(kind, 10**6)


FAULTS = {
    "a zero of one group": lambda data: {"zero": _changed(data["zero"], (5, 1), 1)},
    "a code": lambda data: {"codes": _changed(data["codes"], (5, 100), 1 if data["codes"][5, 100] < 15 else -1)},
    "a scale, by its last bit but three": lambda data: {"scale": data["scale"] * np.float16(1 + 2.0**-7)},
    "two inputs swapped": lambda data: {"x": data["x"][:, [1, 0, *range(2, data["x"].shape[1])]]},
}


def _changed(array: np.ndarray, place: tuple[int, int], by: int) -> np.ndarray:
    made = array.copy()
    made[place] += array.dtype.type(by) if by > 0 else array.dtype.type(0) - array.dtype.type(-by)
    return made


@pytest.mark.parametrize(
    ("fault", "m", "x"),
    [*((fault, m, F16) for fault in FAULTS for m in (1, 5, 130)), *(("a zero of one group", m, BF16) for m in (5, 130))],
    ids=str,
)
def test_a_fault_is_above_the_limit(fault: str, m: int, x: DType) -> None:
    """Of 64 outputs from 512 inputs; weights are rounded for 130 rows."""
    problem = replace(scheduled("uint4_g128_z", m, x).problem, m=(m, m))
    case, program = weights.case(problem, oracle.UINT4), lower(problem)
    program = apply(program, pick(program, PLAIN), PLAIN)
    assert case.error(interpret(program, case.data)) <= case.limit(roundings(program))
    wrong = interpret(program, case.data | FAULTS[fault](case.data))
    assert case.error(wrong) > case.limit(roundings(program))
