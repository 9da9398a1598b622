"""Warm-up on a CPU, for an arch: what is compiled is just what calls on that arch will ask for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import w4gen
from w4gen import toolchain
from w4gen.errors import ArchError
from w4gen.ir.problem import Problem
from w4gen.pipeline import compile
from w4gen.runtime.warmup import of_model
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


def test_the_type_of_x_is_that_of_the_model() -> None:
    assert of_model(model()) == torch.float16
    assert of_model(model(torch.bfloat16)) == torch.bfloat16
    assert of_model(w4gen.Linear.from_float(torch.nn.Linear(64, 64, dtype=torch.bfloat16), "int4_g64")) == torch.bfloat16
    assert of_model(model(torch.float32)) == torch.float16


def test_on_a_cpu_an_arch_is_asked_for() -> None:
    with pytest.raises(ArchError, match="the model is on no GPU: move it to one, or name what to compile for"):
        w4gen.warmup(model())
