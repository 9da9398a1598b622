"""The op, the function and the module on a CPU, where the fallback answers."""

from __future__ import annotations

import copy
import io
import pickle

import cases
import oracle
import pytest
import torch

import w4gen
from w4gen.errors import ShapeError, W4Error
from w4gen.ir.layout import rows

KINDS = [torch.float16, torch.bfloat16, torch.float32]
MORE = [*cases.ZEROS, "e2m1_g32", "int8_g128", cases.CUBES]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("m", [1, 17])
@pytest.mark.parametrize(
    "form", ["int4_g128", "nf4_g64", "int4_g50", "nf4_row", *cases.ZEROS, "e2m1_g32", "int8_g128", cases.CUBES], ids=str
)
def test_the_fallback_is_near_the_truth(form: object, m: int, kind: torch.dtype) -> None:
    case = cases.call(form, m, 66, 300, kind, bias=True)
    assert case.error(w4gen.linear(case.x, case.w, case.bias)) <= case.limit()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_fallback_stands_an_outlier_and_a_long_row(kind: torch.dtype) -> None:
    case = cases.call("int4_g128", 1, 64, 28672, kind)
    case.x[0, 77] = 6e4
    assert case.error(w4gen.linear(case.x, case.w)) <= case.limit()


@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3), (0,), (2, 0), (1, 1, 1)], ids=str)
def test_x_may_have_any_leading_shape(shape: tuple[int, ...]) -> None:
    case = cases.call("nf4_g64", 1, 10, 70, bias=True)
    x = torch.randn(*shape, 70, generator=torch.Generator().manual_seed(0)).half()
    y = w4gen.linear(x, case.w, case.bias)
    assert (y.shape, y.dtype) == ((*shape, 10), torch.float16)
    if x.numel():
        assert case.error(y, x) <= case.limit(outputs=y.numel())


def test_y_may_be_given() -> None:
    case = cases.call("nf4_g64", 3, 10, 70)
    out = torch.full((3, 10), torch.nan, dtype=torch.float16)
    assert w4gen.linear(case.x, case.w, out=out) is out
    assert torch.equal(out, w4gen.linear(case.x, case.w))


def test_a_bias_of_another_float_type_is_taken() -> None:
    case = cases.call("nf4_g64", 3, 10, 70, bias=True)
    assert torch.equal(w4gen.linear(case.x, case.w, case.bias.float()), w4gen.linear(case.x, case.w, case.bias))


X, B = torch.zeros(2, 70, dtype=torch.float16), torch.zeros(10, dtype=torch.float16)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (X[:, :69], {}, r"x has shape \[2, 69\]; its last dimension must be K=70, the inputs of the weight \[10, 70\]"),
        (X[0, 0], {}, r"x has shape \[\]"),
        (X.T, {}, r"x has shape \[70, 2\]"),
        (X.int(), {}, r"x is torch.int32: use float16, bfloat16 or float32"),
        (X.double(), {}, r"x is torch.float64: use float16, bfloat16 or float32"),
        (X.to("meta"), {}, r"x is on meta, codes on cpu, scale on cpu, codebook on cpu: move all of them to one device"),
        (X, {"bias": B[:9]}, r"bias is \[9\]; the weight needs \[10\]"),
        (X, {"bias": B[None]}, r"bias is \[1, 10\]"),
        (X, {"bias": B.to("meta")}, r"x is on cpu, codes on cpu, .*, bias on meta: move all of them to one device"),
        (X, {"out": torch.zeros(2, 9, dtype=torch.float16)}, r"out is torch.float16\[2, 9\]"),
        (X, {"out": torch.zeros(2, 10)}, r"out is torch.float32\[2, 10\]"),
    ],
)
def test_what_does_not_fit_the_weight_is_refused_in_one_line(x: torch.Tensor, options: dict, message: str) -> None:
    with pytest.raises(ShapeError, match=message) as caught:
        w4gen.linear(x, cases.call("nf4_g64", 1, 10, 70).w, **options)
    assert "\n" not in str(caught.value)


def module(form: str = "nf4_g64", bias: bool = True, seed: int = 0) -> w4gen.Linear:
    torch.manual_seed(seed)
    return w4gen.Linear.from_float(torch.nn.Linear(200, 20, bias=bias), form)


def x_of(rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 200, generator=torch.Generator().manual_seed(1)).half()


def same_weight(a: w4gen.Linear, b: w4gen.Linear) -> bool:
    return torch.equal(a.weight.dequantize(torch.float64), b.weight.dequantize(torch.float64))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64"])
def test_from_float_stands_in_for_a_linear_layer(form: str, bias: bool) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(200, 20, bias=bias)
    layer = w4gen.Linear.from_float(plain, form)
    assert (layer.in_features, layer.out_features) == (200, 20)
    assert not list(layer.parameters())
    y, expected = layer(x_of()), plain(x_of().float())
    assert oracle.error(y.double().numpy(), expected.detach().double().numpy()) <= 0.15
    exact = x_of().double() @ layer.weight.dequantize(torch.float64).T + (plain.bias.half().double() if bias else 0)
    assert oracle.error(y.double().numpy(), exact.detach().numpy()) <= oracle.limit("f16", y.numel())


def test_a_bias_of_another_shape_is_refused_when_the_layer_is_made() -> None:
    weight = module().weight
    for shape in ((3,), (1, 20), (), (21,)):
        with pytest.raises(w4gen.W4Error, match=r"bias is \[.*\]; the weight needs \[20\]"):
            w4gen.Linear(weight, torch.zeros(shape))


def test_a_bias_is_kept_and_not_shared() -> None:
    plain = torch.nn.Linear(200, 20)
    layer = w4gen.Linear.from_float(plain, "nf4_g64")
    assert torch.equal(layer.bias, plain.bias)
    plain.bias.data.zero_()
    assert layer.bias.any()


@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64", "uint4_g128_z", "uint4_g32_m", "int8_g128"])
def test_a_state_dict_loads_into_a_fresh_module(form: str) -> None:
    layer, fresh = module(form), module(form, seed=1)
    assert not same_weight(layer, fresh)
    result = fresh.load_state_dict(layer.state_dict(), strict=True)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert same_weight(layer, fresh)
    assert torch.equal(layer(x_of()), fresh(x_of()))


@pytest.mark.parametrize("run", [4, 16])
def test_a_state_dict_of_another_layout_loads(run: int) -> None:
    layer, fresh = module(), module(seed=1)
    stored = w4gen.Linear(layer.weight.packed_as(rows(20, 200, 4, run)), layer.bias)
    assert stored.codes.shape != fresh.codes.shape or run == 4
    fresh.load_state_dict(stored.state_dict(), strict=True)
    assert same_weight(layer, fresh)
    assert torch.equal(layer(x_of()), fresh(x_of()))


def test_a_state_dict_loads_inside_a_model() -> None:
    model, fresh = (torch.nn.Sequential(module(seed=s), torch.nn.ReLU(), torch.nn.Linear(20, 2).half()) for s in (0, 1))
    fresh.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(model(x_of()), fresh(x_of()))


def test_a_state_dict_goes_through_a_file_of_tensors_only() -> None:
    """torch.load's default, weights_only=True."""
    file = io.BytesIO()
    layer, fresh = module(), module(seed=1)
    torch.save(layer.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert same_weight(layer, fresh)


@pytest.mark.parametrize(
    ("other", "held"),
    [("int4_g64", "int4_g128"), ("uint4_g64_z", "int4_g64"), ("int4_g64", "uint4_g64_m"), ("uint4_g32_m", "nf4_g64_m")],
)
def test_a_state_dict_of_another_format_loads_as_that_format(other: str, held: str) -> None:
    layer, fresh = module(other), module(held, seed=1)
    fresh.load_state_dict(layer.state_dict(), strict=True)
    assert fresh.format == layer.format
    assert same_weight(layer, fresh)


def test_a_state_dict_of_another_size_is_refused() -> None:
    other = w4gen.Linear.from_float(torch.nn.Linear(200, 21), "nf4_g64")
    with pytest.raises((W4Error, RuntimeError)):
        module().load_state_dict(other.state_dict(), strict=True)


@pytest.mark.parametrize("move", ["half", "bfloat16", "float", "double", "cpu"])
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64_f32", "uint4_g64_z"])
def test_moving_a_module_never_changes_its_codes(form: str, move: str) -> None:
    layer, before = module(form), module(form)
    moved = getattr(layer, move)()
    assert moved is layer
    assert same_weight(layer, before)
    assert {name: each.dtype for name, each in layer.named_buffers() if name != "bias"} == {
        name: each.dtype for name, each in before.named_buffers() if name != "bias"
    }


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_to_a_dtype_moves_the_bias_only(kind: torch.dtype) -> None:
    layer, before = module(), module()
    layer.to(kind)
    assert layer.bias.dtype == kind
    assert same_weight(layer, before)
    assert oracle.error(layer(x_of().to(kind)).double().numpy(), before(x_of()).double().numpy()) <= 1e-2


def test_to_a_device_moves_every_buffer() -> None:
    layer = module().to("meta")
    assert {each.device.type for each in layer.buffers()} == {"meta"}


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_equal_and_their_own(how: str) -> None:
    layer = module()
    match how:
        case "deepcopy":
            twin = copy.deepcopy(layer)
        case "pickle":
            twin = pickle.loads(pickle.dumps(layer))
        case _:
            file = io.BytesIO()
            torch.save(layer, file)
            file.seek(0)
            twin = torch.load(file, weights_only=False)
    assert torch.equal(twin(x_of()), layer(x_of()))
    twin.codes.zero_()
    assert layer.codes.any()


def test_a_module_prints_what_it_is() -> None:
    assert str(module()) == "Linear(in_features=200, out_features=20, format=nf4_g64, bias=True)"


def test_no_gradient_is_asked_of_the_weight() -> None:
    layer = module()
    assert not any(each.requires_grad for each in layer.buffers())


def test_the_fallback_is_exact_for_what_is_not_finite() -> None:
    x = x_of()
    x[1, 5] = torch.inf
    y, clean = module()(x), module()(x_of())
    assert not y[1].isfinite().any()
    assert torch.equal(y[[0, 2]], clean[[0, 2]])
