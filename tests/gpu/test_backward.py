"""Gradients on a GPU: the truth, 40 equal launches, memory, captures, and what has no kernel."""

from __future__ import annotations

import oracle
import pytest
import torch
from arrays import covered
from truth import KINDS, case

from w4gen.bench.backward import asked, extra_bytes
from w4gen.runtime import ops
from w4gen.runtime.dtypes import OURS
from w4gen.runtime.launch import launcher

HERE = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="needs a CUDA GPU")]
FORMATS = ["int4_g128", "nf4_g64", "e2m1_g32", "uint4_g128_z", "uint4_g32_m", "int8_g128", "int4_g50"]
SHAPES = [(512, 4096, 4096), (1, 256, 1536), (130, 1000, 300), (77, 144, 4096), (4096, 1024, 1024), (300, 1016, 1020)]


def checked(form: str, m: int, n: int, k: int, kind: torch.dtype, changes: str = "") -> None:
    it = case(form, 1, n, k, kind)
    w, dy = it.layer.weight, torch.randn(m, n, device="cuda").to(kind)
    launch = launcher(asked(w, m, kind, changes), dy.device)

    def run() -> torch.Tensor:
        dx = torch.full((m, k), torch.nan, dtype=kind, device="cuda")
        launch(dx, dy, *w.buffers, None, m)
        return dx

    first = run()
    assert sum(not torch.equal(run(), first) for _ in range(40)) == 0
    wide, truth = dy.double(), dy.double() @ it.w
    typical = (wide**2 @ it.w**2).sum().sqrt()
    error = float((first.double() - truth).norm() / torch.maximum(truth.norm(), typical))
    assert error <= oracle.limit(OURS[kind].name, m * k, 2, n)


@pytest.mark.parametrize(("shape", "form", "kind"), covered(SHAPES, FORMATS, KINDS))
def test_gradients_are_true_and_the_same_every_time(shape: tuple[int, int, int], form: str, kind: torch.dtype) -> None:
    checked(form, *shape, kind)


@pytest.mark.parametrize("changes", ["stages=2", "warps=4", "block_n=32", "block_n=128,stages=2", "block_m=64,warps=4"])
def test_other_tiles_are_as_true(changes: str) -> None:
    checked("int8_g128", 512, 2048, 2048, torch.float16, changes)


@pytest.mark.skipif(HERE and torch.cuda.get_device_capability() != (9, 0), reason="wgmma is of sm_90")
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("changes", ["block_m=64,ring=6,stages=2", "block_m=128,ring=4,stages=2", "block_m=256,ring=3,stages=1"])
def test_other_tiles_of_turned_words_are_as_true(changes: str, kind: torch.dtype) -> None:
    w = case("int4", 1, 1016, 1020, kind).layer.weight
    assert asked(w, 300, kind, "").name == "dgrad_wgmma"
    checked("int4", 300, 1016, 1020, kind, changes)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64", "uint4_g50_m"])
def test_backward_takes_a_twentieth_of_the_dequantized_weight_at_most(form: str, kind: torch.dtype) -> None:
    it = case(form, 512, 4096, 4096, kind)
    w, dy = it.layer.weight, torch.randn(512, 4096, device="cuda").to(kind)
    call = lambda: torch.ops.w4gen.linear_dx(dy, list(w.buffers), w.k, str(w.format), str(w.layout), ops.VERSION)  # noqa: E731
    call()
    assert extra_bytes(call) <= 0.05 * 4096 * 4096 * 2


def test_float32_goes_slab_by_slab() -> None:
    it = case("int4_g128", 64, 4096, 4096, torch.float32)
    x = it.x.clone().requires_grad_()
    dy = torch.randn(64, 4096, device="cuda")
    y = it.layer(x)
    torch.autograd.grad(y, x, dy, retain_graph=True)  # cuBLAS has its workspace
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert extra_bytes(lambda: torch.autograd.grad(y, x, dy, retain_graph=True)[0]) <= 0.05 * 4096 * 4096 * 4
    (dx,) = torch.autograd.grad(y, x, dy)
    truth = dy.double() @ it.w
    assert float((dx.double() - truth).norm() / truth.norm()) <= oracle.limit("f32", dx.numel(), 2, 4096)


def test_a_training_step_is_captured() -> None:
    """Forward and backward in one CUDA graph, once both have run."""
    it = case("int4_g128", 512, 1024, 1024)
    x = it.x.clone().requires_grad_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.autograd.grad(it.layer(x).sum(), x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (dx,) = torch.autograd.grad(it.layer(x).square().sum(), x)
    graph.replay()
    torch.cuda.synchronize()
    (eager,) = torch.autograd.grad(it.layer(x).square().sum(), x)
    assert torch.equal(dx, eager)


def test_a_compiled_layer_has_the_same_gradient() -> None:
    it = case("nf4_g64", 512, 1024, 1024)
    found = []
    for call in (it.layer, torch.compile(it.layer, fullgraph=True)):
        x = it.x.clone().requires_grad_()
        call(x).square().sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)
