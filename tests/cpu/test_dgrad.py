"""The generated kernel of dX = dY W under the interpreter, against the oracle's weight in f64."""

from __future__ import annotations

from dataclasses import replace

import cases
import numpy as np
import oracle
import pytest
import torch

import w4gen
from w4gen import Format
from w4gen.formats import named
from w4gen.ir.lower import lower
from w4gen.ir.problem import Problem
from w4gen.pipeline import compile, made
from w4gen.runtime import ops
from w4gen.runtime.dtypes import OURS
from w4gen.runtime.launch import bind
from w4gen.schedule.arch import ARCHES
from w4gen.schedule.rules import bucket, pick
from w4gen.schedule.stored import layout_for

F16, BF16 = torch.float16, torch.bfloat16
FORMATS = ["int4_g128", "nf4_g64", "e2m1_g32", "uint4_g128_z", "uint4_g64_zf", "uint4_g32_m", "int4_g50", "nf4_row", "int8_g128"]
OWN = [cases.UINT2, cases.SIGNS, *cases.SPLIT, *cases.FLOATS]


def problem_of(case: cases.Call, arch: str) -> Problem:
    form, kind = case.w.format, OURS[case.x.dtype]
    layout = layout_for(form, ARCHES[arch], case.w.n, case.w.k)
    sizes = {"m": bucket(case.x.shape[0]), "n": case.w.n, "k": case.w.k}
    return Problem(**sizes, format=form, layout=layout, x=kind, y=kind, gradient=True)


def dy_of(case: cases.Call, m: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).standard_normal((m, case.w.n))).to(case.x.dtype)


def truth(case: cases.Call, dy: torch.Tensor) -> np.ndarray:
    return dy.double().numpy() @ case.true_w


def error(case: cases.Call, dx: torch.Tensor, dy: torch.Tensor) -> float:
    typical = oracle.typical(dy.double().numpy(), case.true_w.T)
    return oracle.error(dx.double().numpy(), truth(case, dy), typical)


def limit(case: cases.Call, dy: torch.Tensor) -> float:
    """Two roundings: of the scaled weight and of dX."""
    return oracle.limit(cases.NAMES[dy.dtype], dy.shape[0] * case.w.k, 2, case.w.n)


@pytest.mark.parametrize("kind", [F16, BF16], ids=["f16", "bf16"])
@pytest.mark.parametrize("arch", ["sm_90", "portable"])
@pytest.mark.parametrize("form", FORMATS)
def test_formats_in_either_order(form: str, arch: str, kind: torch.dtype) -> None:
    """Codes in the order of fragments, and in rows; 384 outputs are whole blocks."""
    case = cases.call(form, 5, 96, 384, kind)
    dy = dy_of(case, 5)
    kernel = compile(problem_of(case, arch), ARCHES[arch])
    assert kernel.name == "dgrad"
    assert error(case, bind(kernel)(dy, case.w), dy) <= limit(case, dy)


@pytest.mark.parametrize("form", OWN, ids=cases.ids)
def test_formats_of_your_own(form: Format) -> None:
    case = cases.call(form, 3, 64, 256, BF16)
    dy = dy_of(case, 3)
    kernel = compile(problem_of(case, "sm_90"), ARCHES["sm_90"])
    assert error(case, bind(kernel)(dy, case.w), dy) <= limit(case, dy)


@pytest.mark.parametrize("arch", ["sm_90", "portable"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (130, 100, 300), (33, 37, 130), (17, 129, 65), (257, 16, 64)])
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64"])
def test_ragged_sizes(form: str, m: int, n: int, k: int, arch: str) -> None:
    """No size divides its block; nothing around the outputs is written."""
    case = cases.call(form, 1, n, k)
    dy = dy_of(case, m)
    kernel = compile(replace(problem_of(case, arch), m=bucket(m)), ARCHES[arch])
    dx = bind(kernel)(dy, case.w)
    assert dx.shape == (m, k)
    assert error(case, dx, dy) <= limit(case, dy)


def test_a_block_of_several_groups_scales_each_weight() -> None:
    """block_k=128 over groups of 32: the tile is not under one scale, and the text must not take it to be."""
    case = cases.call("int4_g32", 3, 64, 256)
    dy, program = dy_of(case, 3), lower(problem_of(case, "sm_90"))
    kernel = made(program, replace(pick(program, ARCHES["sm_90"]), block_k=128), ARCHES["sm_90"])
    assert "scale.at" not in kernel.program.graph
    assert error(case, bind(kernel)(dy, case.w), dy) <= limit(case, dy)


@pytest.mark.parametrize("kind", [F16, BF16], ids=["f16", "bf16"])
def test_backward_runs_the_kernel(kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through autograd, with dY expanded from one number, from the very buffers of the forward pass."""

    def refuse(*_: object) -> None:
        raise AssertionError("the fallback answered")

    monkeypatch.setattr(ops, "dx_of_slabs", refuse)
    monkeypatch.setenv("W4GEN_ARCH", "sm_90")
    ops.LAUNCHES.clear()
    case = cases.call("uint4_g128_z", 3, 64, 256, kind, bias=True)
    layer = w4gen.Linear(case.w, case.bias)
    layer.bias.requires_grad_()
    x = case.x.clone().requires_grad_()
    y = layer(x[None])
    y.sum().backward()
    ones = torch.ones(3, 64, dtype=kind)
    assert x.grad.dtype == kind
    assert error(case, x.grad, ones) <= limit(case, ones)
    assert torch.equal(layer.bias.grad, torch.full_like(layer.bias, 3.0))
    assert {key[7] for key in ops.LAUNCHES} == {False, True}


def test_the_weight_is_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient asks for dX and nothing else: no workspace, no dequantized weight."""
    monkeypatch.setattr(ops, "dequantize", None)
    case = cases.call("int4_g128", 2, 32, 128)
    dy = dy_of(case, 2)
    kernel = compile(problem_of(case, "sm_90"), ARCHES["sm_90"])
    assert [piece.name for piece in kernel.pieces] == ["dgrad"]
    assert set(kernel.pieces[0].arguments) == {"y_ptr", "x_ptr", "codes_ptr", "scale_ptr", "m_count"}
    assert error(case, bind(kernel)(dy, case.w), dy) <= limit(case, dy)


@pytest.mark.parametrize("name", oracle.TREES)
def test_trees_of_scales(name: str) -> None:
    """Scales that are codes, of scales of their own, and groups that run over rows."""
    form, rng, n, k, m = named(name), np.random.default_rng(3), 21, 384, 5
    parts = oracle.random_parts(rng, oracle.TREES[name], n, k)
    kinds = {each: str(kind) for each, (kind, _) in form.parts(n, k).items()}
    tensors = {each: torch.from_numpy(array) for each, array in parts.items()}
    tensors = {each: t.bfloat16() if kinds[each] == "bf16" else t for each, t in tensors.items()}
    dy, w = torch.from_numpy(rng.standard_normal((m, n))).half(), oracle.weight(parts, oracle.TREES[name])
    layout = layout_for(form, ARCHES["sm_80"], n, k)
    kernel = compile(Problem(m=bucket(m), n=n, k=k, format=form, layout=layout, gradient=True), ARCHES["sm_80"])
    dx, rows = bind(kernel)(dy, w4gen.Weight.from_parts(tensors, form)), dy.double().numpy()
    assert oracle.error(dx.double().numpy(), rows @ w, oracle.typical(rows, w.T)) <= 2.01 * oracle.HALF_UNIT["f16"]
