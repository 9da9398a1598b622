"""What comes before a first answer, without a GPU: processes are made up, or their GPU is; what is told of them is not."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import w4gen
from w4gen.api import problem_of
from w4gen.bench import cold, report
from w4gen.cli import cli
from w4gen.errors import ShapeError, ToolchainError
from w4gen.processes import module
from w4gen.runtime.timer import Timing
from w4gen.schedule.arch import ARCHES

FIRST = {"repack_s": 0.01, "render_s": 0.04, "compile_s": 1.9, "load_s": 0.5, "first_call_s": 0.05, "us": 3.0, "cublas_us": 8.0}
AGAIN = FIRST | {"compile_s": 0.0, "load_s": 0.0, "format": "int4_g128"}


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Processes that are made up: what each was asked, and what it found in its cache."""
    seen: list[tuple[Any, ...]] = []

    def started(shape: str, form: str, dtype: str, cache: str) -> dict[str, Any]:
        held = sorted(os.listdir(cache))
        (Path(cache) / f"kernel {len(held)}").touch()
        seen.append((shape, str(form), dtype, cache, held))
        return AGAIN if held else FIRST

    monkeypatch.setattr(cold, "started", started)
    monkeypatch.setattr("w4gen.commands.bench.detected", lambda: "sm_90")
    return seen


def test_a_shape_is_measured_twice_and_the_second_finds_what_the_first_left(processes: list[tuple[Any, ...]]) -> None:
    (row,) = w4gen.cold(["1x4096x4096"])["amortized"]
    assert [each[-1] for each in processes] == [[], ["kernel 0"]]
    assert not os.path.exists(processes[0][3])
    assert (row["first_s"], row["again_s"], row["saved_us"]) == (2.5, 0.1, 5.0)
    assert (row["break_even_first"], row["break_even_again"]) == (500_000, 20_000)
    w4gen.cold(["1x64x64", "2x64x64"], ["int4_g128", "nf4_g64"])
    assert len({each[3] for each in processes}) == 5, "each shape has caches of its own"


def test_what_saves_nothing_never_pays() -> None:
    found = cold.amortized(FIRST | {"cublas_us": 3.0}, AGAIN | {"cublas_us": 3.0})
    assert (found["break_even_first"], found["break_even_again"]) == (None, None)


def test_the_command_and_the_page_tell_when_it_has_paid(processes: list[tuple[Any, ...]], tmp_path: Path) -> None:
    out = tmp_path / "cold.json"
    done = CliRunner().invoke(cli, ["bench", "--cold", "--shape", "1x4096x4096", "--out", str(out)], standalone_mode=False)
    assert done.exception is None
    assert done.output.splitlines() == [
        "1x4096x4096 int4_g128 float16: 3.00 us, cuBLAS 8.00 us, 5.00 us saved a call",
        "    first  2.500 s: repack 0.010, render 0.040, compile 1.900, load 0.500, first_call 0.050; paid after 500,000 calls",
        "    again  0.100 s: repack 0.010, render 0.040, compile 0.000, load 0.000, first_call 0.050; paid after 20,000 calls",
    ]
    page = report.section(out)
    assert (
        "| 4096 → 4096 | 1 | int4_g128 | float16 | first | 0.010 | 0.040 | 1.900 | 0.500 | 0.050 | 2.500 | 5.00 | 500,000 |"
        in page
    )
    assert json.loads(out.read_text())["method"].startswith("each stage once")


def test_cold_goes_with_shapes(processes: list[tuple[Any, ...]]) -> None:
    for options in (["--cold"], ["--cold", "--ablate", "--shape", "1x64x64"]):
        with pytest.raises(ShapeError, match="--ablate, or --cold, and --shape MxKxN go together"):
            raise CliRunner().invoke(cli, ["bench", *options], standalone_mode=False).exception  # type: ignore[misc]


def test_the_stages_of_a_process(monkeypatch: pytest.MonkeyPatch, fresh_cache: Path) -> None:
    """Compiled for sm_90 with no GPU: the second time finds the binary."""
    loaded: list[Any] = []
    monkeypatch.setattr(cold, "here", lambda: torch.device("cpu"))
    monkeypatch.setattr(cold, "arch_of", lambda device: ARCHES["sm_90"])
    monkeypatch.setattr(cold, "launcher", lambda kernel, device: loaded.append(kernel))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(cold, "copies_for", lambda *_: 2)
    monkeypatch.setattr(cold, "time_calls", lambda calls: Timing(calls[0]().shape[1] / 64, 0.0))
    form = str(problem_of(m=1, n=1, k=1, format="int4_g128").format)
    first, again = (cold.stages("1x256x64", form, "float16") for _ in range(2))
    assert set(cold.STAGES) < set(first)
    assert first["compile_s"] > again["compile_s"]
    assert (first["us"], first["cublas_us"], first["format"]) == (1.0, 1.0, "int4_g128")
    assert [kernel.problem.k for kernel in loaded] == [256, 256]


def test_a_process_has_caches_of_its_own_and_its_failure_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def run(command: list[str], env: dict[str, str], **_: Any) -> Any:
        seen.update(command=command, env=env)
        return type(
            "Done", (), {"returncode": seen.get("status", 0), "stdout": 'noise\n{"us": 1}\n', "stderr": "a\nout of memory\n"}
        )

    monkeypatch.setattr(cold.subprocess, "run", run)
    assert cold.started("1x256x64", "int4_g64", "bfloat16", str(tmp_path)) == {"us": 1}
    *asked, form, kind = seen["command"]
    assert asked == module("w4gen.bench.cold", "1x256x64")
    assert asked[0] == sys.executable
    assert (w4gen.Format.parse(form).label, kind) == ("int4_g64", "bfloat16")
    assert (seen["env"]["W4GEN_CACHE"], seen["env"]["TRITON_CACHE_DIR"]) == (str(tmp_path), f"{tmp_path}/triton")
    seen["status"] = 1
    with pytest.raises(ToolchainError, match=r"1x256x64 in .* was not measured, as its process ended with 1: out of memory"):
        cold.started("1x256x64", "int4_g64", "bfloat16", str(tmp_path))
