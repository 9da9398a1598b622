"""The command line, as people type it: in a process of its own, with a cache of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest


def w4gen(*arguments: str, cache: Path, **knobs: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("W4GEN_", "TRITON_INTERPRET"))}
    command = [sys.executable, "-m", "w4gen.cli", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env={**environment, "W4GEN_CACHE": str(cache), **knobs}, check=False
    )


BAD = {
    "1x15a": ("compile --shape 1x15a", "is not MxKxN: give tokens x inputs x outputs, as in 1x1536x256"),
    "zero m": ("compile --shape 0x64x64", "m=0 is not a positive whole number"),
    "negative k": ("compile --shape 1x-64x64", "k=-64 is not a positive whole number"),
    "no n": ("compile --m 1 --k 64", "no shape: give --shape"),
    "two shapes": ("compile --shape 1x64x64 --m 1", "give one of the two"),
    "format": ("compile --shape 1x64x64 --format nf_g64", "unknown format 'nf_g64': the nearest is nf4_g64"),
    "group": ("compile --shape 1x64x64 --format int4_g0", "the group must be positive: use _g64"),
    "arch": ("compile --shape 1x64x64 --arch sm_91", "unknown arch 'sm_91': the nearest is sm_90"),
    "dtype": ("compile --shape 1x64x64 --dtype float8", "unknown dtype 'float8': use one of"),
    "f32": ("compile --shape 1x64x64 --dtype float32", "kernels take float16 and bfloat16"),
    "kind": ("compile --shape 1x64x64 --emit elf", "--emit 'elf' is not one of"),
    "binary": ("compile --shape 1x64x64 --emit cubin", "give --out FOLDER"),
    "no file": ("compile --shape 1x64x64 --format nowhere.py:x", "no file nowhere.py"),
    "option": ("compile --shap 1x64x64", "No such option"),
    "large m": ("compile --shape 64x64x64", "has no kernel yet"),
    "what": ("show everything --shape 1x64x64", "is not one of"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_2_and_writes_nothing(case: str, tmp_path: Path) -> None:
    command, message = BAD[case]
    done = w4gen(*command.split(), cache=tmp_path / "cache")
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.startswith("w4gen: ")
    assert message in done.stderr
    assert not (tmp_path / "cache").exists()


def test_a_format_file_that_does_not_run_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("1 / 0")
    done = w4gen("compile", "--shape", "1x64x64", "--format", f"{tmp_path}/bad.py:x", cache=tmp_path / "cache")
    assert done.returncode == 2
    assert "bad.py does not run: ZeroDivisionError" in done.stderr


def test_compile_says_what_it_did_and_checks_it(tmp_path: Path) -> None:
    done = w4gen("compile", "--shape", "1x256x64", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    for word in (
        "asked",
        "format",
        "kernel",
        "schedule",
        "why",
        "registers",
        "spills",
        "shared",
        "bytes a call",
        "floor",
        "checked",
    ):
        assert word in done.stdout, word
    assert "compiled, not run" in done.stdout or "checked on" in done.stdout


def test_compile_as_json_has_every_fact(tmp_path: Path) -> None:
    done = w4gen(
        "compile", "--m", "16", "--n", "64", "--k", "256", "--format", "nf4_g64", "--arch", "sm_90", "--json", cache=tmp_path
    )
    facts = json.loads(done.stdout)
    assert facts["m"] == [2, 16]
    assert (facts["n"], facts["k"], facts["format"], facts["target"]) == (64, 256, "nf4_g64", "sm_90")
    assert facts["spills"] == 0
    assert Path(facts["kernel"]).is_file()
    assert facts["proof"].startswith("checked")


def test_compile_is_fast_cold_and_warm(tmp_path: Path) -> None:
    """Cold within 5 s, warm within 2 s, the check apart; with room for a machine that is busy."""
    for limit in (10.0, 4.0):
        start = time.perf_counter()
        done = w4gen("compile", "--shape", "1x1536x256", "--arch", "sm_90", "--no-check", cache=tmp_path)
        assert done.returncode == 0, done.stderr
        assert time.perf_counter() - start < limit
    assert "found in the cache" in done.stdout


@pytest.mark.parametrize(
    ("arch", "kind", "start"), [("sm_90", "py", "# y[1, 64]"), ("sm_80", "ptx", "//"), ("gfx942", "amdgcn", "\t")]
)
def test_emit_prints_texts(arch: str, kind: str, start: str, tmp_path: Path) -> None:
    done = w4gen("compile", "--shape", "1x256x64", "--arch", arch, "--emit", kind, cache=tmp_path)
    assert done.stdout.lstrip("\n").startswith(start), done.stdout[:100]


def test_emit_writes_binaries(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = w4gen(*f"compile --shape 1x256x64 --arch sm_90 --emit cubin,sass --out {out}".split(), cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (out / "gemv.cubin").read_bytes()[:4] == b"\x7fELF"
    assert "LDG" in (out / "gemv.sass").read_text()


def test_a_rendered_file_checks_itself(tmp_path: Path) -> None:
    w4gen("compile", "--shape", "3x256x64", "--no-check", "--emit", "py", "--out", str(tmp_path), cache=tmp_path / "cache")
    done = subprocess.run([sys.executable, str(tmp_path / "gemv.py")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("checked")


def test_show(tmp_path: Path) -> None:
    ladder = w4gen("show", "ir", "--shape", "32x63x32", "--format", "nf4_g64", cache=tmp_path).stdout
    for word in ("offline, once per weight", "pad k=64", "slice", "convert", "map to n8@512,n2@4", "kept"):
        assert word in ladder, word
    assert w4gen("show", "schedule", "--shape", "1x64x64", cache=tmp_path).stdout.startswith("template=gemv")
    assert "def gemv(" in w4gen("show", "kernel", "--shape", "1x64x64", cache=tmp_path).stdout


def test_doctor_knows_what_is_here(tmp_path: Path) -> None:
    facts = json.loads(w4gen("doctor", "--json", cache=tmp_path).stdout)
    assert {"python", "torch", "triton", "gpu", "gcc", "cache", "W4GEN_STRICT"} <= set(facts)
    assert w4gen("doctor", cache=tmp_path).returncode == 0


def test_debug_tells_on_stderr(tmp_path: Path) -> None:
    quiet, loud = (
        w4gen("show", "schedule", "--shape", "1x64x64", cache=tmp_path, W4GEN_DEBUG=level).stderr for level in ("0", "4")
    )
    assert quiet == ""
    assert "rendered in" in loud
    assert "offline, once per weight" in loud
    assert "def gemv(" in loud


def test_importing_w4gen_is_cheap_and_brings_no_torch() -> None:
    code = """
import sys, time
start = time.perf_counter()
import w4gen
print(time.perf_counter() - start, "torch" in sys.modules, "triton" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, torch, triton = done.stdout.split()
    assert float(seconds) < 0.2
    assert (torch, triton) == ("False", "False")
