"""A whole model of gpt-oss from MXFP4 experts, against Transformers with the experts decoded here."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import w4gen
from w4gen.checkpoints import derive
from w4gen.errors import CheckpointError

transformers = pytest.importorskip("transformers")
IDS = torch.arange(12)[None]
TABLE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder as OpenAI publishes it, and the same model with dense experts."""
    path, rng = tmp_path_factory.mktemp("gpt-oss"), np.random.default_rng(0)
    torch.manual_seed(0)
    stated = transformers.GptOssConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, num_local_experts=4, num_experts_per_tok=2, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(stated).eval()
    held = {name: each.clone() for name, each in model.state_dict().items()}
    for name in [name for name in held if name.endswith(("gate_up_proj", "down_proj"))]:
        count, k, n = held.pop(name).shape
        blocks, scales = (
            rng.integers(0, 256, (count, n, k // 32, 16), np.uint8),
            rng.integers(120, 125, (count, n, k // 32), np.uint8),
        )
        codes = np.stack([blocks % 16, blocks // 16], -1).reshape(count, n, k // 32, 32)
        dense = TABLE[codes] * np.exp2(scales.astype(np.float32) - 127)[..., None]
        held |= {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(scales)}
        module, _, part = name.rpartition(".")
        model.get_submodule(module).get_parameter(part).data = (
            torch.from_numpy(dense.reshape(count, n, k)).transpose(1, 2).contiguous()
        )
    said = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (path / "config.json").write_text(
        json.dumps({**stated.to_dict(), "architectures": ["GptOssForCausalLM"], "quantization_config": said})
    )
    save_file(held, path / "model.safetensors")
    return path, model


def test_experts_run_from_codes_one_weight_each(made):
    path, dense = made
    model = w4gen.load(path, torch.float32)
    assert torch.allclose(model(IDS).logits, dense(IDS).logits, atol=1e-4)
    experts = model.model.layers[1].mlp.experts
    assert [(layer.format.label, layer.weight.n, layer.weight.k) for layer in experts.down_proj] == [
        ("mxfp4_g32_e8m0", 64, 96)
    ] * 4
    assert len({name for name, each in model.named_modules() if isinstance(each, w4gen.Linear)}) == 16
    assert not any(each.is_meta for each in (*model.parameters(), *model.buffers()))


def test_it_is_kept_and_packed(made, tmp_path):
    path, _ = made
    model = w4gen.load(path, torch.float32)
    model.save_pretrained(tmp_path / "out")
    packed = derive.pack(tmp_path / "out", "sm_90")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for again in (w4gen.load(tmp_path / "out", torch.float32), w4gen.load(packed, torch.float32), theirs):
        assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_inspect_counts_experts(made):
    found = {each.name: each for each in w4gen.inspect(made[0])}
    down = found["model.layers.*.mlp.experts.down_proj.*"]
    assert (down.count, down.shape, down.dialect, down.format, down.bits) == (8, (64, 96), "mxfp4", "mxfp4_g32_e8m0", 4.25)
    assert not any("_blocks" in name or "_scales" in name for name in found)


def test_experts_without_scales_are_named(made, tmp_path):
    held = load_file(made[0] / "model.safetensors")
    del held["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(held, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((made[0] / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.down_proj\.0\.scales: missing"):
        w4gen.load(tmp_path)
