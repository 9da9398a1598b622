"""Activations and residuals on the store side of rendered kernels, under Triton's interpreter, against the truth."""

from __future__ import annotations

from dataclasses import replace

import activations
import cases
import numpy as np
import oracle
import pytest
import torch

import w4gen
from w4gen.codegen.render import Kernel
from w4gen.ir.problem import EVERY, Problem
from w4gen.pipeline import compile
from w4gen.runtime import check, ops
from w4gen.runtime.dtypes import OURS
from w4gen.schedule.arch import ARCHES
from w4gen.schedule.rules import bucket

WAYS = {
    "one row": (1, 26, 384, "portable"),
    "rows": (5, 26, 384, "sm_80"),
    "fragments": (20, 80, 256, "sm_80"),
    "split k": (20, 80, 1280, "sm_80"),
    "vendor": (140, 26, 384, "portable"),
}
"""M, N, K and an arch for each way that sums are stored: on lanes, by gemv, gemm and its second function, and by the vendor."""
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def asked(case: cases.Call, arch: str, activation: str, residual: bool, **changes: object) -> Kernel:
    (m, k), x = case.x.shape, OURS[case.x.dtype]
    problem = Problem(m=bucket(m), n=case.w.n, k=k, format=case.w.format, x=x, y=x, bias=case.bias is not None)
    return compile(replace(problem, activation=activation, residual=residual, **changes), ARCHES[arch])


def residual_of(case: cases.Call, asked_for: bool) -> torch.Tensor | None:
    torch.manual_seed(3)
    return torch.randn(case.x.shape[0], case.w.n).to(case.x.dtype) if asked_for else None


def wrong(case: cases.Call, y: torch.Tensor, activation: str, residual: torch.Tensor | None) -> float:
    """The error of y to the truth, in units of what its one rounding may come to."""
    truth = activations.activated(case.truth(), activation)
    truth = truth if residual is None else truth + residual.double().numpy()
    return oracle.error(y.double().numpy(), truth) / oracle.limit(cases.NAMES[y.dtype], truth.size, 1, case.w.k)


@pytest.mark.parametrize(
    ("way", "activation", "residual"),
    [
        *((way, activation, activation != activations.PAIRED) for way in ("one row",) for activation in activations.ALL),
        *((way, *each) for way in WAYS for each in (("gelu", False), (activations.PAIRED, False), ("", True))),
    ],
)
def test_what_is_done_to_sums_is_done_before_they_are_rounded(way: str, activation: str, residual: bool) -> None:
    m, n, k, arch = WAYS[way]
    case = cases.call("int4_g128", m, n, k, bias=True)
    kernel, added = asked(case, arch, activation, residual), residual_of(case, residual)
    assert ("add_parts" in kernel.source) == (way == "split k")
    y = w4gen.bind(kernel)(case.x, case.w, case.bias, added)
    assert wrong(case, y, activation, added) <= (1 if way != "vendor" else 1.5)  # there the weight is rounded too


@pytest.mark.parametrize("way", ["fragments", "split k"])
def test_another_activation_and_pairs_turned_round_are_above_the_limit(way: str) -> None:
    m, n, k, arch = WAYS[way]
    case = cases.call("int4_g128", m, n, k, bias=True)
    y = w4gen.bind(asked(case, arch, "gelu", False))(case.x, case.w, case.bias)
    assert wrong(case, y, "silu", None) > 10
    y = w4gen.bind(asked(case, arch, activations.PAIRED, False))(case.x, case.w, case.bias)
    turned = activations.activated(case.truth().reshape(m, -1, 2)[..., ::-1].reshape(m, n), activations.PAIRED)
    assert oracle.error(y.double().numpy(), turned) > 10 * oracle.limit("f16", turned.size)


def test_bf16_and_every_m_take_an_epilogue_too() -> None:
    case = cases.call("nf4_g64", 20, 80, 256, torch.bfloat16, bias=True)
    kernel, added = asked(case, "sm_80", "silu", True, m=EVERY), residual_of(case, True)
    y = w4gen.bind(kernel)(case.x, case.w, case.bias, added)
    assert wrong(case, y, "silu", added) <= 1.5  # the values of nf4 are rounded to bf16


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_nan_and_inf_pass_through_as_they_do_in_torch(activation: str) -> None:
    case = cases.call("int4_g128", 1, 16, 128)
    case.x[0, 5] = torch.nan
    y = w4gen.bind(asked(case, "portable", activation, False))(case.x, case.w)
    assert y.isnan().all()


@pytest.mark.parametrize(("activation", "residual"), [("gelu", True), (activations.PAIRED, False)])
@pytest.mark.parametrize("way", ["split k", "vendor"])
def test_a_rendered_file_checks_its_epilogue(way: str, activation: str, residual: bool) -> None:
    m, n, k, arch = WAYS[way]
    kernel = asked(cases.call("int4_g128", m, n, k), arch, activation, residual)
    report = check.check(kernel)
    assert report.passed, report
    assert report.of == (n // 2 if activation == activations.PAIRED else n)


@pytest.mark.parametrize("way", ["one row", "split k"])
def test_a_layer_calls_the_fused_kernel(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    m, n, k, arch = WAYS[way]
    monkeypatch.setenv("W4GEN_ARCH", arch)
    monkeypatch.setenv("W4GEN_STRICT", "1")
    monkeypatch.setattr(ops, "LAUNCHES", {})
    case = cases.call("int4_g128", m, n, k, bias=True)
    added = residual_of(case, True)
    y = w4gen.Linear(case.w, case.bias, activation="silu")(case.x, added)
    assert wrong(case, y, "silu", added) <= 1
    assert [key[-2:] for key in ops.LAUNCHES] == [("silu", True)]
    y = w4gen.Linear(case.w, case.bias, activation=activations.PAIRED)(case.x)
    assert np.shape(y) == (m, n // 2)
    assert wrong(case, y, activations.PAIRED, None) <= 1
