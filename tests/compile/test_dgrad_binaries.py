"""Kernels of gradients, compiled with no GPU present."""

from __future__ import annotations

import re

import pytest
from sass import hazards

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
    problem = Problem(m=bucket(512), n=4096, k=4096, format=named("int8_g128"), gradient=True)
    (binary,) = toolchain.build(compile(problem, ARCHES["sm_90"]), ARCHES["sm_90"]).values()
    sass = binary.text("sass")
    assert "STSM.16.M88.4" in sass
    assert "LDG.E" not in sass
    assert "tnspB" in sass


TURNED = [("int4_g128", "float16", (257, 512)), ("int4", "bfloat16", (257, 512)), ("uint4_g128_z", "bfloat16", (2049, 2**31 - 1))]
TURNED += [("int4_g256", "float16", (2049, 2**31 - 1))]


@pytest.mark.parametrize(("form", "kind", "m"), TURNED, ids=str)
def test_words_are_turned_once_and_never_leave_registers(form: str, kind: str, m: tuple[int, int]) -> None:
    """One transposition for eight codes, before they are decoded; what wgmma reads is not written while it may."""
    x = dtype(kind)
    kernel = compile(Problem(m=m, n=4096, k=4096, format=named(form), x=x, y=x, gradient=True), ARCHES["sm_90"])
    schedule = kernel.schedule
    (binary,) = toolchain.build(kernel, ARCHES["sm_90"]).values()
    lines = binary.text("sass").splitlines()
    assert (kernel.name, binary.spills, hazards(lines)) == ("dgrad_wgmma", 0, [])
    turns = [line for line in lines if "MOVM" in line]
    assert len(turns) == schedule.stages * schedule.teams * schedule.block_n // 16
    assert {found[0] for line in lines if (found := re.search(r"\b(?:STSM|STL|SHFL)\.\S+", line))} == {"STSM.16.MT88.4"}, (
        "only dX goes through shared memory, turned back"
    )
