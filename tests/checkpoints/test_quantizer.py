"""The quantization method `w4gen` of Transformers: rounding while loading, saving, loading again."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import w4gen
from w4gen.errors import CheckpointError, FormatError

transformers = pytest.importorskip("transformers")
IDS = torch.arange(8)[None]


@pytest.fixture
def plain(request, tmp_path):
    """A folder of a small model; its head is tied to the embedding where a test asks for it."""
    torch.manual_seed(0)
    stated = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, attention_bias=True,
        tie_word_embeddings=getattr(request, "param", False),
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(stated).eval()
    model.save_pretrained(tmp_path / "plain", max_shard_size="100KB")
    return tmp_path / "plain", model


def loaded(path, **given):
    return transformers.AutoModelForCausalLM.from_pretrained(path, **given)


MIXED = {"*.k_proj": "nf4_g64", "*.mlp.*": "int4_g32", "*": "uint3_g32_z"}


@pytest.mark.parametrize(
    ("plain", "asked", "given"),
    [(False, "nf4_g64", {}), (True, "nvfp4", {"exclude": "*.mlp.*"}), (False, MIXED, {"exclude": ["lm_head"]})],
    indirect=["plain"],
)
def test_a_model_is_rounded_as_it_is_loaded_saved_and_loaded_again(plain, asked, given, tmp_path):
    path, dense = plain
    model = loaded(path, quantization_config=w4gen.W4GenConfig(asked, **given))
    w4gen.convert(dense, asked, **given)
    assert torch.equal(model(IDS).logits, dense(IDS).logits)
    kinds = {name: type(module) for name, module in dense.named_modules()}
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    model.save_pretrained(tmp_path / "out")
    for again in (loaded(tmp_path / "out"), w4gen.load(tmp_path / "out", torch.float32)):
        assert {name: type(module) for name, module in again.named_modules()} == kinds
        assert torch.equal(again(IDS).logits, model(IDS).logits)
        assert not any(each.is_meta for each in (*again.parameters(), *again.buffers()))


def test_a_converted_model_is_saved_and_loaded(plain, tmp_path):
    _, model = plain
    w4gen.convert(model, {"*.k_proj": "nf4_g64", "*": "int4_g32"}, exclude="*.0.mlp.*")
    truth = model(IDS).logits
    model.save_pretrained(tmp_path / "out")
    for again in (w4gen.load(tmp_path / "out", torch.float32), loaded(tmp_path / "out")):
        assert torch.equal(again(IDS).logits, truth)
        found = again.model.layers[0]
        assert (found.self_attn.k_proj.format.label, found.self_attn.q_proj.format.label) == ("nf4_g64", "int4_g32")
        assert type(found.mlp.up_proj) is torch.nn.Linear


def test_a_gated_model_is_saved_under_the_names_of_its_layers(plain, tmp_path):
    _, model = plain
    w4gen.convert(model, "int4_g32")
    truth = model(IDS).logits
    assert any("mlp.up_proj" in name for each in w4gen.merge(model, gated=True).merged for name in each.names)
    model.save_pretrained(tmp_path / "out")
    for again in (w4gen.load(tmp_path / "out", torch.float32), loaded(tmp_path / "out")):
        assert torch.equal(again(IDS).logits, truth)
        assert again.model.layers[0].mlp.gate_proj.format.label == "int4_g32"


def test_what_was_left_is_converted_later_and_saved(plain, tmp_path):
    path, _ = plain
    model = loaded(path, quantization_config=w4gen.W4GenConfig("nf4_g64", exclude="lm_head"))
    w4gen.convert(model, "int8_g64")
    model.save_pretrained(tmp_path / "out")
    again = w4gen.load(tmp_path / "out", torch.float32)
    assert (again.lm_head.format.label, again.model.layers[1].mlp.up_proj.format.label) == ("int8_g64", "nf4_g64")
    assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("said", [{"quant_method": "gptq", "bits": 4}, transformers.GPTQConfig(4)])
def test_a_model_that_others_quantized_keeps_their_way_of_saving(said, plain, caplog):
    _, model = plain
    model.config.quantization_config = said
    w4gen.convert(model, "int4_g32", include="lm_head")
    assert model.config.quantization_config is said
    assert "save_pretrained will lose the layers that were converted: others quantized" in caplog.text


def test_a_release_that_has_no_such_methods_is_told(plain, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "w4gen.checkpoints.quantizer", None)
    monkeypatch.delattr("w4gen.checkpoints.quantizer", raising=False)
    assert len(w4gen.convert(plain[1], "int4_g32").converted) == 15
    assert "this release of Transformers is too old" in caplog.text


def test_what_is_saved_twice_is_the_same(plain, tmp_path):
    path, _ = plain
    loaded(path, quantization_config=w4gen.W4GenConfig("nf4_dq")).save_pretrained(tmp_path / "a")
    loaded(tmp_path / "a").save_pretrained(tmp_path / "b")
    one, two = (load_file(tmp_path / each / "model.safetensors") for each in "ab")
    assert one.keys() == two.keys()
    assert all(torch.equal(each, two[name]) for name, each in one.items())
    assert {name.rpartition(".")[2] for name in one if "q_proj" in name} == {
        "weight_packed", "weight_shape", "weight_scale", "weight_scale_scale", "weight_scale_zero_point",
        "weight_scale_codebook", "bias",
    }  # fmt: skip
    stated = [json.loads((tmp_path / each / "config.json").read_text())["quantization_config"] for each in "ab"]
    assert stated[0] == stated[1]
    assert stated[0]["quant_method"] == "w4gen"


def test_the_folder_of_the_command_is_loaded_by_transformers(plain, tmp_path):
    from w4gen.checkpoints.convert import convert

    path, dense = plain
    convert(path, tmp_path / "out", "int4_g32", "lm_head")
    w4gen.convert(dense, "int4_g32", exclude="lm_head")
    assert w4gen.W4GenConfig  # it is registered by being named
    assert torch.equal(loaded(tmp_path / "out")(IDS).logits, dense(IDS).logits)


def test_an_unknown_format_is_refused_before_anything_is_loaded():
    with pytest.raises(FormatError, match="unknown format 'int44'"):
        w4gen.W4GenConfig("int44")


@pytest.mark.parametrize("given", [{"format": {"*.zzz": "nf4_g64"}}, {"exclude": ["lm_head", "*.zzz"]}])
def test_a_pattern_that_no_layer_matches_is_refused(given, plain):
    told = r"LlamaForCausalLM: no linear layer matches '\*\.zzz': they are called model\.layers\.\*\.self_attn.*, lm_head"
    with pytest.raises(CheckpointError, match=told):
        loaded(plain[0], quantization_config=w4gen.W4GenConfig(**given))


def test_a_layer_of_other_sizes_is_refused(plain, tmp_path):
    path, _ = plain
    loaded(path, quantization_config=w4gen.W4GenConfig("int4_g32")).save_pretrained(tmp_path / "a")
    file = tmp_path / "a/model.safetensors"
    held = load_file(file)
    held["model.layers.0.mlp.up_proj.weight_scale"] = held["model.layers.0.mlp.up_proj.weight_scale"][:5]
    save_file(held, file, {"format": "pt"})
    with pytest.raises(Exception, match="ignore_mismatched_sizes"):
        loaded(tmp_path / "a")


def test_models_of_torch_alone_import_no_transformers():
    model = "w4gen.convert(torch.nn.Sequential(torch.nn.Linear(32, 32)), 'int4_g32')"
    code = f"import sys, torch, w4gen; w4gen.accelerate; {model}; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
