"""MLPs whose gate and up are one layer with its activation: which are, which are not and why, and what else stays as it was."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import w4gen
from w4gen.runtime import linear as module_of_linear
from w4gen.runtime import warmup
from w4gen.runtime.gated import Gated

K, N = 128, 64


class Mlp(torch.nn.Module):
    """As in Llama."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(K, N, bias=bias) for _ in range(2))
        self.down_proj, self.act_fn = torch.nn.Linear(N, K), torch.nn.SiLU()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """What is not code does not count."""
        out = self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out  # noqa: RET504  as Transformers writes it


class Bare(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def made(kind: Callable[[], torch.nn.Module] = Mlp, form: str = "int4_g64", seed: int = 0) -> torch.nn.ModuleDict:
    torch.manual_seed(seed)
    model = torch.nn.ModuleDict({"mlp": kind()})
    w4gen.convert(model, form, progress=False)
    return model


def pair(kind: Callable[[], torch.nn.Module] = Mlp, form: str = "int4_g64") -> tuple[torch.nn.ModuleDict, torch.nn.ModuleDict]:
    """A model, and the same gated."""
    plain = made(kind, form)
    gated = copy.deepcopy(plain)
    done = w4gen.merge(gated, gated=True)
    assert [each.names for each in done.merged] == [("mlp.gate_proj", "mlp.up_proj")]
    assert str(done) == "1 groups of layers merged: 3 launches fewer"
    assert not done.skipped
    return plain, gated


def x_of(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, K, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("form", ["int4_g64", "nf4_g64", "uint4_g32_m", "int3_g64", "q4_k"])
@pytest.mark.parametrize("kind", [Mlp, Bare, lambda: Mlp(bias=True)], ids=["named", "bare", "biased"])
def test_the_result_is_that_of_layers_apart_from_fewer_launches(
    kind: Callable[[], torch.nn.Module], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = kind if form != "q4_k" else lambda: wide(Mlp)
    (plain, gated), seen, call = pair(kind, form), [], module_of_linear._call
    monkeypatch.setattr(module_of_linear, "_call", lambda x, *rest: seen.append(rest[2]) or call(x, *rest))
    x = torch.randn(2, 3, plain["mlp"].gate_proj.in_features, generator=torch.Generator().manual_seed(1))
    y = gated["mlp"](x)
    assert len(seen) == 2
    torch.testing.assert_close(y, plain["mlp"](x), rtol=1e-5, atol=1e-6)


def wide(kind: type) -> torch.nn.Module:
    """Rows of 256, the blocks of q4_k."""
    made = kind()
    made.gate_proj, made.up_proj = (torch.nn.Linear(256, 256, bias=False) for _ in range(2))
    made.down_proj = torch.nn.Linear(256, 256)
    return made


def test_bf16_is_rounded_once() -> None:
    """The truth is the float64 of what the plain layers hold; layers apart round three times before down_proj."""
    plain, gated = pair()
    x = x_of(5).bfloat16()
    sums = [x.double() @ plain["mlp"].get_submodule(name).weight.dequantize(torch.float64).T for name in ("gate_proj", "up_proj")]
    truth = torch.nn.functional.silu(sums[0]) * sums[1]
    y = gated["mlp"].gate_up(x)
    assert ((y.double() - truth).abs() <= 2.0**-8 * truth.abs() + 1e-6).all()


def test_states_are_as_they_were() -> None:
    plain, gated = pair(lambda: Mlp(bias=True))
    before, after = plain.state_dict(), gated.state_dict()
    assert list(before) == sorted(before, key=list(before).index)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert sum(each.nbytes for each in gated.buffers()) == sum(each.nbytes for each in plain.buffers())


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("form", ["int4_g64", "nf4_g64"])
def test_a_state_is_loaded_in_place(form: str, assign: bool) -> None:
    plain, gated = pair(lambda: Mlp(bias=True))
    other = made(lambda: Mlp(bias=True), form, seed=5)
    place = gated["mlp"].gate_up.codes.data_ptr()
    found = gated.load_state_dict(other.state_dict(), assign=assign)
    assert not found.missing_keys
    assert not found.unexpected_keys
    torch.testing.assert_close(gated["mlp"](x_of(3)), other["mlp"](x_of(3)), rtol=1e-5, atol=1e-6)
    assert not torch.equal(gated["mlp"](x_of(3)), plain["mlp"](x_of(3)))
    assert (gated["mlp"].gate_up.codes.data_ptr() == place) == (form == "int4_g64")
    assert gated.state_dict().keys() == other.state_dict().keys()


def test_states_that_do_not_fit_are_told() -> None:
    _, gated = pair()
    state = made(seed=5).state_dict()
    lacking = {name: each for name, each in state.items() if name != "mlp.up_proj.codes"}
    assert gated.load_state_dict(lacking, strict=False).missing_keys == ["mlp.up_proj.codes"]
    mixed = state | {name: each for name, each in made(form="nf4_g64").state_dict().items() if "up_proj" in name}
    with pytest.raises(RuntimeError, match=r"mlp\.gate_proj and up_proj no longer make pairs of rows: they have 2 formats"):
        gated.load_state_dict(mixed)


def test_safetensors_save_and_load_them(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    plain, gated = pair()
    safetensors.save_file(gated.state_dict(), tmp_path / "it.safetensors")
    plain.load_state_dict(made(seed=5).state_dict())
    plain.load_state_dict(safetensors.load_file(tmp_path / "it.safetensors"))
    torch.testing.assert_close(plain["mlp"](x_of(2)), gated["mlp"](x_of(2)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "how",
    [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it)), lambda it: it.to("cpu").eval()],
    ids=["copy", "pickle", "to"],
)
def test_a_copy_is_one_of_its_own(how: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
    _, gated = pair()
    assert torch.equal(how(gated)["mlp"](x_of(2)), gated["mlp"](x_of(2)))
    assert type(how(gated)["mlp"]) is Gated
    assert not hasattr(how(gated)["mlp"], "gate_proj")


def test_gradients_reach_x() -> None:
    grads = []
    for model in pair():
        x = x_of(3).requires_grad_()
        model["mlp"](x).square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_a_compiled_module_is_one_graph_of_two_ops() -> None:
    torch._dynamo.reset()
    (_, gated), graphs = pair(), []

    def keep(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    assert torch.equal(torch.compile(gated["mlp"], fullgraph=True, backend=keep)(x_of(3)), gated["mlp"](x_of(3)))
    assert sum("w4gen" in str(node.target) for node in graphs[0].graph.nodes) == 2


def test_kernels_with_the_activation_are_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list = []
    monkeypatch.setattr(warmup.ahead, "compiled", lambda asks, workers: asked.extend(asks) or [])
    w4gen.warmup(pair()[1], ms=(1,), arch="sm_90", progress=False, dtype=torch.float16)
    assert [(each.problem.n, each.problem.activation) for each in asked] == [(2 * N, "silu_mul"), (K, "")]


class More(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) + x


class Turned(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


class First(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Two(Mlp):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Gelu(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x)


def changed(change: Callable[[Mlp], object]) -> Callable[[], torch.nn.Module]:
    def make() -> torch.nn.ModuleDict:
        model = made()
        change(model["mlp"])
        return model

    return make


OTHER = "forward is not just self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"
REFUSED = {
    "more": (lambda: made(More), OTHER),
    "turned": (lambda: made(Turned), OTHER),
    "first": (lambda: made(First), OTHER),
    "two": (lambda: made(Two), OTHER),
    "gelu": (changed(lambda it: setattr(it, "act_fn", Gelu())), "act_fn, a Gelu, is not SiLU"),
    "a state": (changed(lambda it: setattr(it, "act_fn", torch.nn.PReLU())), "act_fn, a PReLU, has a state"),
    "a child more": (changed(lambda it: setattr(it, "norm", torch.nn.Identity())), "holds more than gate_proj"),
    "hooks": (changed(lambda it: it.register_forward_hook(print)), "Mlp or its act_fn has hooks"),
    "hooks of a layer": (changed(lambda it: it.up_proj.register_forward_hook(print)), "up_proj has hooks"),
    "half": (changed(lambda it: setattr(it, "up_proj", torch.nn.Linear(K, N))), "up_proj is a Linear, not a plain w4gen"),
    "a bias that learns": (lambda: learning(made(lambda: Mlp(bias=True))), "a bias of theirs learns"),
    "a whole weight's": (lambda: made(Mlp, "nvfp4"), "scale.scale belong to a whole weight"),
    "the model": (lambda: made()["mlp"], "it is the model itself"),
}


def learning(model: torch.nn.ModuleDict) -> torch.nn.ModuleDict:
    model["mlp"].up_proj.bias.requires_grad_()
    return model


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_certain_is_refused_with_the_reason(kind: str) -> None:
    build, told = REFUSED[kind]
    model = build()
    done = w4gen.merge(model, gated=True)
    assert told in done.skipped[0].reason
    assert done.skipped[0].name.endswith("gate_proj")
    assert not any(isinstance(each, Gated) for each in model.modules())
    assert all(not each.activation for each in done.merged)


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_the_models_of_transformers_are_gated(family: str) -> None:
    pytest.importorskip("transformers")
    from w4gen.bench import decoder, end_to_end

    with torch.no_grad():
        model = decoder.built(end_to_end.TINY | {"model_type": family}, torch.float32, torch.device("cpu"), 16)
        w4gen.convert(model, "int4_g64", progress=False)
        plain, names = copy.deepcopy(model), list(model.state_dict())
        done = w4gen.merge(model, gated=True)
        assert [each.activation for each in done.merged] == ["silu_mul", "silu_mul", "", ""]
        assert not done.skipped
        assert list(model.state_dict()) == names
        tokens = torch.arange(6)[None]
        torch.testing.assert_close(model(tokens).logits, plain(tokens).logits, rtol=1e-4, atol=1e-5)
    assert w4gen.merge(model, gated=True) == w4gen.merge(model)
