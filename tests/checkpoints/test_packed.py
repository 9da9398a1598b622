"""What is stored beside a checkpoint for an arch: loaded without packing, taken only where it is of these files, and undone."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from test_gguf_model import write as write_gguf
from test_load import plain, written

import w4gen
from w4gen.checkpoints import derive, folder
from w4gen.checkpoints.convert import convert
from w4gen.cli import cli
from w4gen.errors import ArchError, CheckpointError
from w4gen.formats import named
from w4gen.runtime import repack
from w4gen.schedule.arch import ARCHES
from w4gen.schedule.stored import layout_for

pytest.importorskip("transformers")
IDS = torch.arange(8)[None]


def held(path):
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    path = tmp_path_factory.mktemp("packed")
    plain(path / "a")
    forms = {"*.mlp.*": "int4_g32", "*.q_proj": "nf4_dq", "*.k_proj": "uint3_g32_z", "*": "nvfp4"}
    convert(path / "a", path / "m", forms)
    derive.pack(path / "m", "sm_90")
    return path


@pytest.fixture
def made(first, tmp_path):
    """A folder of w4gen's own, of several formats, and what is made of it for sm_90."""
    for name in ("a", "m"):
        shutil.copytree(first / name, tmp_path / name)
    return tmp_path / "m", tmp_path / "m/w4gen-sm_90"


def test_layers_lie_as_the_arch_reads_them_and_are_packed_no_more(made, monkeypatch):
    source, packed = made
    assert packed == source / "w4gen-sm_90"
    canonical = w4gen.load(source, torch.float32)
    for name in ("repacked", "packed"):
        monkeypatch.setattr(repack, name, lambda *_: pytest.fail("codes were packed again"))
    model = w4gen.load(packed, torch.float32)
    assert torch.equal(model(IDS).logits, canonical(IDS).logits)
    layer = model.model.layers[0].mlp.up_proj
    assert layer.layout == layout_for(named("int4_g32"), ARCHES["sm_90"], 96, 64)
    assert layer.layout != canonical.model.layers[0].mlp.up_proj.layout


def test_the_original_comes_back_bit_for_bit(made, tmp_path):
    source, packed = made
    done = CliRunner().invoke(cli, ["unpack", str(packed), str(tmp_path / "again"), "--json"])
    assert json.loads(done.output) == {"out": str(tmp_path / "again")}
    before, after = held(source), held(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(before[name].dtype == each.dtype and torch.equal(before[name], each) for name, each in after.items())
    stated = [json.loads((path / "config.json").read_text())["quantization_config"] for path in (source, tmp_path / "again")]
    assert stated[0]["formats"] == stated[1]["formats"]
    assert torch.equal(w4gen.load(tmp_path / "again", torch.float32)(IDS).logits, w4gen.load(source, torch.float32)(IDS).logits)


def test_it_is_taken_where_its_arch_is_and_its_files_are(made, monkeypatch, caplog):
    source, _packed = made
    monkeypatch.setenv("W4GEN_ARCH", "sm_90")
    layout = layout_for(named("int4_g32"), ARCHES["sm_90"], 96, 64)
    assert w4gen.load(source).model.layers[0].mlp.up_proj.layout == layout
    monkeypatch.setenv("W4GEN_ARCH", "sm_80")
    assert w4gen.load(source).model.layers[0].mlp.up_proj.layout != layout
    monkeypatch.setenv("W4GEN_ARCH", "sm_90")
    file = min(source.glob("*.safetensors"))
    save_file(load_file(file), file, {"format": "pt"})
    assert w4gen.load(source).model.layers[0].mlp.up_proj.layout != layout
    assert "made of other files" in caplog.text
    assert CliRunner().invoke(cli, ["pack", str(source)]).exit_code == 0
    assert w4gen.load(source).model.layers[0].mlp.up_proj.layout == layout
    next((source / "w4gen-sm_90").glob("*.safetensors")).write_bytes(b"<html>")
    assert w4gen.load(source).model.layers[0].mlp.up_proj.layout != layout
    assert "a web page stands in its place" in caplog.text


def test_act_order_and_gguf_are_packed_too(tmp_path):
    written(tmp_path / "m")
    write_gguf(tmp_path / "m.gguf", "llama", True, False)
    for source in (tmp_path / "m", tmp_path / "m.gguf"):
        packed = derive.pack(source, "sm_90")
        assert packed.parent == (source if source.is_dir() else tmp_path)
        assert torch.equal(w4gen.load(packed, torch.float32)(IDS).logits, w4gen.load(source, torch.float32)(IDS).logits)
        derive.unpack(packed, tmp_path / f"{source.name}-own")
        again = w4gen.load(tmp_path / f"{source.name}-own", torch.float32)
        assert torch.allclose(again(IDS).logits, w4gen.load(source, torch.float32)(IDS).logits, atol=1e-5)


def test_inspect_tells_of_packed_layers(made):
    found = {each.name: each for each in w4gen.inspect(made[1])}
    up = found["model.layers.*.mlp.up_proj"]
    assert (up.dialect, up.format, up.shape, up.plan) == ("w4gen-packed", "int4_g32", (96, 64), "runs from codes")


def stated(**changes):
    def change(path):
        text = json.loads((path / "config.json").read_text())
        text["quantization_config"]["layers"]["lm_head"] |= changes
        (path / "config.json").write_text(json.dumps(text))

    return change


def without_codes(path):
    file = next(file for file in path.glob("*.safetensors"))
    save_file({name: each[:-1] if name == "lm_head.codes" else each for name, each in load_file(file).items()}, file)


BAD = {
    "another size": (stated(size=[65, 64]), "lm_head: its tensors"),
    "another format": (stated(format="int9"), "lm_head"),
    "another layout": (stated(layout="n64@256,k64@4;4/32"), "lm_head"),
    "no size": (stated(size=None), "lm_head: its tensors and the quantization_config"),
    "cut codes": (without_codes, r"lm_head\.codes: has shape"),
    "a lost shard": (lambda path: next(path.glob("*.safetensors")).unlink(), "this shard is missing"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_damaged_is_refused(kind, made):
    damage, told = BAD[kind]
    damage(made[1])
    with pytest.raises(CheckpointError, match=told):
        w4gen.load(made[1])


def test_what_is_not_packed_or_unpacked(made, tmp_path):
    source, packed = made
    with pytest.raises(CheckpointError, match="nothing to pack"):
        derive.pack(tmp_path / "a", "sm_90")
    with pytest.raises(ArchError, match="sm_9"):
        derive.pack(source, "sm_9")
    with pytest.raises(CheckpointError, match="not made by `w4gen pack`"):
        derive.unpack(source, tmp_path / "x")
    with pytest.raises(CheckpointError, match="it is there already"):
        derive.unpack(packed, source)
    (source / "w4gen-sm_80").mkdir()
    with pytest.raises(CheckpointError, match="it is there already"):
        derive.pack(source, "sm_80")
    assert not [path for path in source.iterdir() if path.name.startswith(".")]


def test_shards_are_cut_by_size(tmp_path):
    tensors = {f"t{i}": torch.full((1000,), float(i)) for i in range(5)}
    folder.save(tmp_path / "f", {}, tensors.items(), shard=8000)
    assert sorted(path.name for path in (tmp_path / "f").glob("*.safetensors")) == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    assert all(torch.equal(each, tensors[name]) for name, each in folder.read(tmp_path / "f").tensors(tensors))
