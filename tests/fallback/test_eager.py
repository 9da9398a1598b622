"""The short way of an eager call, with a stand-in for Triton's launcher: what it launches, and when it must not."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import w4gen
from w4gen.errors import ShapeError
from w4gen.runtime import eager

N, K = 32, 256


def module(bias: bool = True, form: str = "int4_g128", seed: int = 0) -> w4gen.Linear:
    torch.manual_seed(seed)
    return w4gen.Linear.from_float(torch.nn.Linear(K, N, bias=bias), form).half()


def x_of(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, K).half()


def warm(layer: w4gen.Linear, x: torch.Tensor, gpu: object) -> None:
    """Two calls: the second is short."""
    layer(x)
    asked = gpu.asked
    layer(x)
    assert gpu.asked == asked


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (5,), (2, 4)], ids=str)
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64", "uint4_g128_z"])
def test_the_short_way_launches_what_the_op_does(form: str, shape: tuple[int, ...], bias: bool, gpu: object) -> None:
    layer, x = module(bias, form), x_of(*shape)
    ys = [layer(x) for _ in range(3)]
    assert gpu.asked == 1
    held = [each.data_ptr() for each in (*layer.weight.buffers, *([layer.bias] if bias else []))]
    m = x.numel() // K
    assert [call for _, call in gpu.launched] == [(y.data_ptr(), x.data_ptr(), *held, m) for y in ys]
    assert [early for early, _ in gpu.launched] == [False, True, True]
    assert gpu.grid == gpu.kernel.programs(gpu.kernel.pieces[0], m)
    for turn, y in enumerate(ys, 1):
        assert (y.shape, y.dtype, y.is_contiguous()) == ((*shape, N), torch.float16, True)
        assert (y == turn).all()


def test_nothing_else_happens_in_a_warm_call(gpu: object) -> None:
    """Three functions of ours run, and of PyTorch's a module's call: no op, no launcher of Triton's, no bucket, no kernel."""
    layer, x, seen = module(), x_of(1, 1), []

    def note(frame: object, event: str, what: object) -> None:
        if event == "call":
            seen.append((frame.f_globals["__name__"], frame.f_code.co_name))

    warm(layer, x, gpu)
    sys.setprofile(note)
    layer(x)
    sys.setprofile(None)
    ours = [each for each in seen if each[0].startswith("w4gen")]
    assert ours == [("w4gen.runtime.linear", "forward"), ("w4gen.runtime.eager", "plain"), ("w4gen.runtime.eager", "call")]
    theirs = {each for each in seen if each[0].startswith(("torch", "triton"))}
    assert theirs == {
        ("torch.nn.modules.module", "_wrapped_call_impl"),
        ("torch.nn.modules.module", "_call_impl"),
        ("torch.compiler", "is_dynamo_compiling"),
    }


def replace(layer: w4gen.Linear, name: str) -> None:
    setattr(layer, name, getattr(layer, name).clone())


def swap(layer: w4gen.Linear, name: str) -> None:
    held = getattr(layer, name)
    held.data = held.data.clone()


CHANGES = {
    "codes written": lambda layer: layer.codes.add_(0),
    "scale written": lambda layer: layer.scale.mul_(1),
    "bias written": lambda layer: layer.bias.zero_(),
    "another codes": lambda layer: replace(layer, "codes"),
    "another scale": lambda layer: replace(layer, "scale"),
    "another bias": lambda layer: replace(layer, "bias"),
    "no bias": lambda layer: setattr(layer, "bias", None),
    "bias a parameter": lambda layer: (delattr(layer, "bias"), setattr(layer, "bias", torch.nn.Parameter(torch.ones(N).half()))),
    "data of codes": lambda layer: swap(layer, "codes"),
    "data of scale": lambda layer: swap(layer, "scale"),
    "data of bias": lambda layer: swap(layer, "bias"),
    "memory of scale": lambda layer: layer.scale.set_(layer.scale.clone()),
    "loaded": lambda layer: layer.load_state_dict(module(seed=1).state_dict()),
    "assigned": lambda layer: layer.load_state_dict(module(seed=1).state_dict(), assign=True),
    "another format": lambda layer: layer.load_state_dict(module(form="nf4_g64").state_dict()),
    "activation": lambda layer: setattr(layer, "activation", "silu"),
    "invariant": lambda layer: setattr(layer, "batch_invariant", True),
    "order": lambda layer: setattr(layer, "order", torch.arange(K)),
    "a gradient of bias": lambda layer: layer.bias.requires_grad_(),
    "a bias of another type": lambda layer: layer.float(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_after_a_change_the_op_is_asked_and_takes_what_is_there_now(change: str, gpu: object) -> None:
    layer, x = module(), x_of(1)
    warm(layer, x, gpu)
    asked, _ = gpu.asked, CHANGES[change](layer)
    layer(x)
    assert gpu.asked == asked + 1
    assert gpu.launched[-1][1][2:-2] == tuple(each.data_ptr() for each in layer.weight.buffers)[: len(gpu.launched[-1][1]) - 4]
    again = layer(x)
    assert (again == len(gpu.launched)).all()


@pytest.mark.parametrize("name", ["codes", "scale"])
def test_the_first_call_after_a_write_waits_and_those_after_it_do_not(name: str, gpu: object) -> None:
    layer, x = module(), x_of(1)
    for _ in range(2):
        warm(layer, x, gpu)
        getattr(layer, name).add_(0)
    warm(layer, x, gpu)
    assert [early for early, _ in gpu.launched] == [False, True] * 3


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Overriding(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Tensor(torch.Tensor):
    pass


def within(mode: Callable[[], AbstractContextManager]) -> Callable[[w4gen.Linear, torch.Tensor], object]:
    def call(layer: w4gen.Linear, x: torch.Tensor) -> object:
        with mode():
            return layer(x)

    return call


OTHERS = {
    "a gradient of x": lambda layer, x: layer(x.requires_grad_()),
    "autocast": within(lambda: torch.autocast("cpu", dtype=torch.float16)),
    "vmap": lambda layer, x: torch.vmap(layer)(x[None]),
    "a mode": within(Watching),
    "a mode of functions": within(Overriding),
    "a subclass": lambda layer, x: layer(x.as_subclass(Tensor)),
    "a trace": lambda layer, x: torch.jit.trace(layer, (x,), check_trace=False),
    "a dual number": within(forward_ad.dual_level),
    "a residual": lambda layer, x: layer(x, torch.zeros(x.shape[0], N).half()),
    "columns apart": lambda layer, x: layer(torch.stack([x, x], -1)[..., 0]),
    "an odd address": lambda layer, x: layer(torch.zeros(x.numel() + 1).half()[1:].view(x.shape).copy_(x)),
    "other rows": lambda layer, x: layer(x.repeat(2, 1)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("other", OTHERS)
def test_what_is_more_than_a_launch_goes_through_the_op(other: str, gpu: object) -> None:
    layer, x = module(), x_of(3)
    warm(layer, x, gpu)
    asked = gpu.asked
    OTHERS[other](layer, x)
    assert gpu.asked == asked + 1


def test_another_current_gpu_takes_the_way_that_switches(gpu: object) -> None:
    layer, x = module(), x_of(3)
    warm(layer, x, gpu)
    asked, gpu.current = gpu.asked, 1
    (call,) = layer._calls.values()
    assert call(x, layer._buffers) is None
    gpu.current = None
    layer(x)
    assert gpu.asked == asked


def test_a_compiled_layer_holds_the_op(gpu: object) -> None:
    torch._dynamo.reset()
    layer, x, graphs = module(), x_of(3), []
    warm(layer, x, gpu)

    def keep(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    torch.compile(layer, fullgraph=True, backend=keep)(x)
    assert any("w4gen" in str(node.target) for node in graphs[0].graph.nodes)


def test_inference_mode_gives_inference_tensors(gpu: object) -> None:
    layer, x = module(), x_of(3)
    warm(layer, x, gpu)
    for mode in (True, False):
        with torch.inference_mode(mode):
            assert layer(x).is_inference() == mode
    assert gpu.asked == 1


def test_every_launch_waits_over_inference_tensors(gpu: object) -> None:
    """Nothing counts what is written to them."""
    with torch.inference_mode():
        layer, x = module(), x_of(3)
        warm(layer, x, gpu)
        layer.scale.zero_()
        layer(x)
    assert gpu.asked == 1
    assert [early for early, _ in gpu.launched] == [False] * 3


def test_what_is_wrong_is_refused_after_a_warm_call(gpu: object) -> None:
    layer, x = module(), x_of(3)
    warm(layer, x, gpu)
    with pytest.raises(ShapeError, match="must be K=256"):
        layer(x[:, :-1])
    with pytest.raises(ShapeError, match="x is on meta, codes on cpu"):
        layer(x.to("meta"))


def test_hooks_are_called(gpu: object) -> None:
    layer, x, seen = module(), x_of(3), []
    layer.register_forward_hook(lambda module, given, y: seen.append(y.shape))
    warm(layer, x, gpu)
    assert seen == [(3, N)] * 2


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "copy"])
def test_a_copy_prepares_its_own_calls(how: str, gpu: object) -> None:
    layer, x = module(), x_of(3)
    warm(layer, x, gpu)
    twin = {"deepcopy": copy.deepcopy, "copy": copy.copy, "pickle": lambda it: pickle.loads(pickle.dumps(it))}[how](layer)
    twin(x)
    assert gpu.asked == 2
    assert gpu.launched[-1][1][2] == twin.codes.data_ptr()


def test_a_prepared_call_keeps_no_weight_alive(gpu: object) -> None:
    layer, x = module(), x_of(3)
    warm(layer, x, gpu)
    held = [weakref.ref(each) for each in layer.weight.buffers]
    for name in ("codes", "scale"):
        replace(layer, name)
    gc.collect()
    assert not any(each() is not None for each in held)


def test_only_so_many_calls_are_kept(gpu: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "LIMIT", 3)
    layer = module()
    for shape in ((1,), (1, 1), (2,), (3,), (1, 4), (5,)):
        warm(layer, x_of(*shape), gpu)
    assert len(layer._calls) == 3
