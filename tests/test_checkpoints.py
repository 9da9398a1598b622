"""Layers that the libraries wrote (`checkpoints/layers/make.py`), read bit for bit; and what is refused of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from w4gen.checkpoints import auto_round, awq, compressed_tensors, gptq, modelopt
from w4gen.checkpoints.layer import Layer
from w4gen.errors import CheckpointError

LAYERS = Path(__file__).parent / "checkpoints/layers"
FILES = sorted(LAYERS.glob("*.safetensors"))
DIALECTS = (auto_round, awq, compressed_tensors, gptq, modelopt)


def written(name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any], torch.Tensor]:
    """The tensors of a layer in a file, what is said of it, and its weight."""
    with safe_open(LAYERS / f"{name}.safetensors", "pt") as file:
        tensors = {each: file.get_tensor(each) for each in file.keys()}  # noqa: SIM118
        said = json.loads(file.metadata()["quantization_config"])
    truth = tensors.pop("truth")
    return {each.removeprefix("layer."): tensor for each, tensor in tensors.items()}, said, truth


def read(tensors: dict[str, torch.Tensor], said: dict[str, Any]) -> Layer:
    (dialect,) = (each for each in DIALECTS if each.claims(said))
    return dialect.read(tensors, said, "layer")


@pytest.mark.parametrize("name", [path.stem for path in FILES])
def test_a_layer_is_read_bit_for_bit(name: str) -> None:
    tensors, said, truth = written(name)
    layer = read(tensors, said)
    w = layer.weight.dequantize()
    if layer.order is not None:
        w = torch.empty_like(w).index_copy_(1, layer.order, w)
    assert torch.equal(w, truth)
    assert (layer.bias is None) == ("bias" not in tensors)
    assert layer.notes == ()


@pytest.mark.parametrize("method", ["auto-round", "intel/auto-round"])
@pytest.mark.parametrize(
    ("name", "packing"),
    [
        *((f"gptq_{bits}", "auto_round:auto_gptq") for bits in (2, 3, 4, 8)),
        *((f"gptq_v2_{bits}", packing) for bits in (2, 3, 4, 8) for packing in ("auto_round", "auto_round:gptqmodel")),
        ("awq_gemm", "auto_round:auto_awq"),
    ],
)
def test_what_auto_round_exports_are_the_tensors_of_others(name: str, packing: str, method: str) -> None:
    tensors, before, truth = written(name)
    said = {"quant_method": method, "packing_format": packing, "data_type": "int", "sym": False, "act_bits": 16}
    said |= {"bits": before["bits"], "group_size": before["group_size"]}
    other = {**said, "bits": 5, "group_size": 7, "extra_config": {"o_proj": {}, ".*lay.*": {"bits": 7}}}
    other["extra_config"]["layer"] = {"bits": before["bits"], "group_size": before["group_size"]}
    for each in (said, other):
        layer = read(tensors, each)
        assert layer.dialect == "auto-round"
        assert torch.equal(layer.weight.dequantize(), truth)
    del other["extra_config"]["layer"]
    with pytest.raises(CheckpointError, match=r"layer\.(qweight|scales): "):
        read(tensors, other)


def test_every_kind_is_there() -> None:
    assert len(FILES) == 26


def test_columns_under_groups_in_any_order_need_an_order() -> None:
    assert read(*written("ct_4_group")[:2]).order is not None
    tensors, said, _ = written("ct_4_group")
    assert read({**tensors, "weight_g_idx": torch.full((96,), -1)}, said).order is None


def test_one_scale_for_the_tensor() -> None:
    tensors, said, _ = written("ct_4_channel_z")
    weights = said["config_groups"]["group_0"]["weights"]
    weights |= {"strategy": "tensor", "symmetric": True}
    layer = read({**tensors, "weight_scale": torch.tensor([0.5])}, said)
    assert layer.format.label == "int4_row_f32"
    assert (layer.parts["scale"] == 0.5).all()


def test_the_most_special_target_counts() -> None:
    tensors, said, truth = written("ct_4_channel_z")
    of_all = {"targets": ["Linear"], "weights": {"num_bits": 8}}
    said["config_groups"] = {"a": of_all, "b": {**said["config_groups"]["group_0"], "targets": ["re:lay"]}}
    assert torch.equal(read(tensors, said).weight.dequantize(), truth)


def test_a_rotation_that_is_in_the_weights_is_no_obstacle() -> None:
    tensors, said, truth = written("ct_4_channel_z")
    assert torch.equal(read(tensors, {**said, "transform_config": OFFLINE}).weight.dequantize(), truth)


NAN = float("nan")
OFFLINE = {"config_groups": {"r1": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "weight_input"}]}}}
ONLINE = {"config_groups": {"v": {"type": "hadamard", "apply": [{"location": "input"}, {"location": "weight_input"}]}}}
ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
BAD: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "awq as gemv": ("awq_gemm", {}, {"version": "gemv"}, "layer.scales"),
    "gemv as gemm": ("awq_gemv", {}, {"version": "gemm"}, "layer.*version or group_size"),
    "an awq kernel to come": ("awq_gemm", {}, {"version": "gemv_fast"}, "convert it to gemm"),
    "another group": ("awq_gemm", {}, {"group_size": 64}, r"layer.scales: has shape \[3, 32\], \[2, 32\]"),
    "no zeros": ("ct_3_group_z", {"weight_zero_point": None}, {}, "layer.weight_zero_point: missing"),
    "no shape": ("ct_4_group", {"weight_shape": torch.tensor([])}, {}, "a slice of a larger one"),
    "another shape": ("ct_4_group", {"weight_shape": torch.tensor([32, 64])}, {}, "layer.weight_packed: has shape"),
    "codes as floats": ("ct_4_group", {"weight_packed": torch.zeros(32, 12)}, {}, "layer.weight_packed: is torch.float32"),
    "zeros as floats": (
        "ct_3_group_z",
        {"weight_zero_point": torch.zeros(3, 3)},
        {},
        "layer.weight_zero_point: is torch.float32",
    ),
    "small floats as floats": (
        "ct_nvfp4",
        {"weight_packed": torch.zeros(32, 12)},
        {},
        "weight_packed: is torch.float32, .*uint8",
    ),
    "powers of two as floats": ("ct_mxfp4", {"weight_packed": torch.zeros(32, 12)}, {}, "weight_packed: is torch.float32"),
    "codes of awq as floats": ("awq_gemm", {"qweight": torch.zeros(96, 4)}, {}, "layer.qweight: is torch.float32"),
    "auto-round of others": ("gptq_4", {}, {**ROUND, "packing_format": "auto_round:fake"}, "'auto_round:fake'.* is not read"),
    "auto-round of floats": ("gptq_4", {}, {**ROUND, "data_type": "mx_fp"}, "data_type='mx_fp'.* is not read"),
    "auto-round with small x": ("gptq_4", {}, {**ROUND, "act_bits": 8}, "act_bits=8 is not read"),
    "auto-round, rotated": ("gptq_4", {}, {**ROUND, "rotation_config": {"a": 1}}, "rotation_config rotates x"),
    "no scheme": ("ct_4_group", {}, {"config_groups": {}}, "no target of config_groups"),
    "another format": ("ct_4_group", {}, {"format": "marlin-24"}, "'marlin-24' is not read"),
    "one packing or the other": ("ct_3_group_z", {"weight_shape": torch.tensor([32, 11])}, {}, "the old and the new packing"),
    "a divisor of 0": ("ct_nvfp4", {"weight_global_scale": torch.zeros(1)}, {}, "layer.weight_global_scale: is"),
    "scales of a device's order": ("modelopt_nvfp4", {"weight_scale": torch.zeros(128, 12)}, {}, "not swizzled"),
    "another algorithm": ("modelopt_nvfp4", {}, {"quant_algo": "FP8"}, "quant_algo=FP8 is not read"),
    "x is scaled first": ("modelopt_nvfp4", {"pre_quant_scale": torch.ones(96)}, {}, "layer.pre_quant_scale: x would have to be"),
    "x is rotated first": ("ct_4_group", {}, {"transform_config": ONLINE}, r"rotates activations \(input\)"),
    "two scales": ("modelopt_nvfp4", {"weight_scale_2": torch.ones(2)}, {}, "one number is needed"),
    "a scale that is no number": ("ct_4_channel_z", {"weight_scale": torch.full((32, 1), NAN)}, {}, "do not hold a weight"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_does_not_agree_is_refused(kind: str) -> None:
    name, changes, settings, told = BAD[kind]
    tensors, said, _ = written(name)
    held = {each: tensor for each, tensor in {**tensors, **changes}.items() if tensor is not None}
    with pytest.raises(CheckpointError, match=told):
        _ = read(held, {**said, **settings}).weight
