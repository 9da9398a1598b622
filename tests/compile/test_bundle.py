"""A model's kernels in one file, made with no GPU, and run from elsewhere without a compile."""

from __future__ import annotations

import json
import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import w4gen
from w4gen import ahead, bundle, cache, paths, toolchain, tuned
from w4gen.api import problem_of
from w4gen.cli import cli
from w4gen.codegen.render import Kernel
from w4gen.commands.bundle import of_model
from w4gen.errors import CacheError, ForbiddenError, ShapeError, W4Error
from w4gen.ir.problem import PAIRED
from w4gen.schedule.arch import ARCHES
from w4gen.schedule.stored import layout_for

MODEL = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": True,
}  # fmt: skip
ASKED = [("1x128x128", "sm_80"), ("16x128x128", "sm_80"), ("1x128x128", "sm_90"), ("16x128x128", "sm_90")]


def run(*arguments: str, fails: type[W4Error] | None = None) -> str:
    """The output of a command of w4gen."""
    done = CliRunner().invoke(cli, arguments, standalone_mode=False)
    if fails is not None:
        assert isinstance(done.exception, fails), done.output
        return str(done.exception)
    assert done.exception is None, (done.output, done.exception)
    return done.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with config.json, model.w4g and the cache that it was made in."""
    folder = tmp_path_factory.mktemp("bundle")
    (folder / "config.json").write_text(json.dumps(MODEL))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("W4GEN_CACHE", str(folder / "cache"))
        question = tuned.question(problem_of(m=1, n=128, k=128))
        tuned.save("sm_90", [tuned.Row(question=question, schedule=chosen(), device="NVIDIA H200", sms=132, us=1.5)])
        asked = (
            "--model",
            str(folder),
            "--arch",
            "sm_80,sm_90",
            "--m",
            "1,16",
            "--emit",
            "cubin",
            "--out",
            str(folder / "model.w4g"),
        )
        told = run("compile", *asked)
    assert "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj: 128 -> 128, 14 of them" in told
    assert "4 kernels (0 found in the cache)" in told
    return folder


def chosen() -> w4gen.Schedule:  # type: ignore[name-defined]
    """What a row says of one row of x on sm_90, in place of the rules."""
    return replace(w4gen.compile("1x128x128", arch="sm_90").schedule, warps=2)


@pytest.fixture
def elsewhere(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the bundle on a machine with an empty cache and without a compiler."""

    def compile(kernel: Kernel, *_: object) -> None:
        raise RuntimeError(f"{kernel} is compiled")

    monkeypatch.setattr(toolchain, "_compile", compile)
    monkeypatch.setattr(paths, "cache", lambda: tmp_path / "cache")
    return Path(shutil.copy(folder / "model.w4g", tmp_path / "other name.w4g"))


def build_all() -> list[Kernel]:
    """Build what the model asks for, as commands ask and as calls do, with the layout of a stored weight."""
    kernels = []
    for shape, name in ASKED:
        kernel = w4gen.compile(shape, arch=name)
        stored = replace(kernel.problem, layout=layout_for(kernel.problem.format, ARCHES[name], 128, 128))
        arch = replace(ARCHES[name], device="NVIDIA H100 80GB HBM3", device_sms=132)
        again = ahead.Ask(stored, arch).kernel()
        assert again.source == kernel.source
        for each in (kernel, again):
            assert all(binary.cached for binary in toolchain.build(each, arch).values())
        kernels.append(kernel)
    return kernels


def test_a_bundle_is_run_in_place_without_a_compile(elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("W4GEN_CACHE", str(elsewhere))
    monkeypatch.setenv("W4GEN_JIT", "forbid")
    kernels = build_all()
    assert kernels[2].schedule.warps == 2, "the tuned row came along"
    for kernel, (_, name) in zip(kernels, ASKED, strict=True):
        for piece in kernel.pieces:
            assert toolchain.load(kernel, piece, ARCHES[name], overlap=False).metadata.name == piece.name
    assert not (tmp_path / "cache").exists(), "nothing is written"


def test_a_bundle_is_imported_and_run_without_a_compile(elsewhere: Path, tmp_path: Path) -> None:
    assert run("cache", "import", str(elsewhere)).startswith("imported 4 kernels, 4 binaries, 1 row into ")
    elsewhere.unlink()
    assert build_all()[2].schedule.warps == 2
    assert not any(entry.damage() for entry in cache.entries())


def test_what_a_bundle_does_not_hold_is_compiled(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("W4GEN_CACHE", str(elsewhere))
    for shape, name in (("1x128x256", "sm_80"), ("1x128x128", "sm_86"), ("64x128x128", "sm_90")):
        with pytest.raises(RuntimeError, match="is compiled"):
            toolchain.build(w4gen.compile(shape, arch=name), ARCHES[name])


def test_a_bundle_of_a_merged_model_has_what_it_launches(folder: Path) -> None:
    """Of gate and up also their product: `w4gen.merge(model, gated=True)`."""
    apart = of_model(folder, "1", "1", "int4_g128", "float16")
    more = [each for each in of_model(folder, "1", "1", "int4_g128", "float16", together=True) if each not in apart]
    assert [(each.n, each.k, each.activation) for each in more] == [(384, 128, ""), (256, 128, ""), (256, 128, PAIRED)]
    out = folder / "merged.w4g"
    told = run("compile", "--model", str(folder), "--m", "1", "--arch", "sm_80", "--merged", "--out", str(out))
    assert "q_proj+k_proj+v_proj: 128 -> 384, 2 of them" in told
    texts = {name for name in bundle.read(out) if name.endswith("kernel.py")}
    assert texts >= {f"kernels/{cache.place(ahead.Ask(each, ARCHES['sm_80']).kernel().source)}/kernel.py" for each in more}


def test_a_bundle_of_the_same_kernels_has_the_same_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("W4GEN_CACHE", str(folder / "cache"))
    asks = [ahead.Ask(w4gen.compile(shape, arch=name).problem, ARCHES[name]) for shape, name in reversed(ASKED)]
    from w4gen.commands.bundle import packed

    bundle.write(tmp_path / "again.w4g", packed(asks, ["cubin"]))
    assert (tmp_path / "again.w4g").read_bytes() == (folder / "model.w4g").read_bytes()
    assert not [name for name in bundle.read(tmp_path / "again.w4g") if name.endswith("ptx")]


def test_damage_is_refused_by_name_or_passed_over_with_a_warning(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(paths, "cache", lambda: tmp_path / "cache")
    whole, damaged = (folder / "model.w4g").read_bytes(), tmp_path / "damaged.w4g"
    cases = [b"", whole[: len(whole) // 2], whole[:-1], whole[:200] + bytes([whole[200] ^ 1]) + whole[201:], b"text"]
    for turn, data in enumerate(cases):
        damaged.write_bytes(data)
        assert f"{damaged} is not a whole bundle" in run("cache", "import", str(damaged), fails=CacheError)
        monkeypatch.setenv("W4GEN_CACHE", str(damaged))
        with caplog.at_level(logging.WARNING, "w4gen"):
            w4gen.compile("1x128x128", arch="sm_80")
            w4gen.compile("1x128x128", arch="sm_80")
        assert len(caplog.records) == turn + 1
        monkeypatch.undo()
        monkeypatch.setattr(paths, "cache", lambda: tmp_path / "cache")
    assert "there is no bundle" in run("cache", "import", str(tmp_path / "nowhere.w4g"), fails=CacheError)
    assert not list((tmp_path / "cache").rglob("kernel.cubin"))


@pytest.mark.parametrize("file", ["kernel.cubin", "kernel.py", "sums.json"])
def test_a_bundle_of_files_that_do_not_belong_together_is_refused(file: str, folder: Path, tmp_path: Path) -> None:
    """A whole zip, made by somebody else."""
    contents = bundle.read(folder / "model.w4g")
    name = next(name for name in contents if name.endswith(file))
    bundle.write(tmp_path / "forged.w4g", contents | {name: b"{}"})
    assert "forged.w4g is damaged at" in run("cache", "import", str(tmp_path / "forged.w4g"), fails=CacheError)


def of_another_triton(folder: Path, tmp_path: Path) -> Path:
    """The bundle as another Triton would have made it."""
    contents = bundle.read(folder / "model.w4g")
    facts = json.dumps(bundle.facts(contents) | {"triton": "3.5.0"}).encode()
    bundle.write(tmp_path / "old.w4g", contents | {"bundle.json": facts})
    return tmp_path / "old.w4g"


def test_a_bundle_of_another_triton_is_told_wherever_it_is_used(
    folder: Path, tmp_path: Path, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """None of its binaries is found: their addresses have Triton's version in them."""
    old = of_another_triton(folder, tmp_path)
    wrong = f"{old} was made with Triton 3.5.0, and {toolchain.version()} here finds none of its kernels: make it anew"
    assert run("cache", "import", str(old), fails=CacheError) == f"{wrong}, or import it where that Triton is"
    assert not list(fresh_cache.rglob("*.cubin"))
    monkeypatch.setattr(paths, "cache", lambda: fresh_cache)
    monkeypatch.setenv("W4GEN_CACHE", str(old))
    monkeypatch.setenv("W4GEN_JIT", "forbid")
    kernel = w4gen.compile("1x128x128", arch="sm_86")
    with pytest.raises(ForbiddenError, match=f"not compiled for sm_86, and W4GEN_JIT=forbid: {re.escape(wrong)}"):
        toolchain.load(kernel, kernel.pieces[0], ARCHES["sm_86"], overlap=False)
    monkeypatch.delenv("W4GEN_JIT")
    with caplog.at_level(logging.WARNING, "w4gen"):
        toolchain.build(kernel, ARCHES["sm_86"])
        toolchain.build(kernel, ARCHES["sm_89"])
    assert [record.getMessage() for record in caplog.records] == [wrong]


def test_the_doctor_says_what_a_bundle_holds(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(path: Path) -> str:
        monkeypatch.setenv("W4GEN_CACHE", str(path))
        return json.loads(run("doctor", "--json"))["bundle"][0]

    whole, old = folder / "model.w4g", of_another_triton(folder, tmp_path)
    assert told(whole) == f"{whole}: 4 kernels, tuned rows of sm_90, made with Triton {toolchain.version()}"
    assert told(old).startswith(f"{old}: 4 kernels, tuned rows of sm_90; it was made with Triton 3.5.0, and")
    assert told(tmp_path / "nowhere.w4g").startswith("there is no bundle")
    assert told(tmp_path) == "none"


BAD: dict[str, tuple[str, type[W4Error], str]] = {
    "no out": ("--m 1", W4Error, "give --out FILE.w4g"),
    "folder": ("--out kernels", W4Error, "give --out FILE.w4g"),
    "shape": ("--out k.w4g --shape 1x2x3", ShapeError, "--shape is of one layer"),
    "emit": ("--out k.w4g --emit sass", W4Error, "--emit cubin, hsaco, ptx or amdgcn"),
    "schedule": ("--out k.w4g --schedule warps=1", W4Error, "change one kernel"),
    "m": ("--out k.w4g --m 1,x", ShapeError, "is not a whole number or several, as in 1,16"),
    "tp": ("--out k.w4g --tp 7", ShapeError, "cannot be shared by tp=7"),
    "arch": ("--out k.w4g --arch sm_80,sm_91", W4Error, "unknown arch 'sm_91'"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_asked_in_vain(case: str, folder: Path) -> None:
    options, kind, message = BAD[case]
    assert message in run("compile", "--model", str(folder), *options.split(), fails=kind)


def test_a_shape_takes_one_m_and_no_tp() -> None:
    assert "more than one" in run("compile", "--m", "1,2", "--k", "64", "--n", "64", fails=ShapeError)
    for option in (("--tp", "2"), ("--merged",)):
        assert "give --model" in run("compile", "--shape", "1x64x64", *option, fails=W4Error)


def test_a_worker_that_dies_is_told_and_replaced(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(m=1, n=64, k=128)
    monkeypatch.setattr(ahead.sys, "executable", "/bin/false")
    (done,) = ahead.compiled([ahead.Ask(problem, ARCHES["sm_80"])])
    assert done.error == "the process that compiled it ended with status 1"
    monkeypatch.undo()
    monkeypatch.setenv("W4GEN_CACHE", str(fresh_cache))
    bad = replace(w4gen.compile("1x128x64", arch="sm_80").schedule, block_k=48)
    asks = [ahead.Ask(problem, ARCHES["sm_80"]), ahead.Ask(problem, ARCHES["sm_80"], bad), ahead.Ask(problem, ARCHES["sm_80"])]
    found = {done.ask: done.error for done in ahead.compiled(asks, workers=1)}
    assert len(found) == 2, "an ask is compiled once"
    assert found[asks[0]] == ""
    assert "block_k=48 is not a multiple of" in found[asks[1]]


def test_the_group_of_commands_knows_the_new_ones() -> None:
    group = cli.commands["cache"]
    assert isinstance(group, click.Group)
    assert {"import", "merge", "diff"} <= set(group.commands)
