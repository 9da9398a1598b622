"""Kernels on a GPU against the truth in f64, worked out by torch with no help of w4gen."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import cases
import oracle
import pytest
import torch

import w4gen
from w4gen.codegen.render import Kernel
from w4gen.formats import named
from w4gen.ir.problem import Problem
from w4gen.ir.types import F16
from w4gen.pipeline import compile
from w4gen.runtime import launch, ops
from w4gen.runtime.dtypes import OURS
from w4gen.runtime.launch import arch_of
from w4gen.schedule.arch import M16K16
from w4gen.schedule.rules import bucket, fragment_order

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
KINDS = [torch.float16, torch.bfloat16]


@dataclass(frozen=True)
class Case:
    x: torch.Tensor
    layer: w4gen.Linear
    w: torch.Tensor
    bias: torch.Tensor | None

    def error(self, y: torch.Tensor, x: torch.Tensor | None = None) -> float:
        """Relative Frobenius error of y to the truth, or to what that would be if no sum cancelled; NaN where y holds one."""
        x = (self.x if x is None else x).double()
        truth = x @ self.w.T
        truth = truth if self.bias is None else truth + self.bias.double()
        typical = (x**2 @ self.w.T**2).sum().sqrt()
        return float((y.double() - truth).norm() / torch.maximum(truth.norm(), typical))

    def limit(self, m: int = 0, kernel: Kernel | None = None, outputs: int = 0) -> float:
        """The largest error that y may have, with `m` rows (default: all of x) by `kernel` (default: that of the layer)."""
        m, weight = m or self.x.shape[0], self.layer.weight
        if kernel is None:
            x = OURS[self.x.dtype]
            asked = Problem(m=bucket(m), n=weight.n, k=weight.k, format=weight.format, layout=weight.layout, x=x, y=x)
            kernel = compile(replace(asked, bias=self.bias is not None), arch_of(self.x.device))
        return oracle.limit(cases.NAMES[self.x.dtype], outputs or m * weight.n, cases.rounded(kernel), weight.k)


def case(form: str, m: int, n: int, k: int, kind: torch.dtype = torch.float16, bias: bool = False) -> Case:
    """Random codes, scales and zeros; the true weight is worked out in f64."""
    torch.manual_seed(0)
    format = named(form)
    group = k if format.group == -1 else format.group
    codes = torch.randint(0, 2**format.bits, (n, k), device="cuda", dtype=torch.uint8)
    scales = (torch.rand(n, -(-k // group), device="cuda") * 0.02 + 0.005).half()
    values = torch.tensor(oracle.VALUES[format.name], dtype=torch.float64, device="cuda")
    zeros = None if format.zero_mode is None else torch.rand_like(scales) * (values.max() - values.min()).item() + values.min()
    match format.zero_mode:
        case "integer":
            zeros = zeros.round().half()
        case "float":
            zeros = zeros.half()
        case "minimum":
            zeros = (zeros * scales).half()

    def spread(each: torch.Tensor) -> torch.Tensor:
        return each.double().repeat_interleave(group, 1)[:, :k]

    w = values[codes.int()]
    if format.zero_mode in ("integer", "float"):
        w = w - spread(zeros)
    w = w * spread(scales)
    if format.zero_mode == "minimum":
        w = w - spread(zeros)
    x = torch.randn(m, k, device="cuda").to(kind)
    added = torch.randn(n, device="cuda").to(kind) if bias else None
    return Case(x, w4gen.Linear(w4gen.Weight.from_codes(codes, scales, zeros, form), added), w, added)


SHAPES = [(256, 1536), (4096, 4096), (37, 331), (1021, 1000), (1, 4096), (64, 28672)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("m", [1, 2, 7, 16])
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64", "int4_g50"])
@pytest.mark.parametrize(("n", "k"), SHAPES, ids=str)
def test_kernels_give_the_truth(n: int, k: int, form: str, m: int, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("W4GEN_STRICT", "1")  # a kernel, not the fallback
    it = case(form, m, n, k, kind, bias=True)
    assert it.error(it.layer(it.x)) <= it.limit()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("m", [17, 64, 100, 128, 129, 512])
@pytest.mark.parametrize("form", ["int4_g128", "int4_g32", "nf4_g64", "int4_g50"])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (1021, 1000), (37, 2040), (8192, 9216)], ids=str)
def test_more_rows_give_the_truth(n: int, k: int, form: str, m: int, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of these is large enough for the widest tiles of an H200, others end inside a tile in every direction."""
    monkeypatch.setenv("W4GEN_STRICT", "1")
    it = case(form, m, n, k, kind, bias=True)
    assert it.error(it.layer(it.x)) <= it.limit()


@pytest.mark.parametrize("m", [2, 17, 64, 512])
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64"])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (1021, 1000)], ids=str)
def test_a_weight_in_the_order_of_a_matrix_instruction_gives_the_truth(n: int, k: int, form: str, m: int) -> None:
    it, layout = case(form, m, n, k, bias=True), fragment_order(named(form), M16K16, n, k)
    problem = Problem(m=bucket(m), n=n, k=k, format=named(form), layout=layout, x=F16, y=F16, bias=True)
    kernel = compile(problem, arch_of(it.x.device))
    assert kernel.name == "dequant"
    assert it.error(w4gen.bind(kernel)(it.x, it.layer.weight, it.bias)) <= it.limit(kernel=kernel)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize(
    "form", ["uint4_g128_z", "uint4_g32_m", "uint4_g64_zf", "int8_g128", "int8_g64_z", "e2m1_g32", "uint4_g50_m"]
)
@pytest.mark.parametrize(("n", "k"), [(256, 1536), (1021, 1000), (4096, 4096)], ids=str)
def test_other_formats_give_the_truth(
    n: int, k: int, form: str, m: int, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("W4GEN_STRICT", "1")
    it = case(form, m, n, k, kind, bias=True)
    assert it.error(it.layer(it.x)) <= it.limit()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("form", ["uint4_g128_z", "uint4_g50_z"])
@pytest.mark.parametrize("m", [1, 16])
def test_codes_that_are_the_zero_give_exact_zeros(m: int, form: str, kind: torch.dtype) -> None:
    it = case(form, m, 256, 1536, kind)
    codes, scales, zeros = it.layer.weight.unpack()
    codes[0] = zeros.repeat_interleave(named(form).group, 1)[0, :1536].to(torch.uint8)
    y = w4gen.Linear(w4gen.Weight.from_codes(codes, scales, zeros, form))(it.x)
    assert (y[:, 0] == 0).all()
    assert (y[:, 1:] != 0).any()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("m", [1, 16, 64])
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64"])
def test_an_outlier_in_a_long_row_keeps_the_error(form: str, m: int, kind: torch.dtype) -> None:
    it = case(form, m, 256, 28672, kind)
    it.x[0, 12345] = 6e4
    assert it.error(it.layer(it.x)) <= it.limit(outputs=256)  # the row of the outlier outweighs all others


@pytest.mark.parametrize("m", [1, 16, 64, 512])
def test_a_wrong_zero_of_one_group_is_above_the_limit(m: int) -> None:
    """One zero of 49,152, off by 1: the limit is tight on a full shape too."""
    it = case("uint4_g128_z", m, 1536, 4096)
    it.x.abs_()
    codes, scales, zeros = it.layer.weight.unpack()
    assert it.error(it.layer(it.x)) <= it.limit()
    zeros[77, 11] += 1 if zeros[77, 11] < 15 else -1
    assert it.error(w4gen.Linear(w4gen.Weight.from_codes(codes, scales, zeros, "uint4_g128_z"))(it.x)) > it.limit()


@pytest.mark.parametrize("m", [1, 16, 17, 64, 128, 512])
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64"])
def test_what_is_not_finite_stays_in_its_row(form: str, m: int) -> None:
    it = case(form, m, 256, 1536)
    clean = it.layer(it.x)
    it.x[0, 100] = torch.inf
    y = it.layer(it.x)
    assert not y[0].isfinite().any()
    assert torch.equal(y[1:], clean[1:])


@pytest.mark.parametrize("m", [1, 16, 17, 64, 128, 512])
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64"])
def test_forty_calls_are_equal_bit_for_bit_over_poisoned_outputs(form: str, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is what lives between the functions of a kernel: partial sums, the dense weight."""
    plain = launch._workspace
    poisoned = lambda *call: {name: each.fill_(torch.nan) for name, each in plain(*call).items()}  # noqa: E731
    monkeypatch.setattr(launch, "_workspace", poisoned)
    it = case(form, m, 1021, 4096)
    kernel = w4gen.compile(f"{m}x4096x1021", form, arch="sm_90" if torch.cuda.get_device_capability() == (9, 0) else "")
    run = w4gen.bind(kernel)  # y is full of NaN before every launch
    assert len(kernel.pieces) == (2 if kernel.name == "gemm" else 1), "k is shared by programs"
    weight = it.layer.weight
    first = run(it.x, weight)
    assert it.error(first) <= it.limit(kernel=kernel)
    assert all(torch.equal(first, run(it.x, weight)) for _ in range(40))


@pytest.mark.parametrize("m", [1, 16, 64, 512])
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64"])
def test_a_warmed_layer_is_captured_in_a_cuda_graph(form: str, m: int) -> None:
    it = case(form, m, 4096, 4096)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        it.layer(it.x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = it.layer(it.x)
    it.x.copy_(torch.randn_like(it.x))
    y.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert it.error(y) <= it.limit()


@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64"])
def test_a_million_rows_take_a_kernel(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("W4GEN_STRICT", "1")
    it = case(form, 2**20 + 1, 16, 100, bias=True)
    y = it.layer(it.x)
    assert torch.equal(it.layer(it.x), y)
    assert it.error(y) <= it.limit()


def test_the_fallback_answers_float32_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    ops.LAUNCHES.clear()
    it = case("nf4_g64", 40, 256, 1536, torch.float32)
    with caplog.at_level(logging.WARNING, "w4gen"):
        y = it.layer(it.x)
        assert torch.equal(it.layer(it.x), y)
    assert it.error(y) <= oracle.limit("f32", y.numel(), 2, 1536)
    assert len(caplog.records) == 1


GRANULE = 2**20
"""Bytes that PyTorch's allocator may add to a large block."""


@pytest.mark.parametrize("m", [1, 16, 64, 128, 512, 4096])
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64", "uint4_g50_m"])
def test_a_call_needs_no_more_memory_than_one_dequantized_layer(form: str, m: int) -> None:
    """Beyond x and y, and the weights as they are stored; also in a stack of layers, which dequantize one after the other."""
    n = k = 4096
    layers = [w4gen.Linear(w4gen.Weight.from_float(torch.randn(n, k, device="cuda") * 0.02, form)) for _ in range(3)]
    x = torch.randn(m, k, device="cuda", dtype=torch.float16)
    stack = torch.nn.Sequential(*layers)
    with torch.inference_mode():
        stack(x)  # kernels are loaded, and cuBLAS has its workspace
        for run, activations in ((layers[0], 1), (stack, 2)):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            y = run(x)
            peak = torch.cuda.max_memory_allocated() - before - activations * y.nbytes
            del y
            assert peak <= 2 * n * k + (activations + 1) * GRANULE
            assert m <= 128 or peak >= 2 * n * k, "it dequantizes here"


@pytest.mark.parametrize("m", [1, 5, 40, 200])
@pytest.mark.parametrize("shift", [1, 4])
def test_a_misaligned_x_gives_the_same_bits(m: int, shift: int) -> None:
    it = case("int4_g128", m, 256, 1536)
    held = torch.empty(m * 1536 + shift, device="cuda", dtype=torch.float16)
    x = held[shift:].view(m, 1536)
    x.copy_(it.x)
    assert x.data_ptr() % 16
    assert torch.equal(it.layer(x), it.layer(it.x))


@pytest.mark.parametrize("how", ["1-D", "3-D", "transposed", "broadcast", "no rows"])
def test_x_of_any_shape(how: str) -> None:
    it = case("nf4_g64", 4, 256, 1536)
    x = {
        "1-D": it.x[0],
        "3-D": it.x.reshape(2, 2, -1),
        "transposed": it.x.T.contiguous().T,
        "broadcast": it.x[:1].expand(4, -1),
        "no rows": it.x[:0],
    }[how]
    y = it.layer(x)
    assert y.shape == (*x.shape[:-1], 256)
    if x.numel():
        assert it.error(y.reshape(-1, 256), x.reshape(-1, 1536)) <= it.limit(outputs=y.numel())


@pytest.mark.parametrize("m", [1, 3, 40, 200])
def test_a_side_stream_is_used(m: int) -> None:
    it = case("int4_g128", m, 256, 1536)
    expected = it.layer(it.x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = it.layer(it.x)
    stream.synchronize()
    assert torch.equal(y, expected)


def test_a_layer_made_on_a_cpu_moves() -> None:
    it = case("nf4_g64", 2, 256, 1536)
    moved = w4gen.Linear(it.layer.weight.to("cpu")).to("cuda")
    assert torch.equal(moved(it.x), it.layer(it.x))


def test_no_compile_inside_a_warmed_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    it = case("int4_g128", 16, 256, 1536)
    it.layer(it.x[:2])
    monkeypatch.setattr(ops, "compile", None)
    for m in (3, 7, 16):
        assert it.error(it.layer(it.x[:m]), it.x[:m]) <= it.limit(m)


def test_a_sweep_of_m_compiles_once_for_each_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    ops.LAUNCHES.clear()
    it, asked = case("int4_g128", 300, 256, 1536), []
    monkeypatch.setattr(ops, "compile", lambda problem, arch: asked.append(problem.m) or compile(problem, arch))
    for m in range(17, 301):
        assert it.error(it.layer(it.x[:m]), it.x[:m]) <= it.limit(m)
    assert asked == [(17, 32), (33, 64), (65, 128), (129, 2**31 - 1)]


@pytest.mark.parametrize("m", [2, 40, 200])
def test_a_compiled_model_is_one_graph(m: int) -> None:
    it = case("int4_g128", m, 256, 1536)
    compiled = torch.compile(it.layer, fullgraph=True, backend="eager")
    assert torch.equal(compiled(it.x), it.layer(it.x))
