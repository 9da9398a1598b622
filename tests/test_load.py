"""Models from folders of safetensors, against Transformers with the weights that the layers stand for; and damaged folders."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import oracle
import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import w4gen
from w4gen.checkpoints import derive, folder
from w4gen.checkpoints.convert import convert
from w4gen.cli import cli
from w4gen.errors import CheckpointError

transformers = pytest.importorskip("transformers")
GROUP = 32


def quantized(w: torch.Tensor, rng: np.random.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A weight [N, K] of random codes as GPTQ's second version stores it, its columns under groups in any order; and itself."""
    n, k = w.shape
    index, codes = rng.permutation(np.arange(k) // GROUP), rng.integers(0, 16, (n, k))
    zeros, scales = rng.integers(0, 16, (k // GROUP, n)), rng.uniform(0.001, 0.01, (k // GROUP, n)).astype(np.float16)
    tensors = {
        "qweight": oracle.stream(codes, 4).view(np.int32).T.copy(),
        "qzeros": oracle.stream(zeros, 4).view(np.int32),
        "scales": scales,
        "g_idx": index.astype(np.int32),
    }
    dense = (codes - zeros[index].T) * scales[index].T.astype(np.float64)
    return {name: torch.from_numpy(each) for name, each in tensors.items()}, torch.from_numpy(dense).float()


def quantized_nf4(w: torch.Tensor, rng: np.random.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Random codes as bitsandbytes stores them: the first of a pair in the high half, a scale for 64 in a row over all rows."""
    n, k = w.shape
    codes, scales = rng.integers(0, 16, n * k), rng.uniform(0.01, 0.1, n * k // 64).astype(np.float32)
    facts = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [n, k]}
    tensors = {
        "weight": (codes[::2] << 4 | codes[1::2]).astype(np.uint8)[:, None],
        "weight.absmax": scales,
        "weight.quant_map": np.array(oracle.NF4, np.float32),
        "weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(facts).encode(), np.uint8).copy(),
    }
    dense = np.array(oracle.NF4, np.float32)[codes].reshape(-1, 64) * scales[:, None]
    return {name: torch.from_numpy(each) for name, each in tensors.items()}, torch.from_numpy(dense.reshape(n, k))


def quantized_hqq(w: torch.Tensor, rng: np.random.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Random codes as HQQ stores them: rows of one group each, the first half of them in the high half of the bytes."""
    n, k = w.shape
    codes = rng.integers(0, 16, (n * k // GROUP, GROUP))
    scales, zeros = (rng.uniform(low, high, (len(codes), 1)).astype(np.float16) for low, high in ((0.001, 0.01), (5, 10)))
    tensors = {
        "W_q": (codes[: len(codes) // 2] << 4 | codes[len(codes) // 2 :]).astype(np.uint8),
        "scale": scales,
        "zero": zeros,
        "shape": np.array([n, k]),
        "nbits": np.array(4),
        "axis": np.array(1),
        "packing": np.frombuffer(b"4bit_u8", np.uint8).copy(),
    }
    dense = (codes - zeros.astype(np.float64)) * scales
    return {name: torch.from_numpy(each) for name, each in tensors.items()}, torch.from_numpy(dense.reshape(n, k)).float()


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2", "desc_act": True}
OTHERS = {
    "bitsandbytes": (quantized_nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "hqq": (quantized_hqq, {"quant_method": "hqq"}),
}


def written(
    path: Path, tied: bool = False, head: bool = False, shards: int = 1, way: object = quantized, said: object = GPTQ
) -> torch.nn.Module:
    """A folder of a small Llama whose linear layers are quantized (the head only if asked); and the same model, dense."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    stated = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, tie_word_embeddings=tied,
        attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(stated).eval()
    for name, bias in model.named_parameters():
        torch.nn.init.normal_(bias) if name.endswith("bias") else None
    held = {name: each.clone() for name, each in model.state_dict().items() if not (tied and name.startswith("lm_head"))}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and (head or name != "lm_head"):
            held.pop(f"{name}.weight", None)
            tensors, dense = way(module.weight, rng)
            held |= {f"{name}.{each}": tensor for each, tensor in tensors.items()}
            module.weight = torch.nn.Parameter(dense)
    path.mkdir()
    stated = {**stated.to_dict(), "architectures": ["LlamaForCausalLM"], "quantization_config": said}
    (path / "config.json").write_text(json.dumps(stated))
    if shards == 1:
        save_file(held, path / "model.safetensors")
        return model
    place = {name: f"model-{number % shards + 1:05}-of-{shards:05}.safetensors" for number, name in enumerate(held)}
    for file in set(place.values()):
        save_file({name: held[name] for name in held if place[name] == file}, path / file)
    (path / folder.INDEX).write_text(json.dumps({"weight_map": place}))
    return model


@pytest.mark.parametrize(("tied", "head", "shards"), [(False, False, 1), (True, False, 3), (False, True, 2), (True, True, 1)])
def test_a_model_is_what_its_layers_stand_for(tied: bool, head: bool, shards: int, tmp_path: Path) -> None:
    dense = written(tmp_path / "m", tied, head, shards)
    model = w4gen.load(tmp_path / "m", torch.float32)
    ids = torch.arange(8)[None]
    assert torch.allclose(model(ids).logits, dense(ids).logits, atol=1e-4)
    assert isinstance(model.lm_head, w4gen.Linear) == head
    assert isinstance(model.model.layers[1].mlp.down_proj, w4gen.Linear)
    assert not any(each.is_meta for each in (*model.parameters(), *model.buffers()))
    orders = [layer.mlp.get_submodule(each).order is None for layer in model.model.layers for each in ("down_proj", "up_proj")]
    assert orders == [True, False, True, False]  # down_proj needs no gather of x: the rows before it were put in its order
    if tied and not head:
        assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_of_another_dialect_is_what_its_layers_stand_for(name: str, tmp_path: Path) -> None:
    dense = written(tmp_path / "m", False, True, 2, *OTHERS[name])
    model = w4gen.load(tmp_path / "m", torch.float32)
    ids = torch.arange(8)[None]
    assert torch.allclose(model(ids).logits, dense(ids).logits, atol=1e-4)
    assert isinstance(model.lm_head, w4gen.Linear)
    assert {each.dialect for each in w4gen.inspect(tmp_path / "m")} == {name, "plain"}


def test_a_plain_folder_is_just_loaded(tmp_path: Path) -> None:
    stated = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4
    )
    dense = transformers.LlamaForCausalLM(stated).eval()
    dense.save_pretrained(tmp_path)
    ids = torch.arange(8)[None]
    assert torch.equal(w4gen.load(tmp_path, torch.float32)(ids).logits, dense(ids).logits)


def test_a_layer_with_columns_in_an_order_is_saved_and_loaded(tmp_path: Path) -> None:
    written(tmp_path / "m")
    layer = w4gen.load(tmp_path / "m", torch.float32).model.layers[0].mlp.up_proj
    other = w4gen.Linear.from_float(torch.nn.Linear(64, 96), "int4_g32")
    other.load_state_dict(layer.state_dict())
    x = torch.randn(3, 64)
    assert torch.equal(other(x), layer(x))


def cut(size: int):
    return lambda path: path.write_bytes(path.read_bytes()[:size])


def changed(**settings: object):
    def change(path: Path) -> None:
        stated = json.loads(path.read_text())
        path.write_text(json.dumps({**stated, **settings}))

    return change


def without(name: str):
    def change(path: Path) -> None:
        held = load_file(path)
        save_file({each: tensor for each, tensor in held.items() if each != name}, path)

    return change


def other(name: str, make):
    """A tensor in place of another."""

    def change(path: Path) -> None:
        held = load_file(path)
        save_file({each: make(tensor) if each == name else tensor for each, tensor in held.items()}, path)

    return change


AUTO = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"}


@pytest.mark.parametrize("known", [True, False])
def test_code_that_lies_in_a_folder_is_never_run(known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    written(tmp_path / "m")
    (tmp_path / "m/mine.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom transformers import LlamaConfig as MineConfig\n"
    )
    changed(auto_map=AUTO, model_type="llama" if known else "mine")(tmp_path / "m/config.json")
    if known:
        assert isinstance(w4gen.load(tmp_path / "m"), transformers.LlamaForCausalLM)
    else:
        with pytest.raises(
            CheckpointError, match=r"m: its config.json asks for code of its own \(auto_map\), which is never run"
        ):
            w4gen.load(tmp_path / "m")
    assert not (tmp_path / "ran").exists()


def put(data: bytes):
    return lambda path: path.write_bytes(data)


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
UP = "model.layers.0.mlp.up_proj"
INDEX = f"{UP}.g_idx"
FILE = r"m/model\.safetensors: model\.layers\.0\.mlp\.up_proj"
BAD = {
    "an empty file": (1, "model.safetensors", put(b""), "model.safetensors: it is empty"),
    "a pointer": (1, "model.safetensors", put(b"version https://git-lfs.github.com/spec/v1\noid"), "git lfs pull"),
    "a web page": (1, "model.safetensors", put(b"<!DOCTYPE html><html>"), "a web page stands in its place"),
    "a pickle": (1, "model.safetensors", put(b"PK\x03\x04archive/data.pkl...."), "it is a pickle"),
    "a huge header": (1, "model.safetensors", put(b"\xff" * 7 + b"\x7f{}"), "model.safetensors: not whole or no safetensors"),
    "a cut header": (1, "model.safetensors", cut(100), "model.safetensors: not whole"),
    "cut data": (1, "model.safetensors", cut(-10), "model.safetensors: not whole"),
    "a missing shard": (2, TWO, Path.unlink, f"{TWO}: this shard is missing"),
    "a missing shard, no index": (2, folder.INDEX, lambda p: [p.unlink(), (p.parent / TWO).unlink()], "this shard is missing"),
    "a shard twice": (2, folder.INDEX, lambda p: [p.unlink(), shutil.copy(p.parent / ONE, p.parent / "b.safetensors")],
                      "is in b.safetensors too|b.safetensors: .* is in model"),
    "an index of other files": (2, TWO, without("model.norm.weight"), "model.norm.weight is not in it|is missing"),
    "no config": (1, "config.json", Path.unlink, "config.json: cannot be read"),
    "config that is no JSON": (1, "config.json", put(b"<html>"), "config.json: cannot be read as JSON"),
    "a config of another size": (1, "config.json", changed(vocab_size=65), r"embed_tokens.weight has shape \[64, 64\]"),
    "a config of other layers": (1, "config.json", changed(num_hidden_layers=3),
                                "m: config.json says 3 layers, the names of its tensors count 2"),
    "a lost plain tensor": (1, "model.safetensors", without("model.norm.weight"), r"m: model\.norm\.weight is missing"),
    "a config of fewer layers": (1, "config.json", changed(num_hidden_layers=1), "layers.1.* is no linear layer"),
    "a lost quantization": (1, "config.json", changed(quantization_config=None), "it was lost"),
    "an unknown quantization": (1, "config.json", changed(quantization_config={"quant_method": "quip"}), "'quip' of config.json"),
    "a lost tensor": (1, "model.safetensors", without(INDEX), "up_proj.g_idx: missing"),
    "a list of quantizations": (1, "config.json", changed(quantization_config=[1]), "quantization_config is no JSON object"),
    "a group of nothing": (1, "config.json", changed(quantization_config={**GPTQ, "group_size": 0}), "ZeroDivisionError"),
    "a group in words": (1, "config.json", changed(quantization_config={**GPTQ, "group_size": "32"}), "TypeError"),
    "bits that are no whole number": (1, "config.json", changed(quantization_config={**GPTQ, "bits": 4.0}), "TypeError"),
    "no pattern": (1, "config.json", changed(quantization_config={**GPTQ, "dynamic": {"*": {}}}), "as gptq has them"),
    "codes as floats": (1, "model.safetensors", other(f"{UP}.qweight", lambda t: t.view(torch.float32)),
                        FILE + r"\.qweight: is torch.float32, torch.int32 is needed; the file may be damaged"),
    "zeros as floats": (1, "model.safetensors", other(f"{UP}.qzeros", torch.Tensor.float), FILE + r"\.qzeros: is torch.float32"),
    "whole scales": (1, "model.safetensors", other(f"{UP}.scales", torch.Tensor.int), FILE + ": .* as gptq has them .*int32"),
    "scales that are no numbers": (1, "model.safetensors", other(f"{UP}.scales", lambda t: t * torch.nan), FILE + ": .*gptq"),
    "a short bias": (1, "model.safetensors", other(f"{UP}.bias", lambda t: t[:3]),
                     FILE + r": bias is \[3\]; the weight needs \[96\]: the file may be damaged"),
    "no heads": (1, "config.json", changed(num_attention_heads=0), "Transformers builds no model of its config.json"),
    "a size in words": (1, "config.json", changed(hidden_size="x"), "Transformers builds no model of its config.json"),
    "an index of a list": (2, folder.INDEX, changed(weight_map=["a"]), "weight_map does not name a file for each tensor"),
    "an index of numbers": (2, folder.INDEX, changed(weight_map={"a": 1}), "weight_map does not name a file for each tensor"),
    "only pickles": (1, "model.safetensors", lambda p: p.rename(p.parent / "pytorch_model.bin"), "pytorch_model.bin is a pickle"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_a_damaged_folder_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    shards, file, damage, told = BAD[kind]
    written(tmp_path / "m", shards=shards)
    damage(tmp_path / "m" / file)
    with pytest.raises(CheckpointError, match=told):
        w4gen.load(tmp_path / "m")


OWN = {
    "codes as floats": ("weight_packed", lambda t: t.view(torch.float32), r"\.weight_packed: is torch.float32, torch.int32"),
    "an order of one column": ("weight_order", torch.zeros_like, ": order names 1 columns of x: each of 64 is multiplied once"),
    "an order beyond": ("weight_order", lambda t: t + 1, r": order names columns 1…64 of x"),
    "a short bias": ("bias", lambda t: t[:3], r": bias is \[3\]; the weight needs \[96\]"),
    "scales that are no numbers": ("weight_scale", lambda t: t * torch.nan, ": its w4gen tensors do not hold a weight"),
}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of w4gen's own with biases, and columns in an order."""
    path = tmp_path_factory.mktemp("own")
    written(path / "m")
    w4gen.load(path / "m").save_pretrained(path / "own")
    return path / "own"


@pytest.mark.parametrize("kind", OWN)
def test_a_damaged_folder_of_our_own_is_refused_by_name(kind: str, own: Path, tmp_path: Path) -> None:
    tensor, damage, told = OWN[kind]
    shutil.copytree(own, tmp_path / "m")
    other(f"{UP}.{tensor}", damage)(tmp_path / "m/model.safetensors")
    with pytest.raises(CheckpointError, match=FILE + told):
        w4gen.load(tmp_path / "m")


def test_a_format_of_our_own_that_is_another_layers_is_refused_by_name(own: Path, tmp_path: Path) -> None:
    shutil.copytree(own, tmp_path / "m")
    said = json.loads((tmp_path / "m/config.json").read_text())["quantization_config"]
    assert "group=32" in said["formats"][UP]
    said["formats"][UP] = said["formats"][UP].replace("group=32", "group=16")
    changed(quantization_config=said)(tmp_path / "m/config.json")
    with pytest.raises(CheckpointError, match=FILE + r": .* scales have shape \[96, 2\]; .* need \[96, 4\]"):
        w4gen.load(tmp_path / "m")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, "float16"])
def test_a_type_that_no_layer_takes_is_refused(dtype: object, tmp_path: Path) -> None:
    written(tmp_path / "m")
    with pytest.raises(CheckpointError, match=r"dtype=.*: give torch.float16, torch.bfloat16 or torch.float32"):
        w4gen.load(tmp_path / "m", dtype)  # type: ignore[arg-type]


def test_without_a_type_plain_tensors_stay_as_they_are_stored(tmp_path: Path) -> None:
    dense = written(tmp_path / "m")
    model = w4gen.load(tmp_path / "m", None)
    assert model.lm_head.weight.dtype == torch.float32
    assert torch.equal(model.lm_head.weight, dense.lm_head.weight)
    assert model.half()(torch.arange(8)[None]).logits.dtype == torch.float16


def test_a_tensor_that_no_module_takes_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(tmp_path / "m")
    file = tmp_path / "m/model.safetensors"
    save_file({**load_file(file), "model.layers.0.mlp.act_fn.scales": torch.ones(96)}, file)
    w4gen.load(tmp_path / "m")
    (told,) = (each.getMessage() for each in caplog.records if each.levelname == "WARNING")
    assert told.endswith("model.layers.0.mlp.act_fn.scales was not used")


def test_layers_without_number_are_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain(tmp_path / "a")
    changed(num_hidden_layers=10**9)(tmp_path / "a/config.json")
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("Transformers was asked"))
    with pytest.raises(CheckpointError, match=r"config.json says 1000000000 layers, the names of its tensors count 2"):
        w4gen.load(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"config.json says 1000000000 layers"):
        convert(tmp_path / "a", tmp_path / "b", "int4_g32")


@pytest.mark.parametrize("shards", [1, 2])
def test_files_that_do_not_count_are_warned_of(shards: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(tmp_path / "m", shards=shards)
    folder.read(tmp_path / "m")
    assert not caplog.records
    shutil.copy(min((tmp_path / "m").glob("*.safetensors")), tmp_path / "m/again.safetensors")
    folder.read(tmp_path / "m")
    (told,) = (each.getMessage() for each in caplog.records)
    assert told.endswith(
        f"m: not read, as {'model.safetensors' if shards == 1 else folder.INDEX} is what counts: again.safetensors"
    )


@pytest.mark.parametrize("read", [w4gen.load, folder.read, w4gen.inspect])
def test_a_name_of_the_hub_is_no_path_and_the_way_to_one_is_told(read: Callable[[str], object]) -> None:
    told = r"Qwen/Qwen2\.5-1\.5B: there is no such .*: give a path on this machine; .* or huggingface_hub\.snapshot_download"
    with pytest.raises(CheckpointError, match=told):
        read("Qwen/Qwen2.5-1.5B")


def test_a_file_is_not_converted_and_what_takes_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    done = CliRunner().invoke(cli, ["convert", str(tmp_path / "tiny.gguf"), str(tmp_path / "out")])
    assert isinstance(done.exception, CheckpointError)
    assert re.search(r"tiny\.gguf: it is a file, .*; a GGUF file is quantized already: w4gen\.load runs it", str(done.exception))
    assert not (tmp_path / "out").exists()


def test_inspect_tells_what_becomes_of_each_layer(tmp_path: Path) -> None:
    written(tmp_path / "m")
    found = {each.name: each for each in w4gen.inspect(tmp_path / "m")}
    up = found["model.layers.*.mlp.up_proj"]
    assert (up.count, up.shape, up.dialect, up.format) == (2, (96, 64), "gptq", "uint4_g32_z")
    assert up.bits == 5.0
    assert up.plan == "runs from codes, columns in another order"
    assert found["model.norm.weight"].plan == "stays as it is"
    assert found["model.norm.weight"].bits == 32
    without(INDEX)(tmp_path / "m/model.safetensors")
    refused = [each for each in w4gen.inspect(tmp_path / "m") if "refused" in each.plan]
    assert [(each.name, each.count) for each in refused] == [("model.layers.*.mlp.up_proj", 1)]


def test_inspect_a_folder_from_the_command_line(tmp_path: Path) -> None:
    written(tmp_path / "m")
    done = CliRunner().invoke(cli, ["inspect", str(tmp_path / "m"), "--json"])
    assert {each["name"]: each["format"] for each in json.loads(done.output)}["model.layers.*.mlp.up_proj"] == "uint4_g32_z"


def plain(path: Path) -> torch.nn.Module:
    torch.manual_seed(0)
    stated = transformers.LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    model = transformers.LlamaForCausalLM(stated).eval()
    model.save_pretrained(path, max_shard_size="100KB")
    return model


@pytest.mark.parametrize("form", ["int4_g32", "uint3_g32_z", "nf4_dq", "nvfp4"])
def test_a_converted_folder_is_what_rounding_the_model_gives(form: str, tmp_path: Path) -> None:
    model = plain(tmp_path / "a")
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert len([name for name in before if name.endswith(".safetensors")]) > 1
    command = ["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--format", form, "--exclude", "lm_head", "--json"]
    done = CliRunner().invoke(cli, command)
    assert len(json.loads(done.output)["layers"]) == 14
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before
    w4gen.convert(model, form, exclude="lm_head")
    ids = torch.arange(8)[None]
    loaded = w4gen.load(tmp_path / "b", torch.float32)
    assert not isinstance(loaded.lm_head, w4gen.Linear)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_formats_by_pattern_from_the_command_line(tmp_path: Path) -> None:
    model = plain(tmp_path / "a")
    asked = ["--format", "*.k_proj=nf4_g64", "--format", "*.mlp.*=int4_g32", "--format", "int8_g32"]
    done = CliRunner().invoke(cli, ["convert", str(tmp_path / "a"), str(tmp_path / "b"), *asked])
    told = done.output.strip().rpartition(": ")[2]
    assert sorted(told.split(", ")) == ["2 layers in nf4_g64", "6 layers in int4_g32", "7 layers in int8_g32"]
    w4gen.convert(model, {"*.k_proj": "nf4_g64", "*.mlp.*": "int4_g32", "*": "int8_g32"})
    ids = torch.arange(8)[None]
    assert torch.equal(w4gen.load(tmp_path / "b", torch.float32)(ids).logits, model(ids).logits)


def test_groups_are_clipped_where_that_is_asked_for(tmp_path: Path) -> None:
    model = plain(tmp_path / "a")
    done = CliRunner().invoke(cli, ["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--format", "int3_g32", "--clip"])
    assert done.exit_code == 0, done.output
    as_it_was = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    w4gen.convert(model, "int3_g32", clip=True)
    ids = torch.arange(8)[None]
    assert torch.equal(w4gen.load(tmp_path / "b", torch.float32)(ids).logits, model(ids).logits)
    clipped, rounded = (w4gen.Weight.from_float(as_it_was, "int3_g32", clip) for clip in (True, False))
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight.dequantize(), clipped.dequantize())
    assert (clipped.dequantize() - as_it_was).norm() < (rounded.dequantize() - as_it_was).norm()
    with pytest.raises(CheckpointError, match="holds other files"):
        convert(tmp_path / "a", tmp_path / "b", "int3_g32")


def test_what_cannot_be_converted_is_known_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain(tmp_path / "a")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10_000))
    with pytest.raises(CheckpointError, match=r"b: it takes [\d,]+ bytes and the disk has 10,000: make room"):
        convert(tmp_path / "a", tmp_path / "b", "int4_g32")
    monkeypatch.undo()
    changed(intermediate_size=98)(tmp_path / "a/config.json")
    with pytest.raises(CheckpointError, match=r"mlp\.\w+_proj\.weight has shape \[.*\], config.json says"):
        convert(tmp_path / "a", tmp_path / "b", "int4_g32")
    assert not (tmp_path / "b").exists()


def test_a_conversion_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    plain(tmp_path / "a")
    names = convert(tmp_path / "a", tmp_path / "b", "int4_g32")
    files = sorted((tmp_path / "b").glob("*.safetensors"))
    whole = {path.name: load_file(path) for path in files}
    times = files[1].stat().st_mtime_ns
    files[0].unlink()
    assert convert(tmp_path / "a", tmp_path / "b", "int4_g32") == names
    again = {path.name: load_file(path) for path in files}
    assert {name: list(held) for name, held in again.items()} == {name: list(held) for name, held in whole.items()}
    assert all(torch.equal(again[name][each], tensor) for name, held in whole.items() for each, tensor in held.items())
    assert files[1].stat().st_mtime_ns == times
    with pytest.raises(CheckpointError, match="holds other files"):
        convert(tmp_path / "a", tmp_path / "b", "nf4_g32")


@pytest.mark.parametrize("damage", [cut(-10), cut(100), put(b""), put(b"<html>")])
def test_a_shard_that_was_damaged_since_is_made_anew(damage, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", "int4_g32")
    file = max((tmp_path / "b").glob("*.safetensors"))
    whole = {name: tensor.clone() for name, tensor in load_file(file).items()}  # else mapped to what is damaged now
    damage(file)
    convert(tmp_path / "a", tmp_path / "b", "int4_g32")
    assert all(torch.equal(tensor, whole[name]) for name, tensor in load_file(file).items())
    (told,) = (each.getMessage() for each in caplog.records)
    assert file.name in told
    assert told.endswith(": it is made anew")


def formats_in(path: Path) -> dict[str, str]:
    """What files say of the layers in them; each of no others."""
    found = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as held:
            told, names = held.metadata(), list(held.keys())
        assert told["format"] == "pt", "Transformers looks for it"
        own = json.loads(told.get("formats", "{}"))
        assert {f"{name}.weight_packed" for name in own} == {name for name in names if name.endswith("weight_packed")}
        found |= own
    return found


def test_each_file_says_the_formats_of_its_layers(tmp_path: Path) -> None:
    plain(tmp_path / "a")
    forms = convert(tmp_path / "a", tmp_path / "b", {"*.mlp.*": "nvfp4", "*": "int4_g32"})
    truth = {name: str(form) for name, form in forms.items()}
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 1
    assert formats_in(tmp_path / "b") == truth
    w4gen.load(tmp_path / "b").save_pretrained(tmp_path / "c")
    assert formats_in(tmp_path / "c") == truth
    derive.unpack(derive.pack(tmp_path / "b", "sm_90"), tmp_path / "d")
    assert formats_in(tmp_path / "d") == truth
    assert all(str(w4gen.Format.parse(text)) == text for text in truth.values())


def test_what_is_not_converted(tmp_path: Path) -> None:
    written(tmp_path / "m")
    with pytest.raises(CheckpointError, match="quantized already"):
        convert(tmp_path / "m", tmp_path / "b")
    plain(tmp_path / "a")
    with pytest.raises(CheckpointError, match="give another folder"):
        convert(tmp_path / "a", tmp_path / "a")
    assert not (tmp_path / "b").exists()


def test_a_conversion_of_a_source_that_changed_takes_what_is_there_now(tmp_path: Path) -> None:
    plain(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", "int4_g32")
    file = min((tmp_path / "a").glob("*.safetensors"))
    save_file({name: 2 * each for name, each in load_file(file).items()}, file, {"format": "pt"})
    for target in ("b", "fresh"):
        convert(tmp_path / "a", tmp_path / target, "int4_g32")
    resumed, fresh = (load_file(tmp_path / target / file.name) for target in ("b", "fresh"))
    assert all(torch.equal(resumed[name], each) for name, each in fresh.items())


def test_one_pattern_excludes_what_it_matches(tmp_path: Path) -> None:
    plain(tmp_path / "a")
    assert len(convert(tmp_path / "a", tmp_path / "b", "int4_g32", "lm_head")) == 14


def test_a_conversion_that_would_round_nothing_is_refused(tmp_path: Path) -> None:
    plain(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"of 15 linear layers .* none is left"):
        convert(tmp_path / "a", tmp_path / "b", "int4_g32", ["*"])
    (tmp_path / "c").write_text("")
    with pytest.raises(CheckpointError, match="c: no folder can be there"):
        convert(tmp_path / "a", tmp_path / "c", "int4_g32")


@pytest.mark.parametrize("asked", [["--exclude", "lm_heads"], ["--format", "*.q_prj=nf4_g64", "--format", "int4_g32"]])
def test_a_misspelt_pattern_is_refused_before_anything_is_written(asked: list[str], tmp_path: Path) -> None:
    plain(tmp_path / "a")
    done = CliRunner().invoke(cli, ["convert", str(tmp_path / "a"), str(tmp_path / "b"), *asked])
    assert isinstance(done.exception, CheckpointError)
    name = asked[1].partition("=")[0]
    assert f"no linear layer matches '{name}': they are called model.layers.*.self_attn.q_proj, " in str(done.exception)
    assert not (tmp_path / "b").exists()


def test_a_head_that_is_tied_may_be_excluded(tmp_path: Path) -> None:
    stated = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1, tie_word_embeddings=True
    )
    transformers.LlamaForCausalLM(stated).save_pretrained(tmp_path / "a")
    assert len(convert(tmp_path / "a", tmp_path / "b", "int4_g32", "lm_head")) == 7


def test_a_weight_that_is_not_finite_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    plain(tmp_path / "a")
    *others, file = (path for path in sorted((tmp_path / "a").glob("*.safetensors")) if "proj" in str(load_file(path).keys()))
    assert others, "a shard before it could have been written"
    held = load_file(file)
    name = next(name for name in held if "proj" in name)
    held[name][0, 0] = float("nan")
    save_file(held, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{file.name}: {name}: "):
        convert(tmp_path / "a", tmp_path / "b", "int4_g32")
    assert not (tmp_path / "b").exists()


def test_a_folder_is_converted_to_a_format_of_a_file(tmp_path: Path) -> None:
    plain(tmp_path / "a")
    (tmp_path / "mine.py").write_text("import w4gen\nmine = w4gen.Format('mine', bits=4, origin=-8.0, group=32)\n")
    done = CliRunner().invoke(cli, ["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--format", f"{tmp_path}/mine.py:mine"])
    assert done.exit_code == 0
    assert w4gen.load(tmp_path / "b").lm_head.format.name == "mine"
