"""The op as PyTorch's own machinery uses it: checks, compiling, exporting, autocast, inference mode, vmap, gradients."""

from __future__ import annotations

import io
import warnings

import activations
import cases
import oracle
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import w4gen
from w4gen.errors import ShapeError, W4Error
from w4gen.runtime.ops import VERSION

KINDS = [torch.float16, torch.bfloat16, torch.float32]
M = [1, 2, 3, 8, 9, 17, 64, 129, 500]
"""Rows of several buckets."""


def module(form: str = "nf4_g64", bias: bool = True, kind: torch.dtype = torch.float16) -> w4gen.Linear:
    torch.manual_seed(0)
    return w4gen.Linear.from_float(torch.nn.Linear(200, 20, bias=bias), form).to(kind)


def x_of(*shape: int, kind: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, 200, generator=torch.Generator().manual_seed(1)).to(kind)


def arguments(form: str, bias: bool, kind: torch.dtype, gradients: bool = False) -> tuple:
    case = cases.call(form, 3, 10, 70, kind, bias=bias)
    w, x, added = case.w, case.x.requires_grad_(gradients), case.bias
    added = added if added is None else added.requires_grad_(gradients)
    return x, list(w.buffers), added, w.n, str(w.format), str(w.layout), False, "", None, VERSION


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("form", "bias"), [("int4_g128", True), ("nf4_g64", False), ("nvfp4", False)])
def test_the_op_is_well_behaved(form: str, bias: bool, kind: torch.dtype, gradients: bool) -> None:
    if form == "nvfp4":
        w = w4gen.Weight.from_float(torch.randn(10, 70), form)
        x = torch.randn(3, 70).to(kind).requires_grad_(gradients)
        call = (x, list(w.buffers), None, w.n, str(w.format), str(w.layout), False, "", None, VERSION)
    else:
        call = arguments(form, bias, kind, gradients)
    assert set(torch.library.opcheck(torch.ops.w4gen.linear, call).values()) == {"SUCCESS"}


@pytest.mark.parametrize("activation", ["", "gelu", "silu_mul"])
@pytest.mark.parametrize(("invariant", "residual"), [(False, True), (True, False)])
def test_the_op_is_as_well_behaved_with_an_epilogue_and_batch_invariant(invariant: bool, activation: str, residual: bool) -> None:
    x, buffers, added, n, *how, _, _, _, version = arguments("int4_g128", True, torch.float16)
    more = torch.randn(3, n).half() if residual and activation != "silu_mul" else None
    result = torch.library.opcheck(torch.ops.w4gen.linear, (x, buffers, added, n, *how, invariant, activation, more, version))
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_gradient_of_the_op_is_an_op_as_well_behaved(kind: torch.dtype) -> None:
    _, buffers, _, _, *how, _, _, _, version = arguments("int4_g128", False, kind)
    dy = torch.randn(3, 10).to(kind).requires_grad_()
    result = torch.library.opcheck(torch.ops.w4gen.linear_dx, (dy, buffers, 70, *how, version))
    assert set(result.values()) == {"SUCCESS"}


def test_the_schemas_change_nothing_they_are_given_and_say_their_version() -> None:
    for op in (torch.ops.w4gen.linear.default, torch.ops.w4gen.linear_dx.default):
        assert not op._schema.is_mutable
        assert op._schema.arguments[-1].name == "version"


def test_a_graph_of_another_version_is_refused() -> None:
    *call, version = arguments("nf4_g64", True, torch.float16)
    with pytest.raises(W4Error, match=rf"calls version {version + 1} of w4gen.linear; this w4gen has {version}: export .* again"):
        torch.ops.w4gen.linear(*call, version + 1)


def test_a_fake_tensor_has_the_shape_of_the_result() -> None:
    x, buffers, bias, *rest = arguments("nf4_g64", True, torch.float16)
    with FakeTensorMode() as mode:
        fakes = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, (x, buffers, bias))
        y = torch.ops.w4gen.linear(*fakes, *rest)
    assert (tuple(y.shape), y.dtype) == ((3, 10), torch.float16)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64"])
def test_two_graphs_serve_every_number_of_rows(form: str, backend: str) -> None:
    torch._dynamo.reset()
    model = torch.nn.Sequential(module(form), torch.nn.ReLU())
    graphs = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=graphs)
    for rows in M:
        assert torch.equal(compiled(x_of(rows)), model(x_of(rows)))
    assert graphs.frame_count <= 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_gives_gradients(backend: str) -> None:
    torch._dynamo.reset()
    layer, gradients = module(), []
    for call in (layer, torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)):
        x = x_of(3).requires_grad_()
        call(x).float().square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor_compiles_without_a_graph_break(mode: str) -> None:
    """On a CPU reduce-overhead has no graphs of CUDA to take; it is the same trace."""
    torch._dynamo.reset()
    counters.clear()
    model = torch.nn.Sequential(module(), torch.nn.ReLU())
    compiled = torch.compile(model, fullgraph=True, dynamic=True, mode=mode)
    with torch.inference_mode():
        for rows in M:
            assert torch.equal(compiled(x_of(rows)), model(x_of(rows)))
    assert 1 <= counters["stats"]["unique_graphs"] <= 2
    assert not counters["graph_break"]


@pytest.mark.parametrize("bias", [True, False])
def test_an_exported_model_is_saved_and_loaded(bias: bool) -> None:
    layer, file = w4gen.Linear(module().weight, module().bias if bias else None), io.BytesIO()
    exported = torch.export.export(layer, (x_of(3),), dynamic_shapes=({0: torch.export.Dim("m", min=2, max=4096)},))
    called = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    assert torch.ops.w4gen.linear.default in called
    with warnings.catch_warnings(action="ignore"):
        torch.export.save(exported, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for rows in (2, 5, 64):
        assert torch.equal(loaded(x_of(rows)), layer(x_of(rows)))


@pytest.mark.parametrize("given", KINDS, ids=str)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_chooses_the_type_of_x_and_leaves_the_weight(kind: torch.dtype, given: torch.dtype) -> None:
    layer = module("nf4_g64_f32", kind=torch.float32)
    x = x_of(3, kind=given).requires_grad_()
    with torch.autocast("cpu", dtype=kind):
        y = layer(x)
    assert torch.equal(y, layer(x.to(kind)))
    assert y.dtype == kind
    y.float().sum().backward()
    assert x.grad.dtype == given


def test_autocast_holds_in_a_compiled_model() -> None:
    torch._dynamo.reset()
    layer = module()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = compiled(x_of(3, kind=torch.float32))
    assert torch.equal(y, layer(x_of(3, kind=torch.float32).bfloat16()))


@pytest.mark.parametrize("first", ["inside", "outside"])
def test_the_first_use_may_be_in_inference_mode_or_not(first: str) -> None:
    layer, x = module(), x_of(3)
    for where in [first, {"inside": "outside", "outside": "inside"}[first], first]:
        with torch.inference_mode(where == "inside"):
            y = layer(x)
        assert y.is_inference() == (where == "inside")
        if where == "outside":
            layer(given := x.clone().requires_grad_()).sum().backward()
            assert given.grad.any()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 6)], ids=str)
def test_vmap_over_x_is_a_loop_over_x(shape: tuple[int, ...], dim: int) -> None:
    layer, x = module(), x_of(*shape)
    looped = torch.stack([layer(each) for each in x.unbind(dim)])
    assert torch.equal(torch.vmap(layer, in_dims=dim)(x), looped)


@pytest.mark.parametrize("activation", ["", "gelu"])
@pytest.mark.parametrize("moved", [("x",), ("bias",), ("x", "bias", "residual")], ids="-".join)
def test_forward_mode_is_the_same_layer_of_the_tangent(moved: tuple[str, ...], activation: str) -> None:
    """The op alone would drop tangents without a word."""
    w = w4gen.Weight.from_float(torch.randn(10, 70), "int4_g64")
    given = {"x": torch.randn(3, 70), "bias": torch.randn(10), "residual": torch.randn(3, 10)}
    tangents = {name: torch.randn_like(given[name]) for name in moved}
    gelu = torch.nn.functional.gelu if activation else lambda sums: sums

    def ours(chosen: dict[str, torch.Tensor]) -> torch.Tensor:
        return w4gen.linear(w=w, activation=activation, **(given | chosen))

    def plain(chosen: dict[str, torch.Tensor]) -> torch.Tensor:
        all = given | chosen
        return gelu(torch.nn.functional.linear(all["x"], w.dequantize(), all["bias"])) + all["residual"]

    chosen = {name: given[name] for name in moved}
    for found, expected in zip(torch.func.jvp(ours, (chosen,), (tangents,)), torch.func.jvp(plain, (chosen,), (tangents,))):
        torch.testing.assert_close(found, expected)
    with forward_ad.dual_level():
        y = ours({name: forward_ad.make_dual(chosen[name], tangents[name]) for name in moved})
        torch.testing.assert_close(forward_ad.unpack_dual(y).tangent, expected)


def test_a_module_has_its_jacobian_forward() -> None:
    layer, x = module(kind=torch.float32), x_of(3, kind=torch.float32)
    found = torch.func.jacfwd(layer)(x)
    expected = layer.weight.dequantize()
    for row in range(3):
        torch.testing.assert_close(found[row, :, row], expected)
        assert not found[row, :, row - 1].any()


def test_vmap_over_a_bias_is_refused() -> None:
    x, w = x_of(3), module().weight
    with pytest.raises(ShapeError, match="vmap over weights, biases or residuals of w4gen layers is not there: map over x alone"):
        torch.vmap(lambda bias: w4gen.linear(x, w, bias))(torch.zeros(4, 20).half())


@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64", "uint4_g50_m"])
def test_gradients_are_those_of_the_dequantized_layer(form: str) -> None:
    layer = module(form, kind=torch.float32)
    layer.bias.requires_grad_()
    w, bias = layer.weight.dequantize(), layer.bias.detach().clone().requires_grad_()
    x, dense_x, dy = (
        x_of(4, kind=torch.float32).requires_grad_(),
        x_of(4, kind=torch.float32).requires_grad_(),
        torch.randn(4, 20),
    )
    layer(x).backward(dy)
    torch.nn.functional.linear(dense_x, w, bias).backward(dy)
    assert torch.allclose(x.grad, dense_x.grad, rtol=1e-5, atol=1e-6)
    assert torch.allclose(layer.bias.grad, bias.grad)


def test_a_gradient_of_a_gradient_is_the_layer_again() -> None:
    layer = module(bias=False, kind=torch.float32)
    x, dy = x_of(3, kind=torch.float32).requires_grad_(), torch.randn(3, 20, requires_grad=True)
    (dx,) = torch.autograd.grad(layer(x), x, dy, create_graph=True)
    (ddy,) = torch.autograd.grad(dx, dy, x_of(3, kind=torch.float32))
    assert torch.equal(ddy, layer(x_of(3, kind=torch.float32)))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("n", [20, 256])
def test_rows_of_a_batch_invariant_fallback_do_not_depend_on_the_batch(n: int, kind: torch.dtype) -> None:
    case = cases.call("nf4_g64", 70, n, 1000, kind, bias=True)
    layer = w4gen.Linear(case.w, case.bias, batch_invariant=True)
    whole = layer(case.x)
    assert case.error(whole) <= case.limit()
    for low, high in ((0, 1), (3, 5), (5, 21), (0, 64), (69, 70)):
        assert torch.equal(layer(case.x[low:high]), whole[low:high])
    shifted = torch.zeros(70 * 1000 + 1, dtype=kind)[1:].view(70, 1000).copy_(case.x)
    assert torch.equal(layer(shifted), whole)
    assert layer(case.x[:0]).shape == (0, n)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", activations.ALL)
def test_an_epilogue_is_rounded_once(activation: str, residual: bool, kind: torch.dtype) -> None:
    if activation == activations.PAIRED and residual:
        with pytest.raises(ShapeError, match="silu_mul takes an even N, here 20, and no residual"):
            w4gen.linear(x_of(3), module().weight, activation=activation, residual=torch.zeros(3, 20))
        return
    case = cases.call("nf4_g64", 6, 20, 200, kind, bias=True)
    added = torch.randn(2, 3, 20).to(kind) if residual else None
    y = w4gen.Linear(case.w, case.bias, activation=activation)(case.x.reshape(2, 3, 200), added)
    truth = activations.activated(case.truth(), activation)
    truth = truth + added.reshape(6, 20).double().numpy() if residual else truth
    assert y.shape == (2, 3, truth.shape[1])
    assert oracle.error(y.reshape(truth.shape).double().numpy(), truth) <= oracle.limit(cases.NAMES[kind], truth.size, 1, 200)
    if kind == torch.float16:
        found = torch.library.opcheck(torch.ops.w4gen.linear, epilogue(case, activation, added))
        assert set(found.values()) == {"SUCCESS"}


def epilogue(case: cases.Call, activation: str, residual: torch.Tensor | None) -> tuple:
    w, added = case.w, None if residual is None else residual.reshape(-1, case.w.n)
    return case.x, list(w.buffers), case.bias, w.n, str(w.format), str(w.layout), False, activation, added, VERSION


@pytest.mark.parametrize("activation", ["gelu", activations.PAIRED, ""])
def test_gradients_go_through_an_epilogue(activation: str) -> None:
    layer = module(kind=torch.float32)
    layer.activation = activation
    x, plain = (x_of(3, kind=torch.float32).requires_grad_() for _ in range(2))
    residual = None if activation == activations.PAIRED else torch.randn(3, 20, requires_grad=True)
    y = layer(x, residual)
    sums = torch.nn.functional.linear(plain, layer.weight.dequantize(), layer.bias)
    silu = torch.nn.functional.silu
    expected = {"": lambda: sums, "gelu": lambda: torch.nn.functional.gelu(sums)}.get(
        activation, lambda: silu(sums[:, ::2]) * sums[:, 1::2]
    )()
    y.square().sum().backward()
    (expected if residual is None else expected + residual.detach()).square().sum().backward()
    assert torch.allclose(x.grad, plain.grad, rtol=1e-4, atol=1e-5)
    assert residual is None or torch.allclose(residual.grad, 2 * y.detach())


def test_the_op_itself_has_no_gradient_of_an_activation_and_says_so() -> None:
    case = cases.call("nf4_g64", 3, 20, 200)
    case.x.requires_grad_()
    y = torch.ops.w4gen.linear(*epilogue(case, "silu", None))
    with pytest.raises(W4Error, match=r"activation=silu in the op has no gradient: apply it after the op"):
        y.sum().backward()


@pytest.mark.parametrize("form", ["int4_g128", "uint4_g32_m", "nf4_g64", "q4_k", "int3_g64"])
def test_two_weights_are_paired_row_by_row(form: str) -> None:
    gate, up = (w4gen.Weight.from_float(torch.randn(16, 256), form) for _ in range(2))
    pair, x = w4gen.Weight.paired(gate, up), x_of(3)[:, :1].repeat(1, 256)
    assert torch.equal(pair.dequantize()[::2], gate.dequantize())
    assert torch.equal(pair.dequantize()[1::2], up.dequantize())
    y = w4gen.linear(x.float(), pair, activation="silu_mul")
    assert torch.allclose(y, torch.nn.functional.silu(w4gen.linear(x.float(), gate)) * w4gen.linear(x.float(), up), rtol=1e-4)


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [("int4_g128", "nf4_g64", "make no pairs of rows"), ("nvfp4", "nvfp4", "scale.scale belong to a whole weight")],
)
def test_weights_that_make_no_pair_are_refused(one: str, other: str, message: str) -> None:
    gate, up = (w4gen.Weight.from_float(torch.randn(16, 256), form) for form in (one, other))
    with pytest.raises(ShapeError, match=message):
        w4gen.Weight.paired(gate, up)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "tanh"}, r"activation='tanh': use one of relu, gelu, gelu_tanh, silu, silu_mul"),
        ({"residual": torch.zeros(3, 19)}, r"residual is \[3, 19\]; y is \[3, 20\]"),
        ({"residual": torch.zeros(3, 20).to("meta")}, r"residual on meta: move all of them to one device"),
        ({"activation": "silu_mul", "out": torch.zeros(3, 20).half()}, r"y is torch.float16\[3, 10\]"),
    ],
)
def test_an_epilogue_that_does_not_fit_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        w4gen.linear(x_of(3), module().weight, **options)
