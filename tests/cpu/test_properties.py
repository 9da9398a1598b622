"""For anything that can be asked: truth = interpreted program = kernel under Triton's interpreter = fallback."""

from __future__ import annotations

from dataclasses import replace

import cases
import numpy as np
import oracle
import torch
import weights
from hypothesis import given, settings
from hypothesis import strategies as st

import w4gen
from w4gen import Format
from w4gen.formats import named
from w4gen.ir.interpret import interpret
from w4gen.ir.problem import Problem
from w4gen.ir.rounding import roundings
from w4gen.ir.types import BF16, F16, F32
from w4gen.pipeline import compile
from w4gen.runtime import ops
from w4gen.schedule.arch import ARCHES, M16K16
from w4gen.schedule.stored import fragment_order

OWN = [
    *(cases.CUBES, cases.UINT2, cases.UINT8),
    Format("bit", bits=1),
    Format("sign", bits=1, codebook=(-1, 1)),
    Format("halves", bits=2, step=0.5, origin=-1.0),
]
VALUES = {**oracle.VALUES, **cases.OWN, "bit": [0.0, 1.0], "sign": [-1.0, 1.0], "halves": [-1.0, -0.5, 0.0, 0.5]}
NAMED = ("int4", "uint4_z", "uint4_zf", "uint4_m", "int8", "int8_z", "int4_m", "nf4", "nf4_m", "e2m1")
ROWS = [(1, 1), (2, 2), (2, 16), (17, 19), (33, 40), (65, 70), (129, 133)]
"""Buckets, cut short: one row, few in gemv, three sizes of gemm, dequantize and multiply."""


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Any format, group, types of x, scale and zero, ragged sizes, a bias or none, in rows of any kind or fragments."""
    form, kinds = draw(st.sampled_from([*map(named, NAMED), *OWN])), st.sampled_from([F16, BF16, F32])
    form = replace(form, group=draw(st.sampled_from([1, 7, 16, 32, 50, 64, 128, -1])), scale=draw(kinds))
    form = form if form.zero is None else replace(form, zero=draw(kinds))
    n, k, layout = draw(st.integers(1, 40)), draw(st.integers(1, 300)), None
    match draw(st.sampled_from(["ours", "ours", "ours", "rows", "fragments"])):
        case "rows":
            layout = draw(weights.row_layouts(form.bits))
            n, k = layout.size("n"), layout.size("k")
        case "fragments" if form.bits == 4:
            layout = fragment_order(form, M16K16, n, k)
    x = draw(st.sampled_from([F16, BF16]))
    return Problem(m=draw(st.sampled_from(ROWS)), n=n, k=k, format=form, layout=layout, x=x, y=x, bias=draw(st.booleans()))


def torches(case: weights.Case) -> tuple[torch.Tensor, w4gen.Weight, torch.Tensor | None]:
    """x, the weight and the bias of a case."""
    problem, form = case.problem, case.problem.format
    kinds = {"x": problem.x, "scale": form.scale, "zero": form.zero, "bias": problem.y}
    given = {name: torch.from_numpy(each) for name, each in case.data.items() if name != "codebook"}
    given = {name: each.to(cases.TORCH[kinds[name].name]) if name in kinds else each for name, each in given.items()}
    w = w4gen.Weight.from_codes(given["codes"], given["scale"], given.get("zero"), form)
    return given["x"], w, given.get("bias")


def by_kernel(problem: Problem, x: torch.Tensor, w: w4gen.Weight, bias: torch.Tensor | None) -> torch.Tensor:
    return w4gen.bind(compile(problem, ARCHES["sm_80"]))(x, w, bias)


def by_fallback(problem: Problem, x: torch.Tensor, w: w4gen.Weight, bias: torch.Tensor | None) -> torch.Tensor:
    return ops.fallback(x, list(w.buffers), bias, w.n, str(w.format), str(w.layout))


@settings(max_examples=80)
@given(st.data())
def test_every_way_gives_the_truth(data: st.DataObject) -> None:
    problem = data.draw(problems())
    case = data.draw(weights.extremes(problem, VALUES[problem.format.name]))
    program = compile(problem, ARCHES["sm_80"]).program
    given = torches(case)
    assert not case.misses(interpret(program, case.data), roundings(program))
    assert not case.misses(by_kernel(problem, *given).double().numpy(), roundings(program))
    assert not case.misses(by_fallback(problem, *given).double().numpy(), 1)


@settings(max_examples=40)
@given(st.data())
def test_what_is_not_finite_stays_in_its_row_or_column(data: st.DataObject) -> None:
    """A row of x with inf or NaN, and an output whose bias is one: nothing else changes by a bit."""
    problem = replace(data.draw(problems()), bias=True)
    case = weights.case(problem, VALUES[problem.format.name], data.draw(st.integers(0, 99)))
    (x, w, bias), (m, n) = torches(case), case.truth.shape
    row, column, place = (data.draw(st.integers(0, size - 1)) for size in (m, n, problem.k))
    bad_x, bad_bias = (data.draw(st.sampled_from([torch.inf, -torch.inf, torch.nan])) for _ in "xb")
    others = torch.ones(m, n, dtype=torch.bool)
    others[row], others[:, column] = False, False
    for way in (by_kernel, by_fallback):
        clean = way(problem, x, w, bias)
        with_bad_x, with_bad_bias = x.clone(), bias.clone()
        with_bad_x[row, place], with_bad_bias[column] = bad_x, bad_bias
        y = way(problem, with_bad_x, w, with_bad_bias)
        assert clean.isfinite().all()
        assert torch.equal(y[others], clean[others])
        assert not y[row].isfinite().any()
        assert not y[:, column].isfinite().any()


@settings(max_examples=20)
@given(st.data())
def test_a_weight_beyond_the_type_of_x_stays_in_its_column(data: st.DataObject) -> None:
    """Scales so large that 16 bits do not hold the weight: inf or NaN there, and only there, or the truth."""
    problem = data.draw(problems())
    form = replace(problem.format, scale=F32, zero=None if problem.format.zero is None else F32)
    problem = replace(problem, format=form, x=F16, y=F16)
    case = weights.case(problem, VALUES[form.name])
    column = data.draw(st.integers(0, problem.n - 1))
    clean, large = torches(case), case.data["scale"].copy()
    large[column] = 1e6
    huge = torches(replace(case, data=case.data | {"scale": large}))
    others = torch.arange(problem.n) != column
    for way in (by_kernel, by_fallback):
        assert torch.equal(way(problem, *clean)[:, others], way(problem, *huge)[:, others])


def test_the_draws_reach_every_kind() -> None:
    """So that the properties above do not hold for want of examples: every template, unit and place of the scale."""
    seen = set()

    @settings(max_examples=150, database=None)
    @given(problems())
    def collect(problem: Problem) -> None:
        schedule = compile(problem, ARCHES["sm_80"]).schedule
        seen.add((schedule.template, schedule.unit, schedule.scale_at))

    collect()
    ways = (("gemv", "lanes"), ("gemv", "mma"), ("gemm", "mma"))
    assert seen == {(*way, at) for way in ways for at in ("weight", "accumulator")} | {("dequant", "vendor", "weight")}


def test_a_difference_of_one_place_is_seen() -> None:
    """What the properties compare with is sharp: a y that is off by two units of its last place misses."""
    case = weights.case(Problem(m=(1, 1), n=8, k=64, format=named("int4_g32")), VALUES["int4"])
    y = by_kernel(case.problem, *torches(case)).numpy()
    assert not case.misses(y, 1)
    for place in np.ndindex(y.shape):
        wrong = y.copy()
        wrong[place] = np.nextafter(np.nextafter(y[place], np.float16(np.inf)), np.float16(np.inf))
        assert case.misses(wrong, 1) == [place]
