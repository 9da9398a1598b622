"""Layers launched as one: which are, which are not and why, and that nothing else about them changes."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import w4gen
from w4gen.runtime import linear as module_of_linear
from w4gen.runtime import warmup
from w4gen.runtime.shared import Shared

K = 128


class Mlp(torch.nn.Module):
    """As in Llama: both layers read x, which is not changed."""

    def __init__(self, n: int = 64, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(K, n, bias=bias) for _ in range(2))
        self.down_proj = torch.nn.Linear(n, K)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k_proj, self.v_proj = (torch.nn.Linear(K, 32) for _ in range(2))
        self.q_proj = torch.nn.Linear(K, 96)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        v = self.v_proj(x)  # not in the order of the names
        q = self.q_proj(x) * scale
        return q.view(*x.shape[:-1], 3, 32) * self.k_proj(x)[..., None, :] + v[..., None, :]


def made(kind: Callable[[], torch.nn.Module] = Mlp, form: str = "int4_g64", merged: bool = True) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"block": kind()})
    w4gen.convert(model, form, progress=False)
    if merged:
        assert not w4gen.merge(model).skipped
    return model["block"]


def x_of(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, K, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """N of each call of the op."""
    seen, plain = [], module_of_linear._call

    def counted(x: torch.Tensor, buffers: object, bias: object, n: int, *rest: object) -> torch.Tensor:
        seen.append(n)
        return plain(x, buffers, bias, n, *rest)

    monkeypatch.setattr(module_of_linear, "_call", counted)
    return seen


@pytest.mark.parametrize("form", ["int4_g64", "nf4_g64", "uint4_g32_m", "int3_g64"])
@pytest.mark.parametrize("shape", [(1,), (2, 5)], ids=str)
@pytest.mark.parametrize("kind", [Mlp, Attention, lambda: Mlp(bias=True)], ids=["mlp", "attention", "biased"])
def test_the_same_comes_of_fewer_launches(kind: type, shape: tuple[int, ...], form: str, launches: list[int]) -> None:
    plain, model, x = made(kind, form, merged=False), made(kind, form), x_of(*shape)
    expected = plain(x)
    launches.clear()
    assert torch.equal(model(x), expected)
    assert launches == ([160] if kind is Attention else [128, K])


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_the_models_of_transformers_are_merged(family: str, launches: list[int]) -> None:
    pytest.importorskip("transformers")
    from w4gen.bench import decoder, end_to_end

    with torch.no_grad():
        model = decoder.built(end_to_end.TINY | {"model_type": family}, torch.bfloat16, torch.device("cpu"), 16)
        w4gen.convert(model, "int4_g64", progress=False)
        plain, names = copy.deepcopy(model), {name: each.clone() for name, each in model.state_dict().items()}
        done = w4gen.merge(model)
        assert [each.names[0].split(".", 3)[3] for each in done.merged] == ["self_attn.q_proj", "mlp.gate_proj"] * 2
        assert str(done) == "4 groups of layers merged: 6 launches fewer"
        assert names.keys() == model.state_dict().keys()
        assert all(torch.equal(names[name], each) for name, each in model.state_dict().items())
        answers = [decoder.Decoder.started(each, 2, 5, 4) for each in (plain, model)]
        assert torch.equal(*(answer.prefill() for answer in answers))
        launches.clear()
        assert torch.equal(*(answer.step() for answer in answers))
        assert len(launches) == 2 * (7 + 4)
    assert w4gen.merge(model).merged == ()


class Turned(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        return self.gate_proj(x) * self.up_proj(x)


class Chosen(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.gate_proj(x)
        if y.sum() > 0:
            y = y * self.up_proj(x)
        return y


class Either(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate_proj(x) * (self.up_proj(x) if x.sum() > 0 else 1)


class Twice(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate_proj(x) * self.up_proj(x) + self.up_proj(x)


class Two(Mlp):
    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.gate_proj(x) * self.up_proj(other)


class Asked(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate_proj(x) * self.up_proj(x) * self.up_proj.in_features


class InPlace(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.gate_proj(x)
        x.add_(1)
        return y * self.up_proj(x)


class Indexed(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.gate_proj(x)
        x[..., 0] = 1
        return y * self.up_proj(x)


class Out(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.gate_proj(x)
        torch.add(x, 1, out=x)
        return y * self.up_proj(x)


class Listed(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(self.gate_proj(x) * self.up_proj(x) for _ in range(2))


class Sourceless(Mlp):
    forward = eval("lambda self, x: self.gate_proj(x) * self.up_proj(x)")


def changed(change: Callable[[Mlp], object]) -> Callable[[], torch.nn.Module]:
    def make() -> torch.nn.Module:
        block = made(merged=False)
        change(block)
        return block

    return make


def quantized(form: str) -> w4gen.Linear:
    return w4gen.Linear.from_float(torch.nn.Linear(K, 64, bias=False), form)


NOT_ONCE = "forward does not call each of gate_proj, up_proj once, and always"
REFUSED = {
    "turned": (lambda: made(Turned, merged=False), "or one that it may change: x"),
    "chosen": (lambda: made(Chosen, merged=False), NOT_ONCE),
    "either": (lambda: made(Either, merged=False), NOT_ONCE),
    "twice": (lambda: made(Twice, merged=False), NOT_ONCE),
    "two": (lambda: made(Two, merged=False), "more than one argument, or one that it may change: other, x"),
    "in place": (lambda: made(InPlace, merged=False), "or one that it may change: x"),
    "indexed": (lambda: made(Indexed, merged=False), "or one that it may change: x"),
    "out": (lambda: made(Out, merged=False), "or one that it may change: x"),
    "listed": (lambda: made(Listed, merged=False), NOT_ONCE),
    "asked": (lambda: made(Asked, merged=False), NOT_ONCE),
    "sourceless": (lambda: made(Sourceless, merged=False), "forward"),
    "a whole weight's": (lambda: made(Mlp, "nvfp4", merged=False), "scale.scale belong to a whole weight"),
    "formats": (changed(lambda it: setattr(it, "up_proj", quantized("nf4_g64"))), "they have 2 formats"),
    "half converted": (
        changed(lambda it: setattr(it, "up_proj", torch.nn.Linear(K, 64))),
        "up_proj is a Linear, not a plain w4gen",
    ),
    "none": (changed(lambda it: setattr(it, "up_proj", None)), "up_proj is a NoneType"),
    "hooks": (changed(lambda it: it.up_proj.register_forward_hook(print)), "up_proj has hooks"),
    "replaced": (changed(lambda it: setattr(it, "forward", lambda x: x)), "the forward of their module was replaced"),
    "activation": (changed(lambda it: setattr(it.gate_proj, "activation", "silu")), "one has an activation"),
    "biases": (changed(lambda it: setattr(it.gate_proj, "bias", torch.zeros(64))), "they have 2 types of biases"),
    "invariant": (changed(lambda it: setattr(it.gate_proj, "batch_invariant", True)), "2 values of batch_invariant"),
    "meta": (changed(lambda it: it.to("meta")), "on the meta device: load the model first"),
    "another name": (changed(lambda it: setattr(it, "other", it.up_proj)), "up_proj has other names too"),
    "planes": (lambda: made(Mlp, "q4_k", merged=False), "rows of scale do not lie one after the other in the stored order"),
    "an odd address": (lambda: made(lambda: Mlp(n=3), "int4_g128", merged=False), "multiple of 16 bytes"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_certain_is_refused_with_the_reason(kind: str) -> None:
    build, told = REFUSED[kind]
    model = torch.nn.ModuleDict({"block": build()})
    before = list(model.modules())
    done = w4gen.merge(model)
    assert done.merged == ()
    assert [each.name for each in done.skipped] == ["block.gate_proj"]
    assert told in done.skipped[0].reason
    assert told in str(done)
    assert list(model.modules()) == before


CHANGES = {
    "codes written": lambda it: it.up_proj.codes.bitwise_not_(),
    "scale written": lambda it: it.gate_proj.scale.mul_(2),
    "another scale": lambda it: setattr(it.gate_proj, "scale", it.gate_proj.scale * 2),
    "data of scale": lambda it: setattr(it.up_proj.scale, "data", it.up_proj.scale * 2),
    "loaded": lambda it: it.load_state_dict(other_state()),
    "assigned": lambda it: it.load_state_dict(other_state(), assign=True),
    "doubled": lambda it: it.double(),
    "activation": lambda it: setattr(it.up_proj, "activation", "silu"),
    "order": lambda it: setattr(it.up_proj, "order", torch.arange(K).flip(0)),
    "invariant": lambda it: setattr(it.up_proj, "batch_invariant", True),
}


def other_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    model = torch.nn.ModuleDict({"block": Mlp()})
    w4gen.convert(model, "int4_g64", progress=False)
    return model["block"].state_dict()


@pytest.mark.parametrize("change", CHANGES)
def test_after_a_change_to_a_part_the_result_is_that_of_layers_apart(change: str) -> None:
    plain, model, x = made(merged=False), made(), x_of(3)
    before = model(x)
    for each in (plain, model):
        CHANGES[change](each)
    for _ in range(2):
        assert torch.equal(model(x), plain(x))
    assert change in ("doubled", "invariant") or not torch.equal(model(x), before)


@pytest.mark.parametrize("change", ["codes written", "scale written", "loaded", "assigned", "doubled", "invariant"])
def test_they_are_one_still_after_what_leaves_them_alike(change: str, launches: list[int]) -> None:
    model = made()
    CHANGES[change](model)
    if change == "invariant":
        CHANGES[change](torch.nn.ModuleDict({"up_proj": model.gate_proj}))
    model(x_of(3))
    assert launches == [128, K]


@pytest.mark.parametrize("how", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["deepcopy", "pickle"])
def test_a_copy_is_one_of_its_own(how: Callable[[torch.nn.Module], torch.nn.Module], launches: list[int]) -> None:
    model, x = made(), x_of(3)
    twin, expected = how(model), model(x)
    model.up_proj.scale.zero_()
    launches.clear()
    assert torch.equal(twin(x), expected)
    assert launches == [128, K]
    assert twin.up_proj.fan.whole is not model.up_proj.fan.whole


def test_safetensors_save_and_load_parts(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, fresh, x = made(), made(), x_of(2)
    fresh.load_state_dict(other_state())
    safetensors.save_file(model.state_dict(), tmp_path / "it.safetensors")
    fresh.load_state_dict(safetensors.load_file(tmp_path / "it.safetensors"))
    assert torch.equal(fresh(x), model(x))


def test_x_that_changes_between_two_calls_is_read_again() -> None:
    plain, model, x = made(merged=False), made(), x_of(2)
    for block in (plain, model):
        block.told = [block.gate_proj(x).clone(), block.up_proj(x.add_(1)), block.up_proj(x * 2), block.up_proj(x)]
        x.sub_(1)
    assert all(torch.allclose(*pair) for pair in zip(plain.told, model.told))


def test_nothing_is_left_behind_and_nothing_is_held_twice() -> None:
    model, x = made(), x_of(2)
    model(x)
    assert model.gate_proj.fan.left is None
    assert model.up_proj.codes.untyped_storage().data_ptr() == model.gate_proj.codes.untyped_storage().data_ptr()
    held = weakref.ref(model.gate_proj.fan.whole.codes)
    model.to("meta")
    gc.collect()
    assert held() is None


def test_a_functional_call_uses_what_it_is_given_and_changes_nothing(launches: list[int]) -> None:
    model, x = made(), x_of(2)
    before, given = model(x), {name: each for name, each in other_state().items() if "extra" not in name}
    plain = made(merged=False)
    plain.load_state_dict(other_state())
    assert torch.equal(torch.func.functional_call(model, given, (x,)), plain(x))
    launches.clear()
    assert torch.equal(model(x), before)
    assert launches == [128, K]


def test_vmap_is_a_loop() -> None:
    model, x = made(), x_of(4, 3)
    assert torch.allclose(torch.vmap(model)(x), torch.stack([model(each) for each in x]), rtol=1e-5, atol=1e-6)


def test_an_exported_module_gives_the_same(launches: list[int]) -> None:
    model, x = made(), x_of(3)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), model(x))
    launches.clear()
    model(x)
    assert launches == [128, K]


def test_buffers_that_are_taken_away_free_the_whole() -> None:
    model = made()
    held = weakref.ref(model.gate_proj.fan.whole.codes)
    for part in (model.gate_proj, model.up_proj):
        for name in ("codes", "scale"):
            part._buffers[name] = part._buffers[name].clone()
    model(x_of(1))
    gc.collect()
    assert held() is None


def test_gradients_reach_x_and_the_biases() -> None:
    found = []
    for merged in (False, True):
        model, x = made(lambda: Mlp(bias=True), merged=merged), x_of(2).requires_grad_()
        for learns in (False, True):
            model.up_proj.bias.requires_grad_(learns)
            model(x).square().sum().backward()
        found.append((x.grad, model.up_proj.bias.grad))
    assert all(torch.allclose(*pair, rtol=1e-4, atol=1e-4) for pair in zip(*found))


def test_a_compiled_module_is_one_graph_of_fewer_ops() -> None:
    torch._dynamo.reset()
    model, x, graphs = made(), x_of(3), []

    def keep(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=keep)
    for _ in range(2):
        assert torch.equal(compiled(x), model(x))
    assert len(graphs) == 1
    assert sum("w4gen" in str(node.target) for node in graphs[0].graph.nodes) == 2
    model.load_state_dict(other_state(), assign=True)
    assert torch.equal(compiled(x), model(x))


def test_kernels_of_the_whole_are_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list = []
    monkeypatch.setattr(warmup.ahead, "compiled", lambda asks, workers: asked.extend(asks) or [])
    w4gen.warmup(made(), (1,), arch="sm_90", progress=False)
    assert sorted(each.problem.n for each in asked) == [128, K]


@pytest.mark.parametrize(("n", "merged"), [(64, True), (48, True), (40, False)])
def test_in_the_stored_order_of_a_gpu_parts_begin_where_blocks_do(n: int, merged: bool, gpu: object) -> None:
    """Two calls: the second is one short launch for both."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"block": Mlp(n)})
    w4gen.convert(model, "int4_g64", progress=False)
    model.half()
    done = w4gen.merge(model)
    assert bool(done.merged) == merged
    assert merged or "do not lie one after the other" in done.skipped[0].reason
    block, x = model["block"], x_of(1).half()
    assert isinstance(block.up_proj, Shared) == merged
    block.gate_proj(x), block.up_proj(x)
    asked, before = gpu.asked, len(gpu.launched)
    block.gate_proj(x), block.up_proj(x)
    assert gpu.asked == asked
    assert len(gpu.launched) == before + (1 if merged else 2)
    block.up_proj.scale.mul_(1)
    block.gate_proj(x), block.up_proj(x)
    assert gpu.asked == asked + 1
    assert [early for early, _ in gpu.launched[before:]] == ([True, False] if merged else [True] * 3 + [False])
