"""The short way of an eager call, and layers launched as one, on a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from truth import KINDS, case

import w4gen
from w4gen.runtime import linear as module_of_linear

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
ROWS = [1, 3, 8, 16]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each call of the op."""
    seen, plain = [], module_of_linear._call

    def counted(x: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.append(x.shape[0])
        return plain(x, *rest)

    monkeypatch.setattr(module_of_linear, "_call", counted)
    return seen


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64"])
def test_the_short_way_gives_the_bits_of_the_op(form: str, m: int, bias: bool, kind: torch.dtype, asked: list[int]) -> None:
    it = case(form, m, 4096, 4096, kind, bias=bias)
    expected = it.layer(it.x)
    ys = [it.layer(it.x) for _ in range(40)]
    assert all(torch.equal(y, expected) for y in ys)
    assert it.error(expected) <= it.limit()
    assert len(asked) == 1 or not it.layer._calls


def test_one_row_takes_the_short_way_on_sm_90(asked: list[int]) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("other archs may have kernels of several functions")
    for kind in KINDS:
        it = case("int4_g128", 1, 4096, 4096, kind)
        for _ in range(3):
            it.layer(it.x)
    assert len(asked) == len(KINDS)


@pytest.mark.parametrize("how", ["load", "copy_", "data", "replaced", "moved"])
@pytest.mark.parametrize("m", ROWS)
def test_no_call_reads_a_weight_that_is_gone(m: int, how: str) -> None:
    it, other = case("int4_g128", m, 4096, 4096), case("int4_g128", m, 4096, 4096)
    other.layer.codes.bitwise_not_()
    expected = other.layer(it.x)
    for _ in range(3):
        before = it.layer(it.x)
    assert not torch.equal(before, expected)
    match how:
        case "load":
            it.layer.load_state_dict(other.layer.state_dict())
        case "copy_":
            it.layer.codes.copy_(other.layer.codes)
        case "data":
            it.layer.codes.data = other.layer.codes.clone()
        case "replaced":
            it.layer.codes = other.layer.codes.clone()
        case _:
            it.layer.cpu().load_state_dict(other.layer.state_dict())
            it.layer.cuda()
    torch.cuda.empty_cache()
    assert all(torch.equal(it.layer(it.x), expected) for _ in range(3))


@pytest.mark.parametrize("m", ROWS)
def test_a_write_right_before_a_short_call_is_waited_for(m: int) -> None:
    """The layer is warm; a large copy of other codes is still running when it is called."""
    it = case("int4_g128", m, 8192, 8192)
    codes = [it.layer.codes.clone(), ~it.layer.codes]
    expected = []
    for each in codes:
        it.layer.codes.copy_(each)
        torch.cuda.synchronize()
        expected.append(it.layer(it.x))
    for turn in range(40):
        it.layer(it.x)
        it.layer.codes.copy_(codes[turn % 2])
        assert torch.equal(it.layer(it.x), expected[turn % 2])


@pytest.mark.parametrize("m", ROWS)
def test_a_short_call_is_captured_and_replayed(m: int) -> None:
    it = case("int4_g128", m, 4096, 4096)
    for _ in range(3):
        it.layer(it.x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = it.layer(it.x)
    it.x.copy_(torch.randn_like(it.x))
    graph.replay()
    assert torch.equal(y, it.layer(it.x))


def test_a_short_call_is_on_the_current_stream() -> None:
    it, stream = case("int4_g128", 1, 4096, 4096), torch.cuda.Stream()
    for _ in range(3):
        expected = it.layer(it.x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)
        x = it.x.clone()
        y = it.layer(x)
        assert not stream.query()
    stream.synchronize()
    assert torch.equal(y, expected)


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(1536, 8960, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)


@pytest.mark.parametrize("m", [1, 8, 64, 512])
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64"])
def test_layers_launched_as_one_give_what_each_gives(form: str, m: int, asked: list[int]) -> None:
    """Within roundings: the whole's schedule may be another."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"mlp": Mlp().cuda().to(torch.bfloat16)})
    w4gen.convert(model, form, progress=False)
    plain, x = copy.deepcopy(model), torch.randn(m, 1536, device="cuda", dtype=torch.bfloat16)
    assert len(w4gen.merge(model).merged) == 1
    with torch.no_grad():
        expected, y = plain["mlp"](x), model["mlp"](x)
        assert len(asked) == 3
        again = model["mlp"](x)
    assert ((y.double() - expected.double()).norm() / expected.double().norm()).item() < 1e-2
    assert torch.equal(y, again)
