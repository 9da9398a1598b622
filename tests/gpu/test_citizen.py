"""Captures, streams, threads and devices on a GPU."""

from __future__ import annotations

import copy
import io
import threading
from pathlib import Path

import pytest
import torch
from arrays import covered
from torch._dynamo.utils import counters
from truth import KINDS, Case, case

import w4gen
from w4gen import toolchain
from w4gen.errors import ShapeError, W4Error
from w4gen.runtime import ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
ROWS = [1, 8, 64, 512]


def captured(it: Case, stream: torch.cuda.Stream | None = None) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of one call of a layer that was called before, and its y."""
    it.layer(it.x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = it.layer(it.x)
    return graph, y


@pytest.mark.parametrize("m", ROWS)
def test_a_first_call_inside_a_capture_is_refused_and_harms_nothing(m: int) -> None:
    ops.LAUNCHES.clear()
    it, graph = case("int4_g128", m, 256, 1536), torch.cuda.CUDAGraph()
    with pytest.raises(W4Error, match="once before the capture"), torch.cuda.graph(graph):
        it.layer(it.x)
    torch.cuda.synchronize()
    graph, y = captured(it)
    graph.replay()
    assert it.error(y) <= it.limit()


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64"])
def test_a_replay_uses_the_weights_loaded_since(form: str, m: int) -> None:
    it, other = case(form, m, 1024, 1024), None
    graph, y = captured(it)
    torch.manual_seed(7)
    other = w4gen.Linear.from_float(torch.nn.Linear(1024, 1024, bias=False), form)  # canonical, on the CPU
    it.layer.load_state_dict(other.state_dict())
    for _ in range(3):
        y.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, it.layer(it.x))
    assert torch.equal(y, other.cuda()(it.x))


@pytest.mark.parametrize("m", ROWS)
def test_two_graphs_are_replayed_on_two_streams_at_once(m: int) -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    its = [case(form, m, 4096, 4096) for form in ("int4_g128", "nf4_g64")]
    graphs = [captured(it, stream) for it, stream in zip(its, streams)]
    for _ in range(20):
        for (graph, y), stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                y.fill_(torch.nan)
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(y, it.layer(it.x)) for it, (_, y) in zip(its, graphs))


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("m", ROWS)
def test_four_threads_of_four_streams(m: int, warm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it, wrong, compiled, compiles = case("int4_g128", m, 4096, 4096), [], [], toolchain._compile
    expected = it.layer(it.x)
    torch.cuda.synchronize()
    layer = it.layer
    if not warm:
        ops.LAUNCHES.clear()
        monkeypatch.setenv("W4GEN_CACHE", str(tmp_path))  # where nothing is compiled yet
        layer = copy.deepcopy(layer)  # of which no call is prepared
    monkeypatch.setattr(toolchain, "_compile", lambda *given: [compiled.append(given[1].name), compiles(*given)][1])

    def work() -> None:
        for stream in (torch.cuda.Stream() for _ in range(4)):
            with torch.cuda.stream(stream):
                for _ in range(10):
                    y = layer(it.x)
                stream.synchronize()
                wrong.extend([] if torch.equal(y, expected) else [stream])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert warm == (not compiled)
    assert len(set(compiled)) == len(compiled), "threads that miss together compile once"


@two_gpus
@pytest.mark.parametrize("m", ROWS)
def test_tensors_on_another_gpu_than_the_current_one(m: int) -> None:
    it = case("int4_g128", m, 256, 1536)
    expected, layer, x = it.layer(it.x), it.layer.to("cuda:1"), it.x.to("cuda:1")
    assert torch.cuda.current_device() == 0
    y = layer(x)
    assert y.device == torch.device("cuda:1")
    assert torch.equal(y.cpu(), expected.cpu())
    with torch.cuda.device(1), torch.cuda.stream(torch.cuda.Stream()):
        again = layer(x)
        torch.cuda.current_stream().synchronize()
    assert torch.equal(again, y)
    assert all(torch.equal(layer(x), y) for _ in range(3)), "the short way is for the current device"
    assert torch.cuda.current_device() == 0
    asked = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(layer(asked).sum(), asked)
    assert dx.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0


@two_gpus
@pytest.mark.parametrize("m", ROWS)
def test_a_call_on_another_gpu_is_captured_and_replayed_while_the_first_is_current(m: int) -> None:
    it = case("int4_g128", m, 256, 1536)
    layer, x, stream = copy.deepcopy(it.layer).to("cuda:1"), it.x.to("cuda:1"), torch.cuda.Stream("cuda:1")
    expected = layer(x)
    torch.cuda.synchronize("cuda:1")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(1), torch.cuda.graph(graph, stream=stream):
        y = layer(x)
    assert torch.cuda.current_device() == 0
    y.fill_(torch.nan)
    torch.cuda.synchronize("cuda:1")
    with torch.cuda.device(1):
        graph.replay()
    torch.cuda.synchronize("cuda:1")
    assert torch.equal(y, expected)
    assert torch.equal(it.layer(it.x).cpu(), y.cpu())


@two_gpus
def test_tensors_on_two_gpus_are_refused_by_name() -> None:
    it = case("int4_g128", 1, 256, 1536)
    with pytest.raises(ShapeError, match="x is on cuda:1, codes on cuda:0, scale on cuda:0: move all of them to one device"):
        it.layer(it.x.to("cuda:1"))


def test_x_left_on_the_cpu_is_refused_and_harms_nothing() -> None:
    it = case("int4_g128", 1, 256, 1536)
    with pytest.raises(ShapeError, match="x is on cpu, codes on cuda:0, scale on cuda:0"):
        it.layer(it.x.cpu())
    torch.cuda.synchronize()
    assert it.error(it.layer(it.x)) <= it.limit()


def test_a_layer_saved_on_a_gpu_loads_on_a_cpu_and_back() -> None:
    it, file = case("int4_g128", 4, 256, 1536, bias=True), io.BytesIO()
    torch.save(it.layer.state_dict(), file)
    file.seek(0)
    torch.manual_seed(1)
    fresh = w4gen.Linear.from_float(torch.nn.Linear(1536, 256), "int4_g128").half()
    fresh.load_state_dict(torch.load(file, map_location="cpu"))
    assert torch.equal(fresh.cuda()(it.x), it.layer(it.x))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor_compiles_without_a_graph_break(mode: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    it = case("int4_g128", 200, 256, 1536)
    compiled = torch.compile(it.layer, fullgraph=True, dynamic=True, mode=mode)
    with torch.inference_mode():
        for m in (1, 3, 17, 64, 200):
            it.layer(it.x[:m])  # kernels are loaded before any capture
            for _ in range(3):
                torch.compiler.cudagraph_mark_step_begin()
                assert torch.equal(compiled(it.x[:m]), it.layer(it.x[:m]))
    assert counters["stats"]["unique_graphs"] <= 2
    assert not counters["graph_break"]


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("inside", [True, False], ids=["inside first", "outside first"])
def test_the_first_call_may_be_in_inference_mode_or_not(inside: bool, m: int) -> None:
    ops.LAUNCHES.clear()
    it, found = case("int4_g128", m, 256, 1536), []
    for turn in range(4):
        with torch.inference_mode(inside == (turn % 2 == 0)):
            found.append(it.layer(it.x))
    assert all(torch.equal(each, found[0]) for each in found)
    assert it.error(found[0]) <= it.limit()
    x = it.x.clone().requires_grad_()
    it.layer(x).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_autocast_and_vmap_give_the_bits_of_a_plain_call(kind: torch.dtype) -> None:
    it = case("int4_g128", 48, 256, 1536, kind, bias=True)
    expected = it.layer(it.x)
    with torch.autocast("cuda", dtype=kind):
        assert torch.equal(it.layer(it.x.float()), expected)
    assert torch.equal(torch.vmap(it.layer)(it.x.view(6, 8, -1)).view_as(expected), expected)
    tangent = torch.randn_like(it.x)
    _, found = torch.func.jvp(it.layer, (it.x,), (tangent,))
    truth = tangent.double() @ it.w.T
    assert ((found.double() - truth).norm() / truth.norm()).item() <= it.limit()
    dy, asked = torch.randn_like(expected), it.x.clone().requires_grad_()
    (dx,) = torch.func.vjp(it.layer, it.x)[1](dy)
    assert torch.equal(dx, torch.autograd.grad(it.layer(asked), asked, dy)[0])


def test_an_exported_model_runs_for_other_numbers_of_rows() -> None:
    it = case("nf4_g64", 100, 256, 1536)
    exported = torch.export.export(it.layer, (it.x,), dynamic_shapes=({0: torch.export.Dim("m", min=2, max=4096)},)).module()
    for m in (2, 9, 33, 100):
        assert torch.equal(exported(it.x[:m]), it.layer(it.x[:m]))


@pytest.mark.parametrize("buffers", [True, False])
def test_accelerate_offloads_a_layer_from_a_cpu(buffers: bool) -> None:
    """Codes come to the GPU as the CPU has them; calls that follow each other find them at other addresses."""
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    plain = torch.nn.Sequential(*(w4gen.Linear.from_float(torch.nn.Linear(512, 512), "int4_g128") for _ in range(3))).half()
    offloaded, x = copy.deepcopy(plain), torch.randn(8, 512, device="cuda").half()
    accelerate.cpu_offload(offloaded, execution_device=torch.device("cuda"), offload_buffers=buffers)
    expected = plain.cpu().float()(x.cpu().float())
    for _ in range(3):
        torch.testing.assert_close(offloaded(x).cpu().float(), expected, rtol=2e-2, atol=2e-2)
    assert offloaded[0].codes.is_meta == buffers


def test_offsets_past_2_to_the_31() -> None:
    """y has more elements than 32 bits reach, and a grid more than 65,535 programs along m. A few rows are worked out anew."""
    m, n, k, form = 2**22 + 5, 1024, 64, "int4_g64"
    codes = torch.randint(0, 16, (n, k), device="cuda", dtype=torch.uint8)
    scales = torch.full((n, 1), 0.01, device="cuda", dtype=torch.float16)
    x = torch.randn(m, k, device="cuda", dtype=torch.float16)
    layer = w4gen.Linear(w4gen.Weight.from_codes(codes, scales, None, form), batch_invariant=True)
    y, w = layer(x), (codes.double() - 8) * scales.double()
    for at in (slice(0, 64), slice(2**21 - 32, 2**21 + 32), slice(m - 64, m)):
        assert ((y[at].double() - x[at].double() @ w.T).norm() / (x[at].double() @ w.T).norm()).item() < 4e-4


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64", "uint4_g32_m", "int3_g64"])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (1021, 1000), (256, 1536)], ids=str)
def test_a_row_of_a_batch_invariant_layer_does_not_depend_on_the_batch(
    n: int, k: int, form: str, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, across all buckets, at any place, beside any neighbours."""
    monkeypatch.setenv("W4GEN_STRICT", "1")
    torch.manual_seed(0)
    w = w4gen.Weight.from_float(torch.randn(n, k, device="cuda") * 0.02, form)
    layer, x = w4gen.Linear(w, batch_invariant=True), torch.randn(700, k, device="cuda").to(kind)
    whole, order = layer(x), torch.randperm(700, device="cuda")
    for m in (1, 2, 8, 9, 16, 17, 31, 64, 65, 128, 129, 500):
        for at in (0, 3, 700 - m):
            assert torch.equal(layer(x[at : at + m]), whole[at : at + m]), (m, at)
    assert torch.equal(layer(x[order]), whole[order])
    other = torch.where(torch.arange(700, device="cuda")[:, None] % 2 == 0, torch.inf, x)
    assert torch.equal(layer(other)[1::2], whole[1::2])
    truth = x.double() @ w.dequantize(torch.float64).T
    assert ((whole.double() - truth).norm() / truth.norm()).item() < (4e-3 if kind == torch.bfloat16 else 5e-4)


ADDED = {"gelu": True, "relu": False, "silu_mul": False}
"""Of each activation whether there is a residual."""


@pytest.mark.parametrize(
    ("size", "m", "activation", "kind"),
    covered([(4096, 4096), (17920, 1536), (1022, 1000)], [1, 8, 64, 512], ADDED, KINDS, strength=3),
)
def test_an_epilogue_is_what_torch_does_in_f64(
    size: tuple[int, int], m: int, activation: str, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    (n, k), residual = size, ADDED[activation]
    monkeypatch.setenv("W4GEN_STRICT", "1")
    it = case("int4_g128", m, n, k, kind, bias=True)
    added = torch.randn(m, n, device="cuda").to(kind) if residual else None
    it.layer.activation = activation
    y, sums = it.layer(it.x, added), it.x.double() @ it.w.T + it.bias.double()
    silu = torch.nn.functional.silu
    known = {"gelu": torch.nn.functional.gelu, "relu": torch.relu, "silu_mul": lambda a: silu(a[:, ::2]) * a[:, 1::2]}
    truth = known[activation](sums)
    truth = truth if added is None else truth + added.double()
    assert ((y.double() - truth).norm() / truth.norm()).item() <= 1.5 * it.limit()  # above 128 rows weights are rounded too
    assert all(torch.equal(it.layer(it.x, added), y) for _ in range(10))
