"""Warm-up on a CPU, for an arch: what is compiled is just what calls on that arch will ask for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import w4gen
from w4gen import toolchain
from w4gen.errors import ArchError
from w4gen.ir.problem import Problem
from w4gen.ir.types import F16
from w4gen.pipeline import compile
from w4gen.runtime import ops
from w4gen.runtime.linear import Linear
from w4gen.runtime.shared import shared
from w4gen.runtime.warmup import of_model, problems
from w4gen.schedule.arch import ARCHES
from w4gen.schedule.rules import bucket
from w4gen.schedule.stored import layout_for


def model(dtype: torch.dtype = torch.float16) -> torch.nn.Module:
    """Three layers of two kinds, one of them with a bias."""
    layers = [torch.nn.Linear(128, 64, bias=bias, dtype=dtype) for bias in (True, False, False)]
    made = torch.nn.Sequential(torch.nn.LayerNorm(128, dtype=dtype), *layers)
    w4gen.convert(made, "int4_g128", progress=False)
    return made


def test_every_kernel_is_compiled_once_and_is_the_one_that_calls_ask_for(fresh_cache: Path) -> None:
    made = model()
    first = w4gen.warmup(made, ms=(1, 2, 5, 8), arch="sm_90", progress=False)
    assert (first.compiled, first.found, first.refused) == (4, 0, ())
    assert str(first).startswith("4 kernels compiled, 0 found, in ")
    again = w4gen.warmup(made, ms=(1, 8), arch="sm_90", progress=False)
    assert (again.compiled, again.found) == (0, 4)
    arch, form = ARCHES["sm_90"], made[1].format
    layout = layout_for(form, arch, 64, 128)
    for bias in (True, False):
        for m in (1, 7):
            kernel = compile(Problem(m=bucket(m), n=64, k=128, format=form, layout=layout, bias=bias), arch)
            assert all(binary.cached for binary in toolchain.build(kernel, arch).values()), (bias, m)


def test_kernels_of_gradients_are_compiled_when_asked_for(fresh_cache: Path) -> None:
    made = model()
    assert w4gen.warmup(made, ms=(300,), arch="sm_90", gradients=True, progress=False).refused == ()
    arch, form = ARCHES["sm_90"], made[1].format
    sizes = {"m": bucket(300), "n": 64, "k": 128, "format": form, "layout": layout_for(form, arch, 64, 128)}
    assert all(binary.cached for binary in toolchain.build(compile(Problem(gradient=True, **sizes), arch), arch).values())


def cold(layer: Linear, m: int, residual: bool, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a call with m rows would have to compile on sm_90."""
    arch = ARCHES["sm_90"]
    monkeypatch.setattr(ops, "arch_of", lambda device: arch)
    monkeypatch.setattr(ops, "launcher", lambda kernel, device: kernel)
    x, n = torch.empty(m, layer.in_features, dtype=torch.float16), layer.out_features
    layout = str(layout_for(layer.format, arch, n, layer.in_features))
    how = str(layer.format), layout, layer.bias, layer.batch_invariant, layer.activation, residual or None
    return not toolchain.built(ops._launch(ops.question(x, n, *how), x.device), arch)


def test_a_batch_invariant_layer_needs_the_kernel_of_every_m(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = w4gen.Linear.from_float(torch.nn.Linear(128, 64, dtype=torch.float16), "int4_g128")
    layer.batch_invariant = True
    warmed = w4gen.warmup(layer, ms=(1, 16), arch="sm_90", progress=False)
    assert (warmed.compiled, warmed.refused) == (1, ())
    assert not any(cold(layer, m, False, monkeypatch) for m in (1, 16, 300))
    layer.batch_invariant = False
    assert all(cold(layer, m, False, monkeypatch) for m in (1, 16, 300))


def test_calls_with_a_residual_are_warmed_when_asked_for(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    made[1].activation = "silu"
    w4gen.warmup(made, ms=(1,), arch="sm_90", residuals=True, progress=False)
    assert not any(cold(layer, 1, residual, monkeypatch) for layer in made[1:] for residual in (False, True))
    assert all(cold(layer, 2, True, monkeypatch) for layer in made[1:])


def test_layers_that_are_launched_together_take_a_residual_alone() -> None:
    layers = tuple(w4gen.Linear.from_float(torch.nn.Linear(128, 64, dtype=torch.float16), "int4_g128") for _ in range(2))
    first, second = shared(layers)
    found = [list(problems(each, 1, F16, ARCHES["sm_90"], False, True)) for each in (first, second)]
    assert [[(each.n, each.residual) for each in asked] for asked in found] == 2 * [[(128, False), (64, True)]]


def test_an_activation_comes_after_the_op_where_gradients_are_asked_for() -> None:
    layer = w4gen.Linear.from_float(torch.nn.Linear(128, 64, dtype=torch.float16), "int4_g128")
    layer.activation = "gelu"
    asked = [(each.gradient, each.activation) for each in problems(layer, 1, F16, ARCHES["sm_90"], True, False)]
    assert asked == [(False, "gelu"), (False, ""), (True, "")]


def test_the_type_of_x_is_that_of_the_model() -> None:
    assert of_model(model()) == torch.float16
    assert of_model(model(torch.bfloat16)) == torch.bfloat16
    assert of_model(w4gen.Linear.from_float(torch.nn.Linear(64, 64, dtype=torch.bfloat16), "int4_g64")) == torch.bfloat16
    assert of_model(model(torch.float32)) == torch.float16


def test_on_a_cpu_an_arch_is_asked_for() -> None:
    with pytest.raises(ArchError, match="the model is on no GPU: move it to one, or name what to compile for"):
        w4gen.warmup(model())


def test_one_m_may_be_a_number_and_a_model_without_our_layers_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert w4gen.warmup(torch.nn.Linear(8, 8), 1, arch="sm_90").compiled == 0
    assert "no layer of the model is w4gen's" in caplog.text
