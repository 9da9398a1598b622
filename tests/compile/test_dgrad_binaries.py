"""Kernels of gradients, compiled with no GPU present."""

from __future__ import annotations

import pytest

from w4gen import toolchain
from w4gen.formats import named
from w4gen.ir.problem import Problem
from w4gen.ir.types import dtype
from w4gen.pipeline import compile
from w4gen.schedule.arch import ARCHES
from w4gen.schedule.rules import bucket

QUICK = [("int4_g128", "float16", 512), ("nf4_g64", "bfloat16", 512), ("e2m1_g32", "float16", 16)]
FORMATS = ["int4_g128", "nf4_g64", "uint4_g128_z", "e2m1_g32", "int4_g64_bf16", "int8_g128", "nf4_g64_m", "uint4_g32_m"]
FORMATS += ["q2_k", "q4_k", "mxfp4", "nvfp4", "nf4_dq", "int3_g128"]
EVERY = [(form, kind, m) for form in FORMATS for kind in ("float16", "bfloat16") for m in (16, 512)]
SLOW = [pytest.param(*each, marks=pytest.mark.slow) for each in EVERY if each not in QUICK]


@pytest.mark.parametrize(("form", "kind", "m"), QUICK + SLOW)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_gradients_compile_without_spills(arch: str, form: str, kind: str, m: int) -> None:
    x = dtype(kind)
    problem = Problem(m=bucket(m), n=4096, k=4096, format=named(form), x=x, y=x, gradient=True)
    (binary,) = toolchain.build(compile(problem, ARCHES[arch]), ARCHES[arch]).values()
    assert binary.spills == 0
    assert binary.shared_bytes <= ARCHES[arch].shared_bytes
    instruction = "HGMMA" if arch == "sm_90" and m == 512 else "HMMA"
    assert instruction in binary.text("sass")


def test_words_stay_in_the_lanes_that_loaded_them_and_scales_are_asked_for_ahead() -> None:
    """Matrices are stored as such, and nothing is loaded but by asynchronous copies: what a change of layout would undo."""
    problem = Problem(m=bucket(512), n=4096, k=4096, format=named("int4_g128"), gradient=True)
    (binary,) = toolchain.build(compile(problem, ARCHES["sm_90"]), ARCHES["sm_90"]).values()
    sass = binary.text("sass")
    assert "STSM.16.M88.4" in sass
    assert "LDG.E" not in sass
    assert "tnspB" in sass
