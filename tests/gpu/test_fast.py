"""The fast templates, and gemm beside them, on a GPU: every bucket's edges, hard x, early launches, repeats bit for bit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import ahead
import numpy as np
import oracle
import pytest
import torch
from truth import Case, case, name_of

import w4gen
from w4gen.api import problem_of
from w4gen.codegen.render import Kernel
from w4gen.formats import named
from w4gen.ir.lower import lower
from w4gen.pipeline import compile, made, twin
from w4gen.runtime import launch
from w4gen.runtime.launch import arch_of
from w4gen.schedule.rules import BUCKETS

HERE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="needs a CUDA GPU from sm_80 on")]
F16, BF16 = torch.float16, torch.bfloat16
FORMATS = ["int4_g128", "int4_g64", "int8_g128", "nf4_g64", "uint4_g128_z"]
EDGES = [1, 2, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512, 513, 1025]
ROWS = {"gemv_half": 1, "gemv_mma": 8, "gemm": 64, "gemm_wgmma": 200}
"""Rows of x with which each template answers for int4_g128."""


EDGED = [(form, 1021, 1000, kind) for form in FORMATS for kind in (F16, BF16)]
EDGED += [("int4_g128", 1024, 4096, F16), ("int4_g128", 253, 1532, F16), ("nf4_g64", 253, 1532, BF16)]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """The kernels that the longest tests ask for, compiled side by side."""
    arch = arch_of(torch.device("cuda")).name
    edged = [(form, m, n, k, kind, True) for form, n, k, kind in EDGED for m, _ in BUCKETS[:-1]]
    ahead.compile_all([(form, m, n, k, name_of(kind), bias, arch) for form, m, n, k, kind, bias in edged + shapes(100)])


def kernel_of(form: str, m: int, n: int, k: int, kind: torch.dtype = F16, bias: bool = False) -> Kernel:
    problem = problem_of(m=m, n=n, k=k, format=form, dtype_name=name_of(kind), bias=bias)
    return compile(problem, arch_of(torch.device("cuda")))


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel answers, not the fallback."""
    monkeypatch.setenv("W4GEN_STRICT", "1")


def check_rows(it: Case, m: int) -> None:
    """The first rows are multiplied right, and forty times more to the same bits."""
    x = it.x[:m].contiguous()
    first = it.layer(x)
    error, most = it.error(first, x), it.limit(m)
    assert error <= most, f"M={m}: {error:.2e} > {most:.0e}"
    assert all(torch.equal(it.layer(x), first) for _ in range(40))


@pytest.mark.parametrize(("form", "n", "k", "kind"), EDGED, ids=str)
def test_every_edge_of_the_buckets_gives_the_truth(form: str, n: int, k: int, kind: torch.dtype) -> None:
    """Whole, ragged in n and k, and with rows of x that are no whole pieces of 16 bytes."""
    it = case(form, max(EDGES), n, k, kind, bias=True)
    for m in EDGES:
        x = it.x[:m].contiguous()
        error, most = it.error(it.layer(x), x), it.limit(m)
        assert error <= most, f"M={m}: {error:.2e} > {most:.0e}"


@pytest.mark.parametrize(
    ("form", "m", "name"), [("int4_g128", 1, "gemv_half"), ("int4_g128", 16, "gemv_mma"), ("int4_g128", 64, "gemm")]
)
def test_a_long_k_keeps_the_error(form: str, m: int, name: str) -> None:
    it = case(form, m, 1024, 28672)
    assert kernel_of(form, m, 1024, 28672).name == name
    assert it.error(it.layer(it.x)) <= it.limit()


TEAMED = [("int4_g128", 8192, 28672), ("int4_g128", 8448, 4224), ("int4_g64", 8192, 4136), ("uint4_g128_z", 4224, 14336)]
TEAMED += [("int4_g32", 8448, 2048), ("e2m1_g64", 16384, 4096), ("nf4_g64", 8448, 2048), ("iq4_nl", 16384, 1024)]


@pytest.mark.skipif(HERE and torch.cuda.get_device_capability() != (9, 0), reason="the rules have teams on sm_90")
@pytest.mark.parametrize("kind", [F16, BF16], ids=["f16", "bf16"])
@pytest.mark.parametrize(("form", "n", "k"), TEAMED, ids=str)
def test_teams_that_share_the_rows_of_x_give_the_truth(form: str, n: int, k: int, kind: torch.dtype) -> None:
    """In a loop, with a last step that not every warp has, and with rows of x that no team copies."""
    it = case(form, 32, n, k, kind)
    assert kernel_of(form, 16, n, k, kind).schedule.teams > 1
    for m in (9, 13, 16, 17, 32):
        check_rows(it, m)


SMALL = ["mxfp4_g32_e8m0", "mxfp8_g32_e8m0", "int4_g32_e8m0", "nvfp4", "fp8_e4m3_tensor", "fp8_e5m2_row"]


LOOPED = [("mxfp4_g32_e8m0", 16, 2**16 + 64), ("nvfp4", 16, 2**16), ("mxfp8_g32_e8m0", 16, 2**15 + 64)]
"""Layers so long that steps are repeated by a loop; some have no last one for every warp."""
SIZES = [*itertools.product(SMALL, (1024,), (1536,)), *itertools.product(SMALL, (272,), (4096,))]
SIZES += [*itertools.product(SMALL, (61,), (1000,)), *LOOPED]


@pytest.mark.parametrize("kind", [F16, BF16], ids=["f16", "bf16"])
@pytest.mark.parametrize(("name", "n", "k"), SIZES, ids=str)
def test_small_floats_and_scales_that_are_codes_give_the_truth(name: str, n: int, k: int, kind: torch.dtype) -> None:
    form, rng = named(name), np.random.default_rng(5)
    parts = oracle.random_parts(rng, oracle.TREES[name], n, k)
    w = torch.from_numpy(oracle.weight(parts, oracle.TREES[name])).cuda()
    stored = w4gen.Weight.from_parts({each: torch.from_numpy(array).cuda() for each, array in parts.items()}, form)
    it = Case(torch.randn(64, k, device="cuda").to(kind), w4gen.Linear(stored), w, None)
    for m in (1, 2, 8, 9, 16, 32, 64):
        check_rows(it, m)


MANY = [(form, kind) for form in ("int4_g128", "int4_g64", "int4_g32", "uint4_g128_z", "int2_g128") for kind in (F16, BF16)]
MANY += [("int8_g128", F16)]


@pytest.mark.skipif(HERE and torch.cuda.get_device_capability() != (9, 0), reason="wgmma is of sm_90")
@pytest.mark.parametrize(("n", "k"), [(1024, 2048), (509, 1528), (8192, 2048)], ids=str)
@pytest.mark.parametrize(("form", "kind"), MANY, ids=str)
def test_many_rows_give_the_truth_and_the_same_bits(form: str, n: int, k: int, kind: torch.dtype) -> None:
    """Whole tiles and partial ones, tiles that programs share, scales of x's type and of more bits."""
    it = case(form, 512, n, k, kind, bias=True)
    for m in (65, 100, 128, 129, 200, 256, 300, 512):
        assert kernel_of(form, m, n, k, kind, bias=True).name == "gemm_wgmma"
        check_rows(it, m)


@pytest.mark.skipif(HERE and torch.cuda.get_device_capability() != (9, 0), reason="wgmma is of sm_90")
@pytest.mark.parametrize(("n", "k", "teams"), [(8191, 8192, 2), (8192, 28672, 4)], ids=str)
@pytest.mark.parametrize(("form", "kind"), [("int4_g128", BF16), ("int4_g32", F16), ("uint4_g128_z", F16)], ids=str)
def test_fewer_rows_of_large_layers_give_the_truth_and_the_same_bits(
    form: str, n: int, k: int, teams: int, kind: torch.dtype
) -> None:
    """Tiles of 32 and 64 rows, two programs on an SM, four teams that share k: the ring comes round many times."""
    it = case(form, 64, n, k, kind, bias=True)
    for m in (17, 32, 33, 64):
        schedule = kernel_of(form, m, n, k, kind, bias=True).schedule
        assert (schedule.template, schedule.teams) == ("gemm_wgmma", teams)
        check_rows(it, m)


FEWEST = [("int4_g128", F16), ("int4_g128", BF16), ("int8_g128", F16), ("int2_g128", BF16)]


@pytest.mark.skipif(HERE and torch.cuda.get_device_capability() != (9, 0), reason="wgmma is of sm_90")
@pytest.mark.parametrize(("n", "k", "counts"), [(8191, 8192, (17, 32)), (1021, 128, (33, 64, 65, 200))], ids=str)
@pytest.mark.parametrize(("form", "kind"), FEWEST, ids=str)
def test_the_fewest_rows_and_steps_give_the_truth_and_the_same_bits(
    form: str, n: int, k: int, counts: tuple[int, ...], kind: torch.dtype
) -> None:
    """Tiles of as many rows as a copy brings; a layer of one step, which no slot of the ring has twice."""
    it = case(form, max(counts), n, k, kind, bias=True)
    for m in counts:
        assert kernel_of(form, m, n, k, kind, bias=True).name == "gemm_wgmma"
        check_rows(it, m)


@pytest.mark.skipif(HERE and torch.cuda.get_device_capability() != (9, 0), reason="wgmma is of sm_90")
@pytest.mark.parametrize("kind", [F16, BF16], ids=str)
@pytest.mark.parametrize("form", ["int4_g128", "int4_g32", "uint4_g128_z"])
def test_four_teams_give_the_truth_and_the_same_bits(form: str, kind: torch.dtype) -> None:
    it = case(form, 128, 17917, 504, kind, bias=True)
    for m in (65, 100, 128):
        assert kernel_of(form, m, 17917, 504, kind, bias=True).schedule.teams == 4
        check_rows(it, m)


def heavy(k: int) -> torch.Tensor:
    """x [1, K] of a normal body with outliers up to ±6e4 in one place of a hundred."""
    x = torch.randn(1, k, device="cuda")
    outliers = torch.rand(1, k, device="cuda") < 0.01
    return torch.where(outliers, (torch.rand(1, k, device="cuda") * 2 - 1) * 6e4, x).half()


def alike(k: int) -> torch.Tensor:
    """x [1, K], all ±65504."""
    return (torch.randint(0, 2, (1, k), device="cuda") * 2 - 1).half() * 65504


HARD: dict[str, Callable[[int], torch.Tensor]] = {
    "heavy tails": heavy,
    "tiny": lambda k: torch.randn(1, k, device="cuda").half() * 1e-6,
    "all ±65504": alike,
    "one outlier": lambda k: torch.cat([torch.full((1, 1), 6e4, device="cuda"), torch.randn(1, k - 1, device="cuda")], 1).half(),
    "zeros": lambda k: torch.zeros(1, k, device="cuda").half(),
}


@pytest.mark.parametrize("what", HARD)
@pytest.mark.parametrize(("n", "k"), [(1024, 1536), (1024, 8192), (9216, 4096)], ids=str)
@pytest.mark.parametrize("form", ["int4_g128", "uint4_g128"])
def test_halves_are_right_for_every_finite_x(form: str, n: int, k: int, what: str) -> None:
    """Where the true y is finite: scales are made small enough for it."""
    it = case(form, 1, n, k)
    codes, scales, _ = it.layer.weight.unpack()
    small = (scales.float() * 2.0**-7).half()
    x = HARD[what](k)
    assert kernel_of(form, 1, n, k).name == "gemv_half"
    values = torch.tensor(oracle.VALUES[named(form).name], dtype=torch.float64, device="cuda")
    w = values[codes.int()] * small.double().repeat_interleave(128, 1)
    truth = x.double() @ w.T
    kept = truth.abs() < 65000
    assert kept.any()
    y = w4gen.Linear(w4gen.Weight.from_codes(codes, small, None, form))(x)
    assert y[kept].isfinite().all()
    if what == "zeros":
        assert (y == 0).all()
    elif what == "tiny":  # y itself is subnormal: its unit is 2**-24
        assert ((y.double() - truth).abs() <= 2.0**-24 + 6e-4 * truth.abs()).all()
    else:
        assert float((y.double() - truth)[kept].norm() / truth[kept].norm()) <= 6e-4


def test_aligned_signs_at_the_limit_of_x_do_not_overflow() -> None:
    """Every product of a chain of the same sign, the largest that there can be; the scale makes y finite."""
    n, k = 256, 4096
    codes = torch.zeros(n, k, device="cuda", dtype=torch.uint8)  # -8
    scales = torch.full((n, k // 128), 2.0**-16, device="cuda").half()
    layer = w4gen.Linear(w4gen.Weight.from_codes(codes, scales, None, "int4_g128"))
    y = layer(torch.full((1, k), 65504.0, device="cuda").half())
    truth = -8 * 65504.0 * k * 2.0**-16
    assert y.isfinite().all()
    assert float((y.double() - truth).abs().max()) <= 6e-4 * abs(truth)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 700, 1535])
@pytest.mark.parametrize("name", ROWS)
def test_what_is_not_finite_reaches_every_output_of_its_row(name: str, place: int, bad: float) -> None:
    m = ROWS[name]
    it = case("int4_g128", m, 1024, 1536)
    codes, scales, _ = it.layer.weight.unpack()
    codes[codes == 8] = 9  # no weight is zero, so that infinities give infinities
    layer = w4gen.Linear(w4gen.Weight.from_codes(codes, scales, None, "int4_g128"))
    clean = layer(it.x)
    it.x[m - 1, place] = bad
    y = layer(it.x)
    assert not y[m - 1].isfinite().any()
    assert torch.equal(y[: m - 1], clean[: m - 1])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_forty_launches_back_to_back_are_equal_bit_for_bit(name: str, bias: bool) -> None:
    """Three x in turn, each into outputs full of NaN; no launch waits for the host."""
    m, n, k = ROWS[name], 1024, 4096
    it = case("int4_g128", m, n, k, bias=bias)
    kernel = kernel_of("int4_g128", m, n, k, bias=bias)
    assert kernel.name == name
    run, weight = launch.launcher(kernel, it.x.device), it.layer.weight
    xs = [torch.randn_like(it.x) for _ in range(3)]
    ys = [torch.full((m, n), torch.nan, device="cuda", dtype=F16) for _ in range(40)]
    for turn, y in enumerate(ys):
        run(y, xs[turn % 3], *weight.buffers, it.bias, m)
    torch.cuda.synchronize()
    for turn, y in enumerate(ys):
        assert torch.equal(y, ys[turn % 3]), turn
    assert all(it.error(ys[turn], xs[turn]) <= it.limit(m) for turn in range(3))


@pytest.mark.parametrize("name", ROWS)
def test_forty_launches_in_one_graph_are_equal_bit_for_bit(name: str) -> None:
    m, n, k = ROWS[name], 1024, 4096
    it = case("int4_g128", m, n, k)
    run, weight = launch.launcher(kernel_of("int4_g128", m, n, k), it.x.device), it.layer.weight
    xs = [torch.randn_like(it.x) for _ in range(3)]
    ys = [torch.full((m, n), torch.nan, device="cuda", dtype=F16) for _ in range(40)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run(ys[0], xs[0], *weight.buffers, None, m)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn, y in enumerate(ys):
            run(y, xs[turn % 3], *weight.buffers, None, m)
    for _ in range(3):
        for x in xs:
            x.copy_(torch.randn_like(x))
        for y in ys:
            y.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(y, ys[turn % 3]) for turn, y in enumerate(ys))
        assert all(it.error(ys[turn], xs[turn]) <= it.limit(m) for turn in range(3))


@pytest.mark.parametrize("name", ROWS)
def test_layers_that_feed_each_other_wait_for_x(name: str) -> None:
    """With early launches each reads its weights before the one in front ends, but never its x."""
    m, k = ROWS[name], 2048
    layers = [case("int4_g128", m, k, k).layer for _ in range(4)]
    x = torch.randn(m, k, device="cuda").half()

    def through(wait: bool) -> torch.Tensor:
        y = x
        for layer in layers:
            y = layer(y) * 0.03125
            if wait:
                torch.cuda.synchronize()
        return y

    expected = through(wait=True)
    assert expected.isfinite().all()
    assert all(torch.equal(through(wait=False), expected) for _ in range(40))


@pytest.mark.parametrize("name", ROWS)
def test_the_first_call_after_a_write_uses_the_new_weights(name: str) -> None:
    """The write is a kernel on the same stream, right in front; both weights were called before, so launches overlap."""
    m, n, k = ROWS[name], 8192, 8192
    one, other = case("int4_g128", m, n, k), case("int4_g128", m, n, k)
    codes, scales, _ = other.layer.weight.unpack()
    flipped = w4gen.Linear(w4gen.Weight.from_codes(15 - codes, scales, None, "int4_g128"))
    x, layer = one.x, one.layer
    kept = [layer.weight.codes.clone(), flipped.weight.codes.clone()]
    expected = []
    for codes in kept:
        layer.weight.codes.copy_(codes)
        torch.cuda.synchronize()
        layer(x)
        torch.cuda.synchronize()
        expected.append(layer(x))
    torch.cuda.synchronize()
    assert not torch.equal(*expected)
    for turn in range(20):
        layer(x)
        layer(x)
        torch.add(kept[turn % 2], 0, out=layer.weight.codes)  # a kernel, where a copy would be none
        assert torch.equal(layer(x), expected[turn % 2]), turn


@pytest.mark.parametrize("name", ROWS)
def test_two_streams_at_once(name: str) -> None:
    m = ROWS[name]
    its = [case("int4_g128", m, 1024, 4096) for _ in range(2)]
    its[1].x.copy_(torch.randn_like(its[1].x))
    expected = [it.layer(it.x) for it in its]
    streams = [torch.cuda.Stream() for _ in its]
    torch.cuda.synchronize()
    found: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[index].append(its[index].layer(its[index].x))
    torch.cuda.synchronize()
    assert all(torch.equal(y, expected[index]) for index in range(2) for y in found[index])


@pytest.mark.parametrize("name", ROWS)
def test_a_kernel_agrees_with_its_twin(name: str) -> None:
    """The portable twin reads the very same buffers."""
    m, n, k = ROWS[name], 1024, 4096
    it, kernel = case("int4_g128", m, n, k), kernel_of("int4_g128", m, n, k)
    stand_in = twin(kernel)
    y, other = (w4gen.bind(each)(it.x, it.layer.weight) for each in (kernel, stand_in))
    assert it.error(other) <= it.limit(kernel=stand_in)
    assert float((y.double() - other.double()).norm() / other.double().norm()) <= 1e-3


@pytest.mark.parametrize(
    "change", [{"stages": 1}, {"warps": 2}, {"warps": 8}, {"split_k": 2, "sum_at": "shared"}, {"overlap": 0}]
)
def test_other_schedules_of_halves_give_the_truth(change: dict[str, object]) -> None:
    it, kernel = case("int4_g128", 1, 1024, 4096), kernel_of("int4_g128", 1, 1024, 4096)
    if "split_k" in change and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no clusters")
    whole = {"split_k": 1, "sum_at": "global"} if "split_k" not in change else {}
    other = made(lower(kernel.problem), replace(kernel.schedule, **whole, **change), arch_of(it.x.device))
    assert it.error(w4gen.bind(other)(it.x, it.layer.weight)) <= it.limit(kernel=other)


def shapes(count: int) -> list[tuple[str, int, int, int, torch.dtype, bool]]:
    """Random questions, the same in every run."""
    draw = random.Random(0)
    found = []
    for _ in range(count):
        m = draw.choice([1, 1, 1, draw.randint(2, 8), draw.randint(9, 32), draw.randint(33, 128)])
        n, k = draw.randint(1, 3000), draw.choice([draw.randint(1, 5000), 8 * draw.randint(1, 600), 64 * draw.randint(1, 90)])
        form = draw.choice([*FORMATS, "uint4_g128", "int4_row", "int4_g32", "nf4_g128", "uint4_g64_m"])
        found.append((form, m, n, k, draw.choice([F16, F16, BF16]), draw.random() < 0.5))
    return found


@pytest.mark.parametrize("part", range(10))
def test_random_questions_give_the_truth_and_repeat(part: int) -> None:
    for form, m, n, k, kind, bias in shapes(100)[part::10]:
        it = case(form, m, n, k, kind, bias=bias)
        y = it.layer(it.x)
        assert it.error(y) <= it.limit(m), (form, m, n, k, kind, bias)
        assert all(torch.equal(it.layer(it.x), y) for _ in range(3)), (form, m, n, k, kind, bias)
