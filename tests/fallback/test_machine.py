"""Ceilings of a machine without a GPU: times are made up; what is decoded, worked out and told is not."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import oracle
import ptx as interpreter
import pytest
import torch
import triton
from click.testing import CliRunner
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import w4gen
from w4gen.bench import floors, machine, report
from w4gen.bench.ceilings import measured
from w4gen.cli import cli
from w4gen.errors import ArchError, FormatError, W4Error
from w4gen.formats import named
from w4gen.ir.types import BF16, F16, DType
from w4gen.runtime.timer import Timing
from w4gen.schedule.arch import ARCHES

LAYER = 4096 * 14336


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is made up: 100 SMs, 5000 GB/s, and 100 us for whatever is called."""
    about = SimpleNamespace(name="a GPU that is made up", multi_processor_count=100, L2_cache_size=2**25, total_memory=80e9)
    monkeypatch.setattr(machine, "here", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: about.name)
    monkeypatch.setattr(machine, "floor", lambda nbytes, *_: Timing(nbytes / 5e6, 0.01))
    monkeypatch.setattr(machine, "read", lambda nbytes, *_: Timing(nbytes / 8e6, 0.02))
    monkeypatch.setattr(machine, "time_calls", lambda calls: Timing(100.0 / len(calls), 0.0))
    monkeypatch.setattr(machine, "arch_of", lambda device: ARCHES["sm_90"])
    monkeypatch.setattr(machine.host, "turns", lambda calls, *_: dict.fromkeys(calls, 13.0))
    monkeypatch.setattr(machine, "SIZES", (64,))
    monkeypatch.setattr("w4gen.commands.roofline.detected", lambda: "sm_90")


def test_every_ceiling_is_measured_and_says_how(on_a_gpu: None) -> None:
    seen: list[machine.Figure] = []
    facts = w4gen.roofline(seen.append)
    found = {each["name"]: each for each in facts["figures"]}
    assert [each.name for each in seen] == list(found)
    assert (facts["device"], facts["sms"], facts["l2_mb"], facts["memory_gb"]) == ("cpu", 100, 32, 80)
    assert found["read"]["value"] == pytest.approx(5000)
    assert found["copy"]["value"] == pytest.approx(2 * 2**29 / 1e-4 / 1e9), "both what is read and what is written"
    assert found["L2 read, 8 MB"]["value"] == pytest.approx(8000)
    assert found["matrix bf16, 64"]["value"] == pytest.approx(2 * 64**3 / 1e-4 / 1e12)
    assert found["launch"]["value"] == found["dependent launch"]["value"] == pytest.approx(100 / 1024)
    assert found["host launch"]["value"] == 13.0
    weights = 100 * machine.PROGRAMS * machine.BLOCK * machine.TURNS
    assert found["decode int4_g128 to f16"]["value"] == pytest.approx(weights * 8 / 1e-4 / 1e9)
    assert found["decode fp8_e4m3_row_f32 to bf16"]["value"] == pytest.approx(weights * 4 / 1e-4 / 1e9)
    assert "decode int8_g128 to bf16" not in found, "bf16 does not hold its values"
    assert all(each["method"] and each["unit"] for each in facts["figures"])
    assert measured(facts, "decode", "int4_g128") == found["decode int4_g128 to f16"]["value"]
    assert measured(facts, "decode", "int3_g128") is None


def test_an_arch_without_dependent_launch_has_no_such_figure(on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "arch_of", lambda device: ARCHES["sm_80"])
    assert "dependent launch" not in [each.name for each in machine.launches(torch.device("cpu"))]


@pytest.mark.parametrize("kind", [F16, BF16], ids=str)
@pytest.mark.parametrize("name", ["int2_g128", "int4_g128", "e2m1_g32", "fp8_e4m3"])
def test_what_is_timed_decodes(name: str, kind: DType) -> None:
    """The folded pairs are those of the oracle's values; nothing is left out of the text that could make it fast."""
    form = named(name)
    setup, text = machine.decoding(form, kind)
    held = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    (found,) = interpreter.run(text, 1, held)
    values, powers = np.array(oracle.VALUES[form.name]), {("e2m1_g32", "f16"): 14, ("fp8_e4m3", "f16"): 8}  # left to the sums
    count = 16 // form.bits
    halves = []
    for half in range(2):
        codes = [held >> (16 * half + code * form.bits) & (2**form.bits - 1) for code in range(count)]
        small = [values[code] * 2.0 ** -powers.get((name, kind.name), 0) for code in codes]
        halves.append(functools.reduce(np.bitwise_xor, [interpreter.bits_of(each, kind.name) for each in small]))
    assert setup == ""
    numbers = np.isfinite([values[held >> at & (2**form.bits - 1)] for at in range(0, 32, form.bits)]).all(0)
    assert numbers.mean() > 0.9
    assert np.array_equal(found[numbers], (halves[0] | halves[1] << 16)[numbers])


def test_a_table_is_looked_up_in_pairs_in_shared_memory() -> None:
    setup, text = machine.decoding(named("nf4_g64"), F16)
    assert setup.startswith(f".shared .align 16 .b8 pairs[{16 * 16 * 128}]")
    assert text.count("ld.shared.b32 v") == 4
    for name in ("int3_g64", "q3_k"):
        with pytest.raises(FormatError, match="only codes that fill a word"):
            machine.decoding(named(name), F16)


def compiled(function: Any, **values: Any) -> str:
    """The PTX of a kernel for sm_90: arguments in capitals are constants, the others tensors or a count."""
    kinds = {"turns": "i32", "count": "i32"}
    signature = {each: "constexpr" if each.isupper() else kinds.get(each, "*i32") for each in function.arg_names}
    return triton.compile(ASTSource(function, signature, constexprs=values), target=GPUTarget("cuda", 90, 32)).asm["ptx"]


@pytest.mark.parametrize("name", ["int4_g128", "nf4_g64"])
def test_decoding_compiles_and_stays_in_the_loop(name: str) -> None:
    setup, decode = machine.decoding(named(name), F16)
    text = compiled(machine.decode_only, SETUP=setup, DECODE=decode, BLOCK=256, BLOCKS=2)
    loop = text[text.index("$L__BB0_") :]
    loop = loop[: loop.index("bra")]
    words = 256 // 128
    assert loop.count("mov.b32 ") >= words
    assert loop.count("xor.b32") >= 3 * words, "four pairs of each word of a thread"
    assert text.count(".shared") >= (1 if name == "nf4_g64" else 0)


def test_an_empty_kernel_is_empty_and_starts_early_where_it_is_to() -> None:
    assert "griddepcontrol" not in compiled(machine.nothing, OVERLAP=False)
    text = compiled(machine.nothing, OVERLAP=True)
    assert text.index("griddepcontrol.launch_dependents") < text.index("griddepcontrol.wait")
    warm = compiled(floors.read_only, BLOCK=1024, TURNS=2, OVERLAP=False, POLICY="evict_last")
    assert "evict_last" in warm
    assert "evict_first" not in warm


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli, ["roofline", *arguments], standalone_mode=False)


def test_a_measurement_is_written_and_bounds_a_model_here_and_later(on_a_gpu: None, tmp_path: Path) -> None:
    out = tmp_path / "results" / "roofline.json"
    asked = ("--model", "Qwen2.5-1.5B", "--format", "int4_g128", "--format", "bf16")
    told = run("--measure", "--out", str(out), *asked).output
    assert "read   5,000.00 GB/s" in told
    rate = 100 * machine.PROGRAMS * machine.BLOCK * machine.TURNS * 8 / 1e-4
    linears = 28 * (2 * 1536 * 1536 + 2 * 256 * 1536 + 3 * 8960 * 1536)
    row = f"int4_g128 0.772 6477.9 6477.9 1.143 4375.9 {rate / linears:.0f}"
    assert row in " ".join(told.split())
    later = run("--machine", str(out), *asked).output
    assert "5000 GB/s: reading, measured on cpu," in later
    assert row in " ".join(later.split())
    assert "bf16 3.087 1619.5 1619.5 3.087 1619.5\n" in "\n".join(" ".join(line.split()) for line in later.splitlines()) + "\n"
    page = report.section(out)
    assert "| read | 5,000.00 GB/s | ±1.0% | the fastest of 8 kernels that only read 1 GiB, cold, in a graph |" in page
    assert json.loads(run("--measure", "--json").output)["figures"]


@pytest.mark.parametrize(
    ("text", "why"),
    [("{}", "holds no ceilings: give a file"), ("[", "holds no ceilings"), ('{"figures": []}', "has no bandwidth of reading")],
)
def test_a_file_of_something_else_is_refused(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "it.json").write_text(text)
    with pytest.raises(W4Error, match=why):
        raise run("--machine", str(tmp_path / "it.json"), "--model", "Qwen2.5-1.5B").exception


@pytest.mark.parametrize("pair", list(itertools.combinations(("--measure", "--machine=x", "--bandwidth=9", "--arch=sm_90"), 2)))
def test_two_machines_are_refused(pair: tuple[str, str]) -> None:
    with pytest.raises(W4Error, match="each say which machine: give one of the two"):
        raise run("--model", "Qwen2.5-1.5B", *pair).exception


def test_no_machine_and_no_gpu_are_told_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("w4gen.commands.roofline.detected", lambda: "portable")
    with pytest.raises(ArchError, match="a ceiling is a machine's"):
        raise run("--model", "Qwen2.5-1.5B").exception
    with pytest.raises(W4Error, match="there is none here: take a data sheet's by --arch sm_90, or a file by --machine"):
        raise run("--measure").exception
