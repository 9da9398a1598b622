"""What is made of compute-sanitizer's output; the tool itself runs where a GPU is."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import triton
from click.testing import CliRunner
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from w4gen import toolchain
from w4gen.bench import report, sanitize
from w4gen.bench.sanitize import BLIND, Ran, main, ran, reports, summary, tool, verdict
from w4gen.bench.sanitized import CALLS, PLANTED, asks, planted_race, planted_read
from w4gen.codegen.render import PRINTERS
from w4gen.schedule.arch import ARCHES

ALL = Ran((*({"case": name, "right": True} for name in CALLS), {"case": "planted"}), 0, 9.0)
PLANT = {
    "memcheck": """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at planted_read+0xb0 in sanitized.py:92
=========     by thread (104,0,0) in block (0,0,0)
=========     Access to 0x7f6d47000fa0 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f6d47000000 of size 4,000 bytes
=========
""",
    "initcheck": """========= Uninitialized __global__ memory read of size 4 bytes
=========     at planted_read+0xb0 in sanitized.py:92
=========     by thread (31,0,0) in block (0,0,0)
""",
    "racecheck": """========= Error: Race reported between Write access at planted_race+0x90 in sanitized.py:99
=========     and Read access at planted_race+0x100 in sanitized.py:99 [508 hazards]
=========
""",
}
OURS = """========= Invalid __global__ read of size 16 bytes
=========     at gemv_mma+0x120 in <gemv_mma 12ab>:40
=========     by thread (3,0,0) in block (1,0,0)
=========
========= Invalid __global__ read of size 16 bytes
=========     at gemv_mma+0x120 in <gemv_mma 12ab>:40
"""
OTHERS = """========= Uninitialized __global__ memory read of size 2 bytes
=========     at void cutlass::Kernel2<cutlass_80_wmma_tensorop_f16>(T1::Params)+0x2f0
=========     by thread (0,0,0) in block (0,0,0)
"""
END = "========= ERROR SUMMARY: 1 error\n"


@pytest.mark.parametrize("name", PLANTED)
def test_a_tool_that_saw_the_planted_fault_and_no_other_is_clean(name: str) -> None:
    row = verdict(name, PLANT[name] + OTHERS + END, ALL, ["gemv_mma"])
    assert (row["clean"], row["why"], row["planted"], row["calls"]) == (True, "", 1, len(CALLS))
    assert row["others"] == {"cutlass::Kernel2: Uninitialized __global__ memory read of size 2 bytes": 1}


@pytest.mark.parametrize("name", PLANTED)
def test_a_tool_that_saw_nothing_is_blind(name: str) -> None:
    row = verdict(name, "========= COMPUTE-SANITIZER\n" + END, ALL, ["gemv_mma"])
    assert (row["clean"], row["why"]) == (False, BLIND)
    other = "racecheck" if name != "racecheck" else "memcheck"
    assert verdict(name, PLANT[other], ALL, [])["why"] == BLIND, "the fault of another tool is not this one's"


def test_a_report_about_one_of_our_kernels_is_told() -> None:
    row = verdict("memcheck", OURS + PLANT["memcheck"], ALL, ["gemm", "gemv_mma"])
    assert not row["clean"]
    what = "gemv_mma: Invalid __global__ read of size 16 bytes at `<gemv_mma 12ab>:40`"
    assert row["reports"] == {what: 2}
    assert "at gemv_mma+0x120" in row["first_of_each"][what], "where it is"


RACES = """========= Warning: Race reported between Write access at dequant+0x{0}10 in {1}:3
=========     and Read access at dequant+0x{0}90 in {1}:4 [508 hazards]
=========
========= Warning: Race reported between Write access at dequant+0x{0}10 in {1}:3
=========     and Read access at dequant+0x{0}90 in elsewhere.py:7 [16 hazards]
"""
PAIR = "dequant: Warning: Race reported between Write access at `one = 1` and Read access at `two = one | 2`"


@pytest.mark.parametrize("at", ["1", "2f"])
def test_a_race_is_named_by_the_lines_of_its_kernel(at: str) -> None:
    file = toolchain.module(f"# {at}\n\none = 1\ntwo = one | 2\n", "dequant").__file__
    row = verdict("racecheck", RACES.format(at, file) + PLANT["racecheck"], ALL, ["dequant"])
    assert row["reports"] == {PAIR: 1, PAIR.replace("two = one | 2", "elsewhere.py:7"): 1}, "wherever the compiler put them"
    assert "[508 hazards]" in row["first_of_each"][PAIR]


def test_only_a_report_that_is_explained_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    file = toolchain.module("#\n\none = 1\ntwo = one | 2\n", "dequant").__file__
    log, other = RACES.format("1", file) + PLANT["racecheck"], PAIR.replace("two = one | 2", "elsewhere.py:7")
    monkeypatch.setattr(sanitize, "EXPLAINED", {PAIR: "one warp"})
    row = verdict("racecheck", log, ALL, ["dequant"])
    assert (row["clean"], row["why"], row["explained"]) == (False, f"1 times {other}", {PAIR: "one warp"})
    assert set(row["reports"]) == {PAIR, other}, "it is told all the same"
    monkeypatch.setitem(sanitize.EXPLAINED, other, "one warp too")
    row = verdict("racecheck", log, ALL, ["dequant"])
    assert (row["clean"], row["why"]) == (True, "")
    assert not verdict("racecheck", log.replace("dequant", "gemm"), ALL, ["gemm"])["clean"], "of this kernel alone"


def test_what_a_tool_says_of_itself_is_not_passed_over() -> None:
    lost = "========= Internal Sanitizer Error: The Sanitizer encountered an error and didn't track the launch.\n"
    assert "didn't track" in verdict("memcheck", lost + PLANT["memcheck"], ALL, [])["why"]
    assert [what for what, _ in reports("========= Error: Device not supported.\n" + END)] == ["Error: Device not supported."]


def test_calls_that_are_wrong_or_were_not_made_are_named() -> None:
    wrong = Ran(({"case": "few rows", "right": False}, *(each for each in ALL.told if each["case"] != "few rows")), 0, 9.0)
    row = verdict("memcheck", PLANT["memcheck"], wrong, [])
    assert (row["why"], row["calls"]) == ("calls not made or not right: few rows", len(CALLS) - 1)
    cut = verdict("memcheck", "", Ran(ALL.told[:2], -9, 40.0, "out of time"), [])
    assert "it ended with status -9: out of time" in cut["why"]
    assert cut["calls"] == 2


def test_a_process_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    told = 'print(\'{"case": "few rows", "right": true}\', flush=True); print(\'now\', flush=True)'
    slow = [sys.executable, "-c", f"import time; {told}; time.sleep(60)"]
    done = ran(slow, 2.0)
    assert (done.told, done.last) == (({"case": "few rows", "right": True},), "now")
    assert done.status == -9
    assert done.seconds < 20


def test_the_tool_is_found_where_it_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    before = tool()
    file = tmp_path / "nvidia" / "cu13" / "compute-sanitizer" / "compute-sanitizer"
    file.parent.mkdir(parents=True)
    file.write_text("#!/bin/sh\necho NVIDIA\necho Version 2026.4\n")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nvidia" / "cu13"))
    assert tool() == before, "it cannot be run"
    file.chmod(0o755)
    assert tool() == file
    assert sanitize.version(file) == "Version 2026.4"
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setattr(
        sanitize, "find_spec", lambda name: type("Spec", (), {"submodule_search_locations": [str(tmp_path / name)]})
    )
    assert file in sanitize.candidates()


def test_every_template_has_a_call_on_sm_90_and_each_is_of_its_own_kernel() -> None:
    kernels = {name: ask.kernel() for name, ask in asks(ARCHES["sm_90"]).items()}
    assert {each.name for each in kernels.values()} == set(PRINTERS)
    assert {*PRINTERS, "repack"} == set(sanitize.written()), "which has a call of its own"
    assert {piece.name for each in kernels.values() for piece in each.pieces} > {"add_parts"}
    assert {each.schedule.sum_at for each in kernels.values() if each.name == "gemv_half"} == {"shared"}, "a cluster"
    assert {each.schedule.unit for each in kernels.values() if each.name == "gemv"} == {"lanes", "mma"}
    whole = ("gemm", "gemm_wgmma", "dgrad_wgmma")
    assert all(each.problem.n % 8 or each.name in whole for each in kernels.values()), "masks are watched"
    ends = {name: dict(re.findall(r"(?m)^(STEPS|RING) = gl.constexpr\((\d+)\)", each.source)) for name, each in kernels.items()}
    again = {kernels[name].name for name, end in ends.items() if len(end) == 2 and int(end["STEPS"]) > int(end["RING"])}
    assert again == {"gemv_mma", "gemm_wgmma", "dgrad_wgmma"}, "slots of a ring are filled again"


def test_the_planted_faults_compile_and_the_race_is_in_shared_memory() -> None:
    target, shared = GPUTarget("cuda", 90, 32), {}
    for fault, given in ((planted_read, {"data_ptr": "*i32", "out_ptr": "*i32"}), (planted_race, {"out_ptr": "*i32"})):
        source = ASTSource(fault, {**given, "BLOCK": "constexpr"}, {"BLOCK": 256})
        shared[fault.__name__] = triton.compile(source, target=target).metadata.shared
    assert set(shared) == set(PLANTED.values())
    assert shared["planted_race"] > 0


def test_without_a_tool_a_row_says_so_and_the_page_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Ran(({"case": "few rows", "template": "gemv_mma", "kernels": ["gemv_mma"], "right": True},), 1, 2.0, "no more")
    about = {
        "device": "H200",
        "torch": "2",
        "triton": "3.6.0",
        "cuda": "13",
        "date": "today",
        "command": "w4gen.bench.sanitize --out",
    }
    found = about | summary(None, alone, 1.0)
    assert found["templates"] == ["gemv_mma"]
    assert {"dgrad", "repack"} < set(found["templates_without_a_call"])
    assert {row["why"] for row in found["tools"]} == {
        "compute-sanitizer is not on the PATH, in CUDA's folder or in pip's packages"
    }
    (tmp_path / "s.json").write_text(json.dumps(found))
    page = report.section(tmp_path / "s.json")
    assert "| racecheck | compute-sanitizer is not on the PATH" in page
    clean = verdict("memcheck", PLANT["memcheck"], ALL, [])
    (tmp_path / "s.json").write_text(json.dumps(found | {"tools": [clean], "sanitizer": "Version 2026.4"}))
    assert f"| memcheck | clean | {len(CALLS)} | 0 | 9.0 |" in report.section(tmp_path / "s.json")
    told = clean | {"explained": {PAIR: "one warp"}}
    (tmp_path / "s.json").write_text(json.dumps(found | {"tools": [told]}))
    assert f"- {PAIR}: one warp" in report.section(tmp_path / "s.json")


def test_without_a_gpu_the_command_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refused = CliRunner().invoke(main, ["--out", str(tmp_path / "s.json")])
    assert refused.exit_code == 1
    assert "there is no GPU here" in refused.output
