"""The transforms of `torch.func` over layers: what they make of the dequantized layer, they make of ours."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import w4gen
from w4gen.models import hooked
from w4gen.runtime import transforms

M, N, K = 5, 32, 64


@pytest.fixture(params=["int4_g32", "uint3_g32_z"])
def layer(request: pytest.FixtureRequest) -> w4gen.Linear:
    torch.manual_seed(0)
    return w4gen.Linear.from_float(torch.nn.Linear(K, N), request.param)


def dense(layer: w4gen.Linear) -> torch.nn.Linear:
    """The same layer over its weight, dequantized."""
    made = torch.nn.Linear(K, N)
    made.weight, made.bias = (torch.nn.Parameter(each, False) for each in (layer.weight.dequantize(), layer.bias.clone()))
    return made


def loss(layer: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *given: layer(*given).square().sum()


def along(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """How f changes along a way that depends on x itself."""
    return lambda x: jvp(f, (x,), (x.square(),))[1]


TRANSFORMS: dict[str, Callable[[Callable[..., torch.Tensor], torch.Tensor], object]] = {
    "grad": lambda f, x: grad(loss(f))(x),
    "vjp": lambda f, x: vjp(f, x)[1](torch.ones(M, N)),
    "jacrev": lambda f, x: jacrev(f)(x),
    "a gradient for each row": lambda f, x: vmap(grad(loss(f)))(x),
    "jacobians for each row": lambda f, x: vmap(jacrev(f))(x),
    "jacrev of grad": lambda f, x: jacrev(grad(loss(f)))(x[0]),
    "grad of grad": lambda f, x: grad(lambda x: grad(loss(f))(x).square().sum())(x),
    "hessian": lambda f, x: hessian(loss(f))(x[0]),
    "jacfwd of jacfwd": lambda f, x: jacfwd(jacfwd(lambda x: f(x).square()))(x[0]),
    "grad of jvp": lambda f, x: grad(loss(along(f)))(x),
    "jvp of jvp": lambda f, x: along(along(f))(x),
    "jvp of jvp of grad": lambda f, x: along(along(grad(loss(f))))(x),
    "jvp of grad": lambda f, x: jvp(grad(loss(f)), (x,), (x.square(),)),
    "backward of grad": lambda f, x: torch.autograd.grad(grad(loss(f))(given := x.clone().requires_grad_()).sum(), given),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_of_a_layer_is_that_of_the_dequantized_layer(name: str, layer: w4gen.Linear) -> None:
    x, do = torch.randn(M, K), TRANSFORMS[name]
    torch.testing.assert_close(do(layer, x), do(dense(layer), x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["jvp of jvp", "jacfwd of jacfwd"])
def test_forward_mode_in_forward_mode_loses_nothing_where_it_is_compiled(name: str) -> None:
    layer, x = w4gen.Linear.from_float(torch.nn.Linear(K, N), "int4_g32"), torch.randn(M, K)
    do, expected = TRANSFORMS[name], TRANSFORMS[name](dense(layer), x)
    found = torch.compile(lambda x: do(layer, x), backend="eager")(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_biases_and_epilogues_have_gradients_too(layer: w4gen.Linear) -> None:
    x, residual, w = torch.randn(M, K), torch.randn(M, N), layer.weight
    plain = dense(layer).weight

    def ours(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return w4gen.linear(x, w, bias, activation="gelu", residual=residual, batch_invariant=True)

    def theirs(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(torch.nn.functional.linear(x, plain, bias)) + residual

    found, expected = (grad(loss(each), argnums=(0, 1, 2))(x, layer.bias, residual) for each in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_bias_that_is_handed_to_a_call_has_its_gradient(layer: w4gen.Linear) -> None:
    x, given = torch.randn(M, K), {"bias": torch.randn(N)}
    found, expected = (grad(lambda p, f=f: functional_call(f, p, (x,)).square().sum())(given) for f in (layer, dense(layer)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_gradients_are_of_the_type_of_x(kind: torch.dtype, layer: w4gen.Linear) -> None:
    x = torch.randn(M, K)
    expected = grad(loss(dense(layer)))(x)
    found = grad(lambda x: layer(x).float().square().sum())(x.to(kind))
    assert found.dtype == kind
    assert (found.float() - expected).norm() < 2e-2 * expected.norm()
    with torch.autocast("cpu", kind):
        found = grad(lambda x: layer(x).float().square().sum())(x)
    assert found.dtype == torch.float32
    assert (found - expected).norm() < 2e-2 * expected.norm()


def test_merged_layers_have_gradients_too(layer: w4gen.Linear) -> None:
    class Pair(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = (w4gen.Linear.from_float(torch.nn.Linear(K, N), "int4_g32") for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.gate_proj(x) * self.up_proj(x)

    model, x = torch.nn.Sequential(Pair()), torch.randn(M, K)
    expected, y = grad(loss(model))(x), model(x)
    w4gen.merge(model)
    for _ in range(2):
        torch.testing.assert_close(grad(loss(model))(x), expected)
        torch.testing.assert_close(model(x), y)
    assert not hooked(model[0].gate_proj)


def test_nothing_else_takes_this_way(layer: w4gen.Linear, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transforms.Rows, "apply", lambda *_: pytest.fail("it is for transforms that differentiate"))
    x = torch.randn(M, K)
    layer(x.requires_grad_()).sum().backward()
    vmap(layer)(x)
    for each in (grad(loss(layer)), jacfwd(layer)):
        with pytest.raises(pytest.fail.Exception):
            each(x)
