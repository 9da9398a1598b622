"""Gradients on a CPU: slab by slab, as PyTorch's own machinery checks and uses them; and problems of gradients as values."""

from __future__ import annotations

import cases
import numpy as np
import oracle
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import w4gen
from w4gen.errors import ScheduleError, ShapeError
from w4gen.formats import named
from w4gen.ir.interpret import interpret
from w4gen.ir.lower import lower
from w4gen.ir.problem import Problem
from w4gen.pipeline import made
from w4gen.runtime import weight
from w4gen.schedule.apply import apply
from w4gen.schedule.arch import ARCHES
from w4gen.schedule.rules import pick
from w4gen.schedule.schedule import Schedule
from w4gen.schedule.stored import layout_for

FORMATS = ["int4_g128", "nf4_row", "uint4_g50_m", *cases.SPLIT, cases.UINT2]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs of few rows, so that small weights have many, the last of them partial."""
    monkeypatch.setattr(weight, "LEAST", 1)


@pytest.mark.parametrize("arch", ["sm_80", "portable"])
@pytest.mark.parametrize("form", FORMATS, ids=cases.ids)
def test_slabs_are_the_rows_of_the_weight(form: str | w4gen.Format, arch: str, small: None) -> None:
    case = cases.call(form, 1, 331, 300)
    w = case.w.packed_as(layout_for(case.w.format, ARCHES[arch], 331, 300))
    slabs = list(weight.slabs(w.buffers, w.format, w.layout, w.n, w.k))
    assert len(slabs) > 1
    assert np.allclose(torch.cat(slabs).double().numpy(), case.true_w, rtol=2**-22, atol=1e-9)


@pytest.mark.parametrize("name", oracle.TREES)
def test_slabs_of_trees_of_scales(name: str, small: None) -> None:
    form, n, k = named(name), 37, 512
    parts = oracle.random_parts(np.random.default_rng(3), oracle.TREES[name], n, k)
    kinds = {each: str(kind) for each, (kind, _) in form.parts(n, k).items()}
    tensors = {each: torch.from_numpy(array) for each, array in parts.items()}
    w = w4gen.Weight.from_parts({each: t.bfloat16() if kinds[each] == "bf16" else t for each, t in tensors.items()}, form)
    found = torch.cat(list(weight.slabs(w.buffers, form, w.layout, n, k))).double().numpy()
    assert oracle.error(found, oracle.weight(parts, oracle.TREES[name])) <= 2**-22


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64", "uint4_g50_m"])
def test_the_gradient_is_dy_times_the_weight(form: str, kind: torch.dtype, small: None) -> None:
    case = cases.call(form, 5, 300, 200, kind)
    x, dy = case.x.clone().requires_grad_(), torch.randn(5, 300).to(kind)
    w4gen.linear(x, case.w).backward(dy)
    rows = dy.double().numpy()
    limit = oracle.limit(cases.NAMES[kind], 5 * 200, 1, 300)
    assert x.grad.dtype == kind
    assert oracle.error(x.grad.double().numpy(), rows @ case.true_w, oracle.typical(rows, case.true_w.T)) <= limit


@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64", "uint4_g128_z"])
def test_numeric_gradients_agree(form: str) -> None:
    """The layer is linear, so a large step is exact up to the rounding of f32."""
    case = cases.call(form, 2, 6, 140, torch.float32)
    bias = torch.randn(6, requires_grad=True)
    call = (lambda x, bias: w4gen.linear(x, case.w, bias)), (case.x.requires_grad_(), bias)
    with pytest.warns(UserWarning, match="double precision"):
        assert torch.autograd.gradcheck(*call, eps=0.5, atol=1e-4, rtol=1e-4, nondet_tol=0.0)
    with pytest.warns(UserWarning, match="double precision"):
        assert torch.autograd.gradgradcheck(*call, eps=0.5, atol=1e-4, rtol=1e-4)


def test_checkpointing_gives_the_same_gradients() -> None:
    """What is computed twice is the same twice: a block of converted layers, with and without its activations kept."""
    torch.manual_seed(0)
    block = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.GELU(), torch.nn.Linear(64, 128), torch.nn.LayerNorm(128))
    w4gen.convert(block, "int4_g64")
    own = [each for each in block.parameters() if each.is_floating_point()]
    for each in own:
        each.requires_grad_()
    found = []
    for call in (lambda x: block(x), lambda x: checkpoint(block, x, use_reentrant=False)):
        x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1)).requires_grad_()
        block.zero_grad()
        call(x).square().sum().backward()
        found.append([x.grad, *(each.grad.clone() for each in own)])
    assert len(own) == 2
    assert all(torch.equal(*pair) for pair in zip(*found))


def gradient(m: int = 512, **options: object) -> Problem:
    return Problem(m=(m, m), n=256, k=256, format=named("int4_g128"), gradient=True, **options)


def test_a_problem_of_a_gradient_can_be_written_and_read() -> None:
    problem = gradient()
    assert Problem.parse(str(problem)) == problem
    assert (problem.inputs, problem.outputs, problem.over) == (256, 256, "n")
    with pytest.raises(ShapeError, match=r"gradient=1 with bias=1 .*leave them out"):
        gradient(bias=True)


@pytest.mark.parametrize("arch", ["sm_80", "portable"])
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64", "uint4_g32_m", "uint4_g128_z", "e2m1_g32"])
def test_a_schedule_keeps_the_meaning_of_a_gradient(form: str, arch: str) -> None:
    case = cases.call(form, 1, 37, 130)
    problem = Problem(m=(5, 5), n=37, k=130, format=named(form), gradient=True)
    program = lower(problem)
    names = {"codes": case.codes, "scale": case.scales, "zero": case.zeros, "x": torch.randn(5, 37).half()}
    data = {name: each.numpy() for name, each in names.items() if each is not None}
    if named(form).codebook is not None:
        data["codebook"] = np.array(oracle.VALUES[named(form).name], np.float32)
    scheduled = apply(program, pick(program, ARCHES[arch]), ARCHES[arch])
    truth = data["x"].astype(np.float64) @ case.true_w
    for each, roundings in ((program, 1), (scheduled, 2)):
        assert oracle.error(interpret(each, data).astype(np.float64), truth) <= oracle.limit("f16", 650, roundings, 37)


def test_a_gradient_refuses_what_its_sums_cannot_have() -> None:
    program = lower(gradient())
    with pytest.raises(ScheduleError, match="a gradient sums over rows of scaled weights: take unit=mma"):
        made(program, Schedule(template="gemm", unit="mma", side="left", block_m=16, block_n=64), ARCHES["sm_90"])
    with pytest.raises(ScheduleError, match="no kernel for gradients on sm_75"):
        pick(program, ARCHES["sm_75"])
