"""Models that others loaded: which layers are replaced, which are left and why, and what is kept of them."""

from __future__ import annotations

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from test_load import GPTQ, quantized

import w4gen

transformers = pytest.importorskip("transformers")
IDS = torch.arange(8)[None]


class Foreign(torch.nn.Module):
    """A layer whose tensors are those of a file."""

    def __init__(self, tensors: dict[str, torch.Tensor], n: int, k: int) -> None:
        super().__init__()
        self.in_features, self.out_features = k, n
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


class TorchLinear(Foreign):
    """What GPTQModel calls its layer that keeps the tensors of the file, zeros brought to the second version."""

    def qzero_format(self) -> int:
        return 2


def small(**changes: object) -> torch.nn.Module:
    torch.manual_seed(0)
    stated = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, attention_bias=True,
        mlp_bias=True,
        **changes,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(stated).eval()


def loaded(kind: type[Foreign] = TorchLinear) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A model as Transformers loads it from a GPTQ checkpoint, and the dense model that it stands for."""
    dense, rng = small(), np.random.default_rng(0)
    model = copy.deepcopy(dense)
    for name, module in dense.named_modules():
        if type(module) is torch.nn.Linear and name != "lm_head":
            tensors, weight = quantized(module.weight, rng)
            module.weight = torch.nn.Parameter(weight)
            held = tensors if module.bias is None else {**tensors, "bias": module.bias.detach()}
            model.set_submodule(name, kind(held, *weight.shape))
    model.config.quantization_config = {**GPTQ, "checkpoint_format": "gptq"}
    return model, dense


def test_layers_are_replaced_in_place_and_the_model_answers_as_before():
    model, dense = loaded()
    done = w4gen.accelerate(model)
    assert torch.allclose(model(IDS).logits, dense(IDS).logits, atol=1e-4)
    assert len(done.replaced) == 14
    assert model.model.layers[0].mlp.down_proj.order is None
    assert done.replaced[0] == ("model.layers.0.self_attn.q_proj", "gptq", "uint4_g32_z")
    assert [(each.name, each.reason) for each in done.left] == [("lm_head", "its weight is not quantized")]
    assert str(done).splitlines() == [
        "14 layers of gptq run from codes (uint4_g32_z)",
        "left lm_head (1): its weight is not quantized",
    ]
    assert w4gen.accelerate(model).replaced == ()
    assert model.to(torch.float16)(IDS).logits.dtype == model.half().dtype == torch.float16


def test_what_was_replaced_is_saved_and_loaded(tmp_path):
    model, _ = loaded()
    w4gen.accelerate(model)
    model.save_pretrained(tmp_path)
    for again in (w4gen.load(tmp_path, torch.float32), transformers.AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert again.model.layers[0].mlp.up_proj.order is not None
        assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda layer: setattr(layer, "g_idx", torch.full((64,), 9)), "up_proj.g_idx: names groups 9…9 of 2"),
        (lambda layer: layer.register_forward_hook(lambda *_: None), "it has hooks"),
        (lambda layer: setattr(layer, "out_features", 97), r"its codes are [96, 64], the module is [97, 64]"),
        (lambda layer: layer.scales.fill_(torch.nan), "do not hold a weight"),
        (lambda layer: layer.__delattr__("scales"), "up_proj.scales: missing"),
    ],
)
def test_a_layer_that_cannot_be_read_is_left_with_the_reason(harm, reason):
    model, _ = loaded()
    layer = model.model.layers[1].mlp.up_proj
    harm(layer)
    done = w4gen.accelerate(model)
    told = {each.name: each.reason for each in done.left}
    assert reason in told["model.layers.1.mlp.up_proj"]
    assert model.model.layers[1].mlp.up_proj is layer
    assert len(done.replaced) == 13
    assert model.config.quantization_config["quant_method"] == "gptq"


def test_codes_that_may_have_been_reordered_are_left():
    model, _ = loaded(type("MarlinLinear", (Foreign,), {}))
    done = w4gen.accelerate(model)
    assert done.replaced == ()
    assert {each.reason for each in done.left} == {
        "its weight is not quantized",
        "a MarlinLinear may have reordered its codes: load it as TorchLinear, or the files by w4gen.load",
    }
    assert "no layer was replaced" in str(done)
    model.config.quantization_config |= {"quant_method": "auto-round"}
    told = "a MarlinLinear may have reordered its codes: load the files by w4gen.load"
    assert told in {each.reason for each in w4gen.accelerate(model).left}


def test_codes_without_a_dialect_are_left():
    model, _ = loaded()
    other = type("FP8Linear", (torch.nn.Linear,), {})(4, 4)
    done = w4gen.accelerate(torch.nn.Sequential(other))
    assert [each.reason for each in done.left] == ["the tensors of a FP8Linear are of no dialect that is read"]
    model.config.quantization_config = None
    assert {each.reason for each in w4gen.accelerate(model).left} == {
        "its weight is not quantized",
        "the tensors of a TorchLinear are of no dialect that is read",
    }
    assert len(w4gen.accelerate(model, {**GPTQ, "checkpoint_format": "gptq"}).replaced) == 14


def test_a_layer_is_freed_before_the_next_is_replaced(monkeypatch):
    model, _ = loaded()
    held = [weakref.ref(module) for module in model.modules() if isinstance(module, Foreign)]
    alive, read = [], w4gen.checkpoints.dialects.read

    def counted(*given):
        gc.collect()
        alive.append(sum(each() is not None for each in held))
        return read(*given)

    monkeypatch.setattr("w4gen.checkpoints.dialects.read", counted)
    w4gen.accelerate(model)
    assert alive == list(range(14, 0, -1))


def test_bitsandbytes_layers_are_replaced():
    bnb = pytest.importorskip("bitsandbytes")
    for nested in (False, True):
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64, bias=False))
        for name, module in list(model.named_children()):
            how = {"quant_type": "nf4", "compress_statistics": nested}
            layer = bnb.nn.Linear4bit(*module.weight.shape[::-1], module.bias is not None, **how)
            layer.load_state_dict(module.state_dict())
            model.set_submodule(name, layer.to("cpu"))
        x = torch.randn(3, 64)
        truth = [bnb.functional.dequantize_4bit(each.weight.data, each.weight.quant_state).float() for each in model]
        done = w4gen.accelerate(model, {"quant_method": "bitsandbytes", "load_in_4bit": True})
        assert len(done.replaced) == 2
        for layer, weight in zip(model, truth, strict=True):
            assert torch.equal(layer.weight.dequantize(), weight)
        assert model(x).shape == (3, 64)


def test_hqq_layers_are_replaced():
    hqq = pytest.importorskip("hqq.core.quantize")
    linear = torch.nn.Linear(64, 48)
    settings = hqq.BaseQuantizeConfig(nbits=4, group_size=32, axis=1)
    model = torch.nn.Sequential(hqq.HQQLinear(linear, settings, compute_dtype=torch.float32, device="cpu"))
    truth = model[0].dequantize()
    assert len(w4gen.accelerate(model, {"quant_method": "hqq"}).replaced) == 1
    assert torch.allclose(model[0].weight.dequantize(), truth, atol=1e-6)


def test_compressed_tensors_layers_are_replaced():
    pytest.importorskip("compressed_tensors")
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    said = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"],
    }  # fmt: skip
    stated = transformers.CompressedTensorsConfig(**{key: said[key] for key in said if key != "quant_method"})
    model = small()
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import apply_quantization_config

    compressor = ModelCompressor.from_compression_config(stated)
    apply_quantization_config(model, compressor.quantization_config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.data = module.weight.data.reshape(module.weight.shape[0], -1, 32).abs().amax(-1) / 7
    compressor.compress_model(model)
    model.config.quantization_config = said
    other = copy.deepcopy(model)
    done = w4gen.accelerate(model)
    assert len(done.replaced) == 14, str(done)
    compressor.decompress_model(other)
    for name, kind, _ in done.replaced:
        assert kind == "compressed-tensors"
        assert torch.equal(model.get_submodule(name).weight.dequantize(), other.get_submodule(name).weight)
    assert torch.allclose(model(IDS).logits, other(IDS).logits, atol=1e-5)
    assert isinstance(model.model.layers[0].mlp.up_proj, w4gen.Linear)
