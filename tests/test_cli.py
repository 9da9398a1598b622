"""The command line, as people type it, with a cache of its own; in a process of its own where that may matter."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import pytest
from click.testing import CliRunner

from w4gen import api
from w4gen.cli import cli, main
from w4gen.commands.doctor import diagnosis
from w4gen.commands.explain import explained
from w4gen.commands.explain import told as words
from w4gen.errors import W4Error
from w4gen.formats import FAMILIES
from w4gen.layers import PRESETS
from w4gen.schedule.arch import ARCHES

ROOT = Path(__file__).parent.parent


def environment(cache: Path, **knobs: str) -> dict[str, str]:
    here = {key: value for key, value in os.environ.items() if not key.startswith(("W4GEN_", "TRITON_INTERPRET"))}
    return here | {"W4GEN_CACHE": str(cache), **knobs}


def process(*arguments: str, cache: Path, **knobs: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own."""
    command = [sys.executable, "-m", "w4gen", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment(cache, **knobs), check=False)


def w4gen(*arguments: str, cache: Path, typed: str = "") -> subprocess.CompletedProcess[str]:
    """A command run by `main` here: to start Python takes longer than most of them."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    typing = patch.multiple(sys, argv=["w4gen", *arguments], stdin=io.StringIO(typed))
    told = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    with patch.dict(os.environ, environment(cache), clear=True), typing, told[0], told[1]:
        try:
            main()
        except SystemExit as end:
            status = end.code
    return subprocess.CompletedProcess(arguments, status or 0, out.getvalue(), err.getvalue())


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
    "fragment": (
        "compile --shape 1x64x64 --layout fragment",
        "portable has no matrix fragment that w4gen knows: name an arch that",
    ),
    "other fragment": (
        "show ir --shape 1x64x64 --layout fragment --arch gfx942",
        "gfx942 has no matrix fragment that w4gen knows",
    ),
    "order": ("compile --shape 1x64x64 --layout columns", "'columns' is not one of 'rows', 'fragment'"),
    "schedule": ("compile --shape 1x64x64 --schedule blok_n=64", "cannot read 'blok_n=64' of a schedule"),
    "schedule unit": ("compile --shape 1x64x64 --schedule unit=gpu", "unit='gpu': use one of lanes, halves, mma"),
    "schedule block": ("compile --shape 1x64x64 --schedule block_k=100", "block_k=100 is not a multiple of"),
    "templates": ("compile --shape 1x64x64 --templates nowhere", "no gemv.py.jinja in nowhere, which has no template"),
    "explain": ("explain --shape 1x15a", "is not MxKxN"),
    "cache": ("cache burn", "No such command 'burn'"),
    "no bandwidth": (
        "roofline --model Qwen2.5-1.5B",
        "measure the GPU here by --measure, take one that was measured by --machine FILE, assume a machine by --bandwidth 323.9",
    ),
    "two bandwidths": ("roofline --model Qwen2.5-1.5B --bandwidth 900 --arch sm_90", "give one of the two"),
    "no model": ("roofline --bandwidth 900", "bounds are those of a model: name one by --model"),
    "no machine": (
        "roofline --model Qwen2.5-1.5B --machine nowhere.json",
        "nowhere.json cannot be read (No such file or directory)",
    ),
    "bandwidth": ("roofline --model Qwen2.5-1.5B --bandwidth -1", "--bandwidth -1 is no speed: give GB/s, as in 323.9"),
    "preset": ("roofline --model Qwen9 --bandwidth 900", "Qwen9 is no config.json ([Errno 2]"),
    "no weights": ("roofline --model Qwen2.5-1.5B --bandwidth 900 --format i32", "unknown format 'i32'"),
    "problem": ("compile --problem what", "cannot read the problem 'what': write it with str(problem)"),
    "problem and shape": ("compile --shape 1x64x64 --problem what", "--problem says all that --shape"),
    "problem and order": ("show ir --layout rows --problem what", "--problem says all that --shape"),
    "model and problem": (
        "compile --model Qwen2.5-1.5B --problem what --out a.w4g",
        "--problem is of one layer and --model names",
    ),
    "tune nothing": ("tune", "nothing to tune: give --shape MxKxN, --model config.json, --presets, or --random"),
    "tune fewer": ("tune --random -3", "-3 random layers cannot be drawn: give a number from 1 on"),
    "bench fewer": ("bench --random -3", "-3 random layers cannot be drawn: give a number from 1 on"),
    "bench layer": ("bench --layer 4096", "'4096' is not KxN: give inputs x outputs, as in 4096x14336, and tokens by --m"),
    "bench no rows": ("bench --m 1 --m 0", "m=0 is not a positive whole number"),
    "bench format": ("bench --layer 64x64 --format int9", "unknown format 'int9'"),
    "bench dtype": ("bench --layer 64x64 --dtype float32", "dtype float32: kernels take float16 and bfloat16"),
    "cold shape": ("bench --cold --shape 64x64", "shape '64x64' is not MxKxN"),
    "profile format": ("profile Qwen2.5-1.5B --format int9", "unknown format 'int9'"),
    "bounds to a file": (
        "roofline --model Qwen2.5-1.5B --arch sm_90 --out x.json",
        "--out x.json is for what --measure finds: add --measure on a GPU, or print bounds as JSON by --json",
    ),
    "tune both": ("tune --model Qwen2.5-1.5B --bias", "--bias is of one layer and --model names all of one"),
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
    if case == "1x15a":
        apart = process(*command.split(), cache=tmp_path / "cache")
        assert (apart.returncode, apart.stdout, apart.stderr) == (2, "", done.stderr)


def test_a_format_file_that_does_not_run_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("1 / 0")
    done = w4gen("compile", "--shape", "1x64x64", "--format", f"{tmp_path}/bad.py:x", cache=tmp_path / "cache")
    assert done.returncode == 2
    assert "bad.py does not run: ZeroDivisionError" in done.stderr


def test_compile_says_what_it_did_and_checks_it(tmp_path: Path) -> None:
    done = process("compile", "--shape", "1x256x64", cache=tmp_path)
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
    assert facts["m"] == [9, 16]
    assert (facts["n"], facts["k"], facts["format"], facts["target"]) == (64, 256, "nf4_g64", "sm_90")
    assert facts["spills"] == 0
    assert Path(facts["kernel"]).is_file()
    assert facts["proof"].startswith(("checked on ", "portable twin: checked "))


SLOWER = [pytest.param(*each, marks=pytest.mark.slow) for each in (("1x256x64", "gemv_half"), ("8x256x64", "gemv_mma"))]


@pytest.mark.parametrize(("shape", "name"), [("40x256x64", "gemm"), *SLOWER])
def test_compile_says_what_is_proven_of_a_kernel_that_no_interpreter_runs(shape: str, name: str, tmp_path: Path) -> None:
    """Its portable twin was checked, and it was compiled: for the fast ones, with every value in the lane that reads it."""
    done = w4gen("compile", "--shape", shape, "--arch", "sm_90", cache=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    if "checked on " in done.stdout:
        pytest.skip("there is a GPU: the kernel itself was run")
    proof = " ".join(done.stdout.partition("proof  ")[2].split())
    assert proof.startswith("portable twin: checked under the interpreter: error ")
    assert proof.endswith(f"this kernel: compiled,{'' if name == 'gemm' else ' placement proven,'} not run")


def test_compile_says_when_a_fast_kernel_is_not_what_its_template_says(tmp_path: Path) -> None:
    """A template of one's own that asks for words in another lane than the layout has them in does not compile."""
    own = tmp_path / "own"
    shutil.copytree(ROOT / "templates", own)
    text = (own / "fragments.jinja").read_text()
    changed = text.replace("gl.BlockedLayout([1, 4], [32, 1]", "gl.BlockedLayout([1, 4], [16, 2]")
    assert changed != text
    (own / "fragments.jinja").write_text(changed)
    done = w4gen("compile", "--shape", "1x256x64", "--arch", "sm_90", "--templates", str(own), cache=tmp_path / "cache")
    assert done.returncode == 2
    assert "gemv_half for sm_90" in done.stderr


def took(command: list[str], cache: Path) -> tuple[float, str]:
    """Seconds that a command kept processors busy, which others at work beside it do not add to; and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, env=environment(cache), check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def test_compile_is_fast_cold_and_warm(tmp_path: Path) -> None:
    """Cold within 5 s, warm within 2 s, the check apart, where torch and triton are imported in 2 s; elsewhere in proportion."""
    command = [sys.executable, "-m", "w4gen.cli", "compile", "--shape", "1x1536x256", "--arch", "sm_90", "--no-check"]
    (cold, _), *others = [took(command, tmp_path) for _ in range(3)]
    assert all("found in the cache" in told for _, told in others)
    slow = max(took([sys.executable, "-c", "import torch, triton"], tmp_path)[0] for _ in range(2)) / 2
    assert cold < 5 * max(slow, 1)
    assert min(warm for warm, _ in others) < 2 * max(slow, 1)


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
    assert (out / "gemv_half.cubin").read_bytes()[:4] == b"\x7fELF"
    assert "LDG" in (out / "gemv_half.sass").read_text()


@pytest.mark.parametrize(
    ("shape", "name", "arch"),
    [
        pytest.param("1x256x64", "gemv", "portable", marks=pytest.mark.slow),
        ("40x256x80", "gemm", "sm_80"),
        pytest.param("200x300x40", "dequant", "portable", marks=pytest.mark.slow),
    ],
)
def test_a_rendered_file_checks_itself(shape: str, name: str, arch: str, tmp_path: Path) -> None:
    form = ("--format", "int4_g32", "--arch", arch)
    w4gen("compile", "--shape", shape, *form, "--no-check", "--emit", "py", "--out", str(tmp_path), cache=tmp_path / "cache")
    done = subprocess.run([sys.executable, str(tmp_path / f"{name}.py")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("checked")


def test_show(tmp_path: Path) -> None:
    ladder = "show ir --shape 32x63x32 --format nf4_g64 --layout fragment --arch sm_80"
    for word in ("offline, once per weight", "pad k=64", "slice", "convert", "map to n8@512,n2@8", "kept", "dot over k on mma"):
        assert word in w4gen(*ladder.split(), cache=tmp_path).stdout, word
    assert w4gen("show", "schedule", "--shape", "1x64x64", cache=tmp_path).stdout.startswith("template=gemv")
    assert "def gemv(" in w4gen("show", "kernel", "--shape", "1x64x64", cache=tmp_path).stdout


def test_the_stored_order_is_picked_or_named(tmp_path: Path) -> None:
    """Of an arch with matrix fragments the order is theirs; where it would pad too much, and on request, it is rows."""

    def template(*options: str) -> str:
        return facts("show", "schedule", *options, "--arch", "sm_90", cache=tmp_path)["template"]

    assert template("--shape", "1x1536x256") == "gemv_half"
    assert template("--shape", "1x1536x256", "--layout", "rows") == "gemv"
    assert template("--shape", "40x1536x256", "--layout", "rows") == "dequant"
    assert template("--shape", "40x330x37") == "dequant"
    assert template("--shape", "40x330x37", "--layout", "fragment") == "gemm"


def test_doctor_knows_what_is_here(tmp_path: Path) -> None:
    facts = json.loads(w4gen("doctor", "--json", cache=tmp_path).stdout)
    assert {"python", "torch", "triton", "gpu", "gcc", "cache", "W4GEN_STRICT"} <= set(facts)
    assert w4gen("doctor", cache=tmp_path).returncode == 0


def test_doctor_says_what_is_wrong_with_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"W4GEN_ARCH": "sm_91", "W4GEN_DEBUG": "much", "W4GEN_STRICT": "", "W4GEN_JIT": "never"}.items():
        monkeypatch.setenv(name, value)
    found = {name: told for name, (told, _) in diagnosis().items()}
    assert "sm_91" in found["W4GEN_ARCH"]
    assert "sm_90" in found["W4GEN_ARCH"], "what could be asked for"
    assert found["W4GEN_DEBUG"].startswith("W4GEN_DEBUG='much' is not a whole number")
    assert found["W4GEN_JIT"].startswith("W4GEN_JIT='never' is not one of forbid")
    assert found["W4GEN_STRICT"] == "0"


def facts(*arguments: str, cache: Path) -> Any:
    """What a command prints with --json."""
    done = w4gen(*arguments, "--json", cache=cache)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_schedule_can_be_changed(tmp_path: Path) -> None:
    shape = ("--shape", "1x256x64")
    found = facts("compile", *shape, "--schedule", "block_n=4,warps=1,block_k=1024", "--no-check", cache=tmp_path)
    assert "block_n=4 block_k=1024" in found["schedule"]
    assert found["chosen"] == "the rules' choice, changed by block_n=4,warps=1,block_k=1024"
    text = w4gen("show", "kernel", *shape, "--schedule", "block_n=4,warps=1,block_k=1024", cache=tmp_path).stdout
    assert "BLOCK_N = tl.constexpr(4)" in text
    assert "--schedule block_n=4,warps=1,block_k=1024 --emit py" in text.splitlines()[1]


def test_the_command_of_a_changed_kernel_makes_it_again(tmp_path: Path) -> None:
    options = ["--shape", "1x256x64", "--schedule", "block_n=4", "--emit", "py"]
    text = w4gen("compile", *options, cache=tmp_path).stdout
    command = text.splitlines()[1].partition("made by: w4gen ")[2]
    assert w4gen(*shlex.split(command), cache=tmp_path).stdout == text


def test_a_kernel_of_every_m_says_how_it_is_made_again(tmp_path: Path) -> None:
    problem = "m=1..2147483647 n=64 k=256 format=nf4(bits=4,codebook=[%s],group=64,scale=f16) x=f16 y=f16 accumulate=f32 bias=0"
    problem %= ",".join(map(str, range(16)))
    options = ["--problem", problem, "--arch", "sm_90", "--emit", "py"]
    text = w4gen("compile", *options, cache=tmp_path).stdout
    command = text.splitlines()[1].partition("made by: w4gen ")[2]
    assert w4gen(*shlex.split(command), cache=tmp_path).stdout == text
    assert "BLOCK_M = tl.constexpr(32)" in text


def own_templates(folder: Path, old: str = "", new: str = "") -> Path:
    """A folder with w4gen's gemv template, changed."""
    folder.mkdir()
    text = (ROOT / "templates" / "gemv.py.jinja").read_text()
    assert old in text
    (folder / "gemv.py.jinja").write_text(text.replace(old, new))
    return folder


def test_a_template_of_your_own_is_tried_without_touching_the_package(tmp_path: Path) -> None:
    own = own_templates(tmp_path / "own", "import triton.language as tl\n", "import triton.language as tl\n\n# mine\n")
    options = ("--shape", "1x256x64", "--templates", str(own))
    text = w4gen("show", "kernel", *options, cache=tmp_path).stdout
    assert "# mine" in text
    assert f"--templates {own} --emit py" in text.splitlines()[1]
    assert facts("compile", *options, cache=tmp_path)["proof"].startswith("checked")
    assert "# mine" not in w4gen("show", "kernel", "--shape", "1x256x64", cache=tmp_path).stdout


def test_a_template_that_drops_a_node_is_refused(tmp_path: Path) -> None:
    own = own_templates(tmp_path / "own", '{{ reduce("total") }}', "")
    done = w4gen("compile", "--shape", "1x256x64", "--templates", str(own), cache=tmp_path)
    assert (done.returncode, "gemv.py.jinja prints total" in done.stderr) == (2, True)


def test_a_folder_without_the_template_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "mine.py.jinja").touch()
    done = w4gen("compile", "--shape", "1x256x64", "--templates", str(tmp_path), cache=tmp_path)
    assert done.returncode == 2
    assert f"no gemv.py.jinja in {tmp_path}, which has mine.py.jinja" in done.stderr


@pytest.mark.parametrize(
    ("shape", "form", "said"),
    [
        ("16x600x40", "int4_g50", "w as the right operand, through shared memory"),
        ("64x256x64", "int4_g128", "w as the left operand, from the registers that it is decoded in"),
    ],
)
def test_compile_says_how_a_decoded_weight_reaches_the_matrix_cores(shape: str, form: str, said: str) -> None:
    told = CliRunner().invoke(cli, ["compile", "--shape", shape, "--format", form, "--arch", "sm_80", "--no-check"])
    assert f"multiplied on matrix cores, {said}" in told.output


def test_explain_shows_the_path_of_a_kernel(tmp_path: Path) -> None:
    told = w4gen("explain", "--shape", "1x1536x512", "--arch", "sm_90", cache=tmp_path).stdout
    for word in (
        "a generated kernel",
        "template=gemv_half",
        "the rules' choice",
        "codes: map from",
        "moves",
        "padding  none",
        "data sheet",
        "H200",
    ):
        assert word in told, word
    assert "zero_at=accumulator needs unit=lanes, scale_at=accumulator and x in f16: take zero_at=weight" in told


@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64", "int4_g50", "int4_row"])
@pytest.mark.parametrize("shape", ["1x1536x256", "16x576x192", "2x250x10", "9x1000x47"])
@pytest.mark.parametrize("arch", ["portable", "sm_80"])
def test_explain_adds_up(arch: str, shape: str, form: str) -> None:
    high, k, n = api.parse_shape(shape)
    found = explained(api.problem_of(m=high, n=n, k=k, format=form), ARCHES[arch], high)
    assert (found["path"], found["why"]) == ("kernel", "")
    assert found["bytes"]["x"] == 2 * k * high
    assert found["bytes"]["codes.stored"] == found["padded_n"] * found["padded_k"] // 2
    assert found["padding"] == pytest.approx(found["padded_n"] * found["padded_k"] / (n * k) - 1, abs=1e-4)
    assert found["bounds_us"]["bytes"] == pytest.approx(sum(found["bytes"].values()) / 2039e3, abs=1e-3)
    assert found["bottleneck"] in {*found["bounds_us"], "waves"}
    said = words(found, api.problem_of(m=high, n=n, k=k, format=form), ARCHES[arch], high)
    assert f"bound by  {found['bottleneck']}: a model predicts {found['predicted_us']:.2f} us" in said
    refused = [each for each in found["others"] if each["verdict"] == "refused"]
    assert refused
    assert all(each["why"] for each in refused)
    dense = "template=dequant" in found["schedule"]
    assert {"w", "scale", "y"} | (set() if dense else {"x"}) <= set(found["program"])


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64", "uint4_g32_m", "uint4_g128_z", "int8_g128"])
def test_explain_never_breaks(form: str, arch: str) -> None:
    """Whatever schedule it tries next to the one picked."""
    for shape in ("1x1536x256", "2x250x10", "32x576x192", "4096x64x64"):
        m, k, n = api.parse_shape(shape)
        problem = api.problem_of(m=m, n=n, k=k, format=form, dtype_name="bfloat16", bias=True)
        assert explained(problem, ARCHES[arch], m)["others"]


def test_explain_counts_a_dequantized_weight_that_is_written_and_read() -> None:
    found = explained(api.problem_of(m=4096, n=256, k=1536), ARCHES["sm_75"], 4096)
    assert found["bytes"]["w.dense"] == 2 * 256 * 1536 * 2


def test_explain_says_why_a_call_takes_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(problem: object, arch: object) -> None:
        raise W4Error("no such kernel")

    monkeypatch.setattr("w4gen.commands.explain.answer", refuse)
    problem, arch = api.problem_of(m=16, n=64, k=256), ARCHES["portable"]
    found = explained(problem, arch, 16)
    assert (found["path"], found["why"], found["program"]) == ("fallback", "no such kernel", {})
    assert found["bytes"]["weight dequantized"] == 2 * 256 * 64 * 2
    assert "path  the fallback, dequantize then multiply by PyTorch: no such kernel" in words(found, problem, arch, 16)


@pytest.mark.parametrize("m", [1, 129, 2**20, 2**20 + 1, 2**31 - 1, 2**31])
def test_explain_names_a_kernel_for_every_m_that_has_one(m: int, tmp_path: Path) -> None:
    """As the op does: see the test of a million rows under the interpreter."""
    assert facts("explain", "--shape", f"{m}x256x64", cache=tmp_path)["path"] == "kernel"


def test_explain_shows_a_weight_that_is_dequantized_first(tmp_path: Path) -> None:
    found = facts("explain", "--shape", "512x256x64", cache=tmp_path)
    assert (found["path"], found["why"]) == ("kernel", "")
    assert found["schedule"].startswith("template=dequant")
    assert found["bytes"]["x"] == 2 * 256 * 512
    told = w4gen("explain", "--shape", "512x256x64", cache=tmp_path).stdout
    assert "dot over k on vendor" in told


def test_explain_says_why_no_kernel_answers(tmp_path: Path) -> None:
    """A template folder without templates leaves the fallback."""
    done = w4gen("compile", "--shape", "1x64x64", "--templates", str(tmp_path), cache=tmp_path / "cache")
    assert done.returncode == 2
    assert "gemv.py.jinja" in done.stderr


def test_formats_lists_every_family_with_its_cost(tmp_path: Path) -> None:
    rows = {row["format"]: row for row in facts("formats", cache=tmp_path)}
    assert set(rows) == {family.label for family in FAMILIES.values()}
    int4, nf4 = rows["int4_g128"], rows["nf4_g64"]
    assert (int4["bits_per_weight"], nf4["bits_per_weight"]) == (4.12, 4.25)
    assert (int4["decoding"], nf4["decoding"], rows["mxfp4_g32_e8m0"]["decoding"]) == (
        "exponent trick",
        "look-up",
        "exponent shift",
    )
    assert rows["nvfp4_g16_e4m3"]["scale"] == "e4m3, of tensor under f32"
    assert (int4["operations_f16"], int4["operations_bf16"]) == (1.12, 3.12)
    assert all(row["operations_f16"] and row["operations_bf16"] for row in rows.values())
    assert rows["q4_k_g32_m_uint6"]["used_by"] == "GGUF's Q4_K"
    told = w4gen("formats", cache=tmp_path).stdout
    assert all(label in told for label in rows)
    assert "bitsandbytes" in told
    assert "_z is (q - z) · s with z one of the codes (GPTQ, AWQ" in told


def compiled(cache: Path) -> Path:
    """The folder of the one kernel in a cache."""
    done = w4gen("compile", "--shape", "1x256x64", "--arch", "sm_90", "--no-check", cache=cache)
    assert done.returncode == 0, done.stderr
    (folder,) = (path for path in (cache / "kernels").iterdir())
    return folder


def test_roofline_tells_both_conventions(tmp_path: Path) -> None:
    asked = ("roofline", "--model", "Qwen2.5-1.5B", "--bandwidth", "323.9", "--kv", "2048", "--format", "int4_g128")
    told = w4gen(*asked, cache=tmp_path).stdout
    assert "323.9 GB/s: assumed by --bandwidth, not a measurement" in told
    assert "int4_g128 0.772 390.0 411.8 1.143 269.6" in " ".join(told.split())
    found = facts(*asked, "--format", "bf16", cache=tmp_path)
    assert (found["parameters"], found["bandwidth_gbs"], found["kv_tokens"]) == (1_543_714_304, 323.9, 2048)
    assert [each["format"] for each in found["ceilings"]] == ["int4_g128", "bf16"]


def test_roofline_marks_what_is_a_data_sheets_and_reads_a_config_and_a_format_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["SmolLM2-135M"]))
    (tmp_path / "own.py").write_text("import w4gen\nown = w4gen.Format('own', bits=2, origin=-2.0, group=64)")
    asked = ("--model", str(tmp_path), "--arch", "sm_90", "--format", f"{tmp_path}/own.py:own")
    told = w4gen("roofline", *asked, cache=tmp_path).stdout
    assert "4800 GB/s: the data sheet of H200 SXM, not a measurement" in told
    assert "own_g64 0.034" in " ".join(told.split())  # 134,515,008 weights of 2 bits


def test_cache_says_what_it_holds(tmp_path: Path) -> None:
    assert w4gen("cache", "path", cache=tmp_path).stdout.strip() == str(tmp_path / "kernels")
    assert facts("cache", "list", cache=tmp_path) == []
    assert "0 kernels" in w4gen("cache", "list", cache=tmp_path).stdout
    folder = compiled(tmp_path)
    (row,) = facts("cache", "list", cache=tmp_path)
    assert row["folder"] == folder.name
    assert row["question"] == "y[1, 64] = x[1, 256] @ w[64, 256].T · int4_g128 · f16"
    assert row["schedule"].startswith("template=gemv_half block_m=1")
    assert row["compiled_for"] == ["sm_90"]
    assert row["bytes"] == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert "sm_90" in w4gen("cache", "list", cache=tmp_path).stdout


def test_cache_verify_finds_what_is_damaged(tmp_path: Path) -> None:
    folder = compiled(tmp_path)
    assert facts("cache", "verify", cache=tmp_path) == {"kernels": 1, "damaged": {}}
    cubin = next(folder.rglob("*.cubin"))
    cubin.write_bytes(cubin.read_bytes()[:-1])
    with (folder / "kernel.py").open("a") as file:
        file.write("# more")
    done = w4gen("cache", "verify", "--json", cache=tmp_path)
    assert done.returncode == 1
    assert json.loads(done.stdout)["damaged"] == {folder.name: ["kernel.py", cubin.parent.name]}
    assert "1 kernel, 1 damaged" in w4gen("cache", "verify", cache=tmp_path).stdout


def test_cache_clear_asks_and_removes_kernels_only(tmp_path: Path) -> None:
    cache, precious = tmp_path / "cache", tmp_path / "precious"
    folder = compiled(cache)
    precious.mkdir()
    (precious / "thesis.txt").touch()
    (folder.parent / ("0" * 32)).symlink_to(precious)
    (folder.parent / "notes").mkdir()
    (cache / "tuned").mkdir()
    (cache / "tuned" / "sm_90.json").touch()
    nobody = w4gen("cache", "clear", cache=cache)
    assert (nobody.returncode, "give --yes" in nobody.stderr) == (2, True)
    assert folder.is_dir()
    assert "nothing was removed" in w4gen("cache", "clear", cache=cache, typed="n\n").stderr
    assert folder.is_dir()
    assert w4gen("cache", "clear", cache=cache, typed="y\n").stdout.startswith("removed 2 kernels")
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    kept = {"cache/kernels/notes", "cache/tuned/sm_90.json", "precious/thesis.txt"}
    assert left == kept | {"cache", "cache/kernels", "cache/tuned", "precious"}
    assert facts("cache", "clear", "--yes", cache=cache)["removed"] == 0


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    done = w4gen("compile", "--shape", "1x64x64", "--emit", "py", "--out", "/dev/null", cache=tmp_path)
    assert (done.returncode, done.stderr) == (2, "w4gen: /dev/null: File exists: give another file or folder\n")


def test_cache_clear_beside_a_bundle_removes_nothing_that_was_not_named(tmp_path: Path) -> None:
    done = w4gen("cache", "clear", "--yes", cache=tmp_path / "kernels.w4g")
    assert (done.returncode, "kernels.w4g, which is a file of yours: unset it to clear" in done.stderr) == (2, True)


def test_show_as_json(tmp_path: Path) -> None:
    shape = ("--shape", "1x64x64")
    assert facts("show", "schedule", *shape, cache=tmp_path)["template"] == "gemv"
    assert "def gemv(" in facts("show", "kernel", *shape, cache=tmp_path)["source"]
    assert "kept" in facts("show", "ir", *shape, cache=tmp_path)["scheduled"]


def commands(group: click.Group) -> Iterator[click.Command]:
    """Every command, those of groups included."""
    for each in group.commands.values():
        yield from commands(each) if isinstance(each, click.Group) else (each,)


@pytest.mark.parametrize("command", list(commands(cli)), ids=lambda each: each.name)
def test_every_command_has_json_and_a_sentence(command: click.Command) -> None:
    assert "as_json" in {each.name for each in command.params}
    assert command.help
    assert all(each.help for each in command.params if isinstance(each, click.Option))


def test_debug_tells_on_stderr(tmp_path: Path) -> None:
    quiet, loud = (
        process("show", "schedule", "--shape", "1x64x64", cache=tmp_path, W4GEN_DEBUG=level).stderr for level in ("0", "4")
    )
    assert quiet == ""
    assert "rendered in" in loud
    assert "offline, once per weight" in loud
    assert "def gemv(" in loud


def test_importing_w4gen_is_cheap_and_the_command_line_brings_no_torch() -> None:
    code = """
import sys, time
start = time.process_time()
import w4gen
print(time.process_time() - start, end=" ")
import w4gen.cli
print("torch" in sys.modules, "triton" in sys.modules, {*w4gen.__all__} <= {*dir(w4gen)})
"""
    told = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout for _ in range(3)]
    seconds, torch, triton, listed = min(told, key=lambda each: float(each.split()[0])).split()
    assert float(seconds) < 0.2
    assert (torch, triton, listed) == ("False", "False", "True")
