"""A layer as any other module: saved, loaded, moved, copied, offloaded, shared. Nothing here needs a GPU."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from pathlib import Path

import cases
import pytest
import torch

import w4gen
from w4gen.errors import FormatError, ShapeError
from w4gen.formats import named
from w4gen.ir.layout import Layout, rows
from w4gen.schedule.arch import ARCHES, M16K16
from w4gen.schedule.stored import fragment_order, layout_for

N, K = 32, 256
FORMATS = ["int4_g128", "nf4_g64", "uint4_g128_z", "int3_g64", "nvfp4", "q4_k"]
ORDERS = ["portable", "sm_80", "sm_90", "gfx942"]
"""Archs by the layouts that their kernels read."""


def module(form: str = "int4_g128", seed: int = 0, bias: bool = True) -> w4gen.Linear:
    torch.manual_seed(seed)
    return w4gen.Linear.from_float(torch.nn.Linear(K, N, bias=bias), form)


def stored_as(form: str, layout: Layout) -> w4gen.Linear:
    layer = module(form)
    return w4gen.Linear(layer.weight.packed_as(layout), layer.bias)


def model(seed: int = 0) -> torch.nn.Module:
    return torch.nn.Sequential(module("int4_g128", seed), torch.nn.ReLU(), torch.nn.Linear(N, 4))


def x_of(rows_: int = 3) -> torch.Tensor:
    return torch.randn(rows_, K, generator=torch.Generator().manual_seed(1))


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return torch.equal(a(x_of()), b(x_of()))


def pointers(layer: torch.nn.Module) -> list[int]:
    return [each.data_ptr() for each in layer.buffers()]


@pytest.mark.parametrize("form", FORMATS)
def test_safetensors_hold_a_state_dict(form: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    layer, fresh = module(form), module(form, seed=1)
    safetensors.save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    fresh.load_state_dict(safetensors.load_file(tmp_path / "layer.safetensors"), strict=True)
    assert same(fresh, layer)


def test_safetensors_save_and_load_a_model(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    one, other = model(), model(seed=1)
    safetensors.save_model(one, tmp_path / "model.safetensors")
    safetensors.load_model(other, tmp_path / "model.safetensors", strict=True)
    assert same(one, other)


@pytest.mark.parametrize("theirs", ORDERS)
@pytest.mark.parametrize("form", FORMATS)
def test_a_state_saved_on_one_arch_loads_on_another(form: str, theirs: str) -> None:
    """Into the same memory: a captured graph goes on with the new weights."""
    saved = stored_as(form, layout_for(named(form), ARCHES[theirs], N, K))
    fresh = module(form, seed=1)
    places, layout = pointers(fresh), fresh.layout
    fresh.load_state_dict(saved.state_dict(), strict=True)
    assert same(fresh, module(form))
    assert (pointers(fresh), fresh.layout) == (places, layout)


def test_what_is_loaded_is_left_as_it_was() -> None:
    saved = stored_as("int4_g128", rows(N, K, 4, 16)).state_dict()
    before = {name: each.clone() for name, each in saved.items()}
    module(seed=1).load_state_dict(saved)
    assert all(torch.equal(saved[name], each) for name, each in before.items())


@pytest.mark.parametrize("theirs", ["int4_g128", "nf4_g64", "nvfp4"])
@pytest.mark.parametrize("how", ["assign", "to_empty", "built on meta"])
def test_a_layer_without_memory_takes_a_state(how: str, theirs: str) -> None:
    saved = stored_as(theirs, layout_for(named(theirs), ARCHES["sm_90"], N, K))
    layer = module(seed=1).to("meta") if how != "built on meta" else module(seed=1)
    if how == "built on meta":
        layer = w4gen.Linear(layer.weight.to("meta"), layer.bias.to("meta"))
    assert {each.device.type for each in layer.buffers()} == {"meta"}
    layer = layer.to_empty(device="cpu") if how == "to_empty" else layer
    layer.load_state_dict(saved.state_dict(), strict=True, assign=how != "to_empty")
    assert layer.format == saved.format
    assert same(layer, saved)


@pytest.mark.parametrize("form", ["int4_g128", "uint4_g32_z", "q4_k"])
def test_a_state_of_another_size_is_refused_by_name(form: str) -> None:
    other = w4gen.Linear.from_float(torch.nn.Linear(K, N + 1), form)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0.codes: a weight \[33, 256\], where the layer has \[32, 256\]"):
        torch.nn.Sequential(module()).load_state_dict(torch.nn.Sequential(other).state_dict())


@pytest.mark.parametrize("strict", [True, False])
def test_a_state_that_does_not_say_how_it_is_stored_is_refused(strict: bool) -> None:
    state = module().state_dict()
    del state["_extra_state"]
    with pytest.raises(RuntimeError, match="_extra_state is missing, which says how codes is stored"):
        module(seed=1).load_state_dict(state, strict=strict)


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"format": "int5"}', b"\xff\xfe"])
def test_a_state_that_says_nonsense_is_refused(text: bytes) -> None:
    state = module().state_dict() | {"_extra_state": torch.tensor(list(text), dtype=torch.uint8)}
    with pytest.raises(FormatError, match=r"does not say how its weight is stored|cannot read the format"):
        module(seed=1).load_state_dict(state)


def test_what_a_state_lacks_is_named() -> None:
    state = module().state_dict()
    del state["scale"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"scale"'):
        module(seed=1).load_state_dict(state)


def test_what_a_state_of_another_format_lacks_is_named_and_nothing_of_it_is_described() -> None:
    state, layer = module("uint4_g32_z").state_dict(), module("int4_g128")
    del state["zero"]
    with pytest.raises(RuntimeError, match="zero is missing, which a weight in uint4_g32_z has"):
        layer.load_state_dict(state, strict=False)
    assert layer.format.label == "int4_g128"


@pytest.mark.parametrize("move", ["half", "bfloat16", "double", "float"])
@pytest.mark.parametrize("form", [*FORMATS, "int4_g128_bf16", "nf4_g64_f32"])
def test_a_change_of_type_changes_no_byte_of_the_weight(form: str, move: str) -> None:
    layer = module(form)
    before = [each.clone() for each in layer.weight.buffers]
    getattr(layer, move)()
    assert all(torch.equal(one, other) and one.dtype == other.dtype for one, other in zip(layer.weight.buffers, before))
    assert layer.bias.dtype == getattr(torch.zeros(1), move)().dtype


def test_no_gradient_is_asked_of_what_is_stored() -> None:
    layer = module().requires_grad_(True).train()
    layer.bias.requires_grad_()
    layer(x_of().requires_grad_()).sum().backward()
    assert [name for name, each in layer.named_buffers() if each.requires_grad] == ["bias"]
    assert all(each.grad is None for each in layer.weight.buffers)
    assert torch.equal(layer.bias.grad, torch.full((N,), 3.0))


def test_a_layer_that_is_quantized_is_not_quantized_again() -> None:
    with pytest.raises(ShapeError, match=r"the layer is quantized already \(int4_g128\): keep it"):
        w4gen.Linear.from_float(module(), "nf4_g64")


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_layer_with_two_names_stays_one_in_a_copy(how: str) -> None:
    tied = torch.nn.ModuleDict({"a": (layer := module(bias=False)), "b": layer})
    twin = copy.deepcopy(tied) if how == "deepcopy" else pickle.loads(pickle.dumps(tied))
    twin.half()
    assert twin["a"] is twin["b"]
    assert same(twin["a"].float(), layer)


def test_a_copy_of_a_layer_that_was_called_in_inference_mode_trains() -> None:
    with torch.inference_mode():
        (layer := module())(x_of())
    twin = copy.deepcopy(layer)
    x = x_of().requires_grad_()
    twin(x).sum().backward()
    assert x.grad.any()


def answer(layer: w4gen.Linear, x: torch.Tensor, pipe: multiprocessing.connection.Connection) -> None:
    pipe.send(layer(x).tolist())


@pytest.mark.slow
def test_a_spawned_process_takes_a_layer() -> None:
    layer, (ours, theirs) = module(), multiprocessing.Pipe()
    process = torch.multiprocessing.get_context("spawn").Process(target=answer, args=(layer, x_of(), theirs))
    process.start()
    assert ours.poll(120)
    assert torch.equal(torch.tensor(ours.recv()), layer(x_of()))
    process.join()


@pytest.mark.parametrize("buffers", [True, False])
def test_accelerate_offloads_a_model(buffers: bool) -> None:
    accelerate = pytest.importorskip("accelerate")
    plain, offloaded = model(), model()
    accelerate.cpu_offload(offloaded, execution_device=torch.device("cpu"), offload_buffers=buffers)
    assert offloaded[0].codes.is_meta == buffers
    for _ in range(2):
        assert same(plain, offloaded)
    assert offloaded[0].codes.is_meta == buffers


def test_accelerate_loads_a_model_built_without_memory(tmp_path: Path) -> None:
    accelerate, safetensors = pytest.importorskip("accelerate"), pytest.importorskip("safetensors.torch")
    plain = model()
    safetensors.save_model(plain, tmp_path / "model.safetensors")
    empty = model(seed=1).to_empty(device="cpu")
    accelerate.load_checkpoint_in_model(empty, str(tmp_path / "model.safetensors"), strict=True)
    assert same(plain, empty)


def test_a_layer_of_blocks_that_are_padded_is_loaded_into_rows() -> None:
    case = cases.call("int4_g128", 1, 24, 200)
    padded = w4gen.Linear(case.w.packed_as(fragment_order(named("int4_g128"), M16K16, 24, 200)))
    fresh = w4gen.Linear(cases.call("int4_g128", 1, 24, 200, seed=1).w)
    fresh.load_state_dict(padded.state_dict())
    assert torch.equal(fresh.weight.codes, case.w.codes)


ORDERS = {
    "short": (torch.arange(199), r"order is torch.int64\[199\]: int64\[200\]"),
    "of another type": (torch.arange(200).int(), r"order is torch.int32\[200\]"),
    "beyond x": (torch.arange(200) + 1, "order names columns 1…200 of x: there are 0…199"),
    "from the end": (torch.arange(200) - 200, "order names columns -200…-1"),
}


@pytest.mark.parametrize("kind", ORDERS)
def test_an_order_that_is_none_is_refused_when_made_and_when_loaded(kind: str) -> None:
    order, told = ORDERS[kind]
    w = cases.call("int4_g128", 1, 24, 200).w
    with pytest.raises(ShapeError, match=told):
        w4gen.Linear(w, order=order)
    for layer in (w4gen.Linear(w), w4gen.Linear(w, order=torch.arange(200))):
        with pytest.raises(RuntimeError, match=told):
            layer.load_state_dict({**layer.state_dict(), "order": order})
