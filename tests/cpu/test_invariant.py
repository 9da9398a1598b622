"""Batch-invariant kernels: the bits of a row of y depend on that row of x alone."""

from __future__ import annotations

from dataclasses import replace

import cases
import pytest
import torch

import w4gen
from w4gen import pipeline
from w4gen.errors import ShapeError
from w4gen.formats import named
from w4gen.ir.lower import lower
from w4gen.ir.problem import EVERY, Problem
from w4gen.pipeline import compile
from w4gen.runtime import ops
from w4gen.schedule.arch import ARCHES
from w4gen.schedule.rules import pick
from w4gen.toolchain import able

BATCHES = [(0, 1), (5, 6), (3, 5), (0, 16), (7, 24), (0, 40), (8, 41), (40, 41)]
"""Rows from … to, of 41: every bucket up to 64, at places that are and are not those of a tile."""
LAYERS = [
    ("int4_g128", 64, 256, "gemm"),
    ("nf4_g64", 64, 256, "gemm"),
    ("uint4_g32_m", 26, 200, "gemv"),
    ("int3_g64", 26, 200, "gemv"),
]


@pytest.fixture(autouse=True)
def sm_80(monkeypatch: pytest.MonkeyPatch) -> None:
    """An arch with matrix instructions; a kernel must answer; nothing is remembered of other archs."""
    monkeypatch.setenv("W4GEN_ARCH", "sm_80")
    monkeypatch.setenv("W4GEN_STRICT", "1")
    monkeypatch.setattr(ops, "LAUNCHES", {})


def layer_of(form: str, n: int, k: int) -> tuple[w4gen.Linear, torch.Tensor]:
    """A layer whose rows do not depend on M, and 41 rows of x."""
    w = w4gen.Weight.from_float(torch.randn(n, k, generator=torch.Generator().manual_seed(0)), form)
    x = torch.randn(41, k, generator=torch.Generator().manual_seed(1)).half()
    return w4gen.Linear(w, torch.ones(n).half(), batch_invariant=True), x


@pytest.mark.parametrize(("form", "n", "k", "template"), LAYERS)
def test_a_row_does_not_depend_on_how_many_there_are_or_where_it_is(form: str, n: int, k: int, template: str) -> None:
    layer, x = layer_of(form, n, k)
    kernel = compile(Problem(m=EVERY, n=n, k=k, format=named(form)), ARCHES["sm_80"])
    assert (kernel.name, kernel.problem.far) == (template, True)
    whole = layer(x)
    for low, high in BATCHES:
        assert torch.equal(layer(x[low:high]), whole[low:high])
    order = torch.randperm(41, generator=torch.Generator().manual_seed(2))
    assert torch.equal(layer(x[order]), whole[order])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("form", "n", "k", "template"), LAYERS[::2])
def test_a_row_does_not_depend_on_its_neighbours(form: str, n: int, k: int, template: str) -> None:
    layer, x = layer_of(form, n, k)
    other = x.clone()
    other[::2] = torch.tensor([torch.inf, 6e4, 0.0]).half().repeat(7)[:, None]
    assert torch.equal(layer(other)[1::2], layer(x)[1::2])


def test_buckets_have_bits_of_their_own_without_it() -> None:
    """What is tested above is not so of itself."""
    layer, x = layer_of("int4_g128", 64, 1024)
    layer.batch_invariant = False
    assert not torch.equal(layer(x.repeat(4, 1))[:41], layer(x))


@pytest.mark.parametrize(("form", "n", "k"), [("int4_g128", 64, 256), ("uint4_g32_m", 26, 200), ("nf4_g64", 40, 200)])
@pytest.mark.parametrize("m", [1, 3, 70])
def test_the_kernel_of_every_m_gives_the_truth(form: str, n: int, k: int, m: int) -> None:
    case = cases.call(form, m, n, k, bias=True)
    kernel = compile(Problem(m=EVERY, n=n, k=k, format=case.w.format, bias=True), ARCHES["sm_80"])
    assert case.error(w4gen.bind(kernel)(case.x, case.w, case.bias)) <= case.limit(kernel)


def test_partial_sums_past_32_bits_of_offsets_are_added_up() -> None:
    case = cases.call("int4_g128", 20, 80, 1280, bias=True)
    program = lower(Problem(m=(1, 2**25), n=80, k=1280, format=case.w.format, bias=True))
    schedule = replace(pick(lower(replace(program.problem, m=(17, 32))), able(ARCHES["sm_80"])), split_k=2)
    kernel = pipeline.made(program, schedule, ARCHES["sm_80"])
    assert kernel.source.count("to(tl.int64)") == 4
    assert case.error(w4gen.bind(kernel)(case.x, case.w, case.bias)) <= case.limit(kernel)


@pytest.mark.parametrize("arch", ["portable", "sm_75", "gfx942"])
def test_an_arch_without_matrix_instructions_multiplies_row_by_row(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("W4GEN_ARCH", arch)
    layer, x = layer_of("int4_g128", 64, 256)
    with pytest.raises(ShapeError, match=r"no kernel for every M \(batch-invariant\) .* one by one; unset W4GEN_STRICT"):
        layer(x)
    monkeypatch.setenv("W4GEN_STRICT", "0")
    whole = layer(x)
    for low, high in BATCHES:
        assert torch.equal(layer(x[low:high]), whole[low:high])
