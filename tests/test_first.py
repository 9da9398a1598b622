"""Measuring first calls: processes and caches are real, the GPU is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from w4gen.bench import first, report
from w4gen.bench.first import FIRST, first_calls, main, process, told
from w4gen.errors import ToolchainError


def test_first_calls_are_timed_in_two_processes() -> None:
    found = first_calls("int4_g64", ["1x128x64", "3x128x64"], "cpu")
    assert [(row["shape"], row["format"]) for row in found["rows"]] == [("1x128x64", "int4_g64"), ("3x128x64", "int4_g64")]
    assert found["import_ms"] > 1
    assert all(row["cold_s"] > 0 and row["warm_ms"] > 0 and row["second_ms"] > 0 and row["make_ms"] > 0 for row in found["rows"])
    assert told(found["rows"][0]).startswith("1x128x64 int4_g64: cold ")


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(ToolchainError, match=r"cpu int4_g64 1x128: .*shape '1x128' is not MxKxN"):
        process("unused", FIRST, "cpu", "int4_g64", "1x128")


def test_a_models_kernels_are_twenty_eight_and_all_compiled_anew(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def compiled(asks: list[first.ahead.Ask], workers: int) -> list[first.ahead.Done]:
        asked.extend(asks)
        return [first.ahead.Done(each, cached=place == 3, seconds=0.5) for place, each in enumerate(asks)]

    monkeypatch.setattr(first.ahead, "compiled", compiled)
    first.tell_warmed("sm_90", "int4_g128", "8")
    found = json.loads(capsys.readouterr().out)
    assert (found["kernels"], found["workers"], found["compiling_s"]) == (28, 8, 14.0)
    assert found["failed"] == ["it was there before"]
    assert len({each.problem for each in asked}) == 28


def test_the_page_has_first_calls(tmp_path: Path) -> None:
    about = {"device": "H200", "torch": "2", "triton": "3.6.0", "cuda": "13", "date": "today", "command": "w4gen.bench.first "}
    row = {"shape": "1x128x64", "format": "nf4_g64", "cold_s": 1.5, "warm_ms": 50.25, "second_ms": 0.04, "make_ms": 9.0}
    warmed = {"model": "M", "format": "int4_g128", "kernels": 28, "workers": 8, "seconds": 6.5, "compiling_s": 40.0, "failed": []}
    path = tmp_path / "first.json"
    path.write_text(json.dumps(about | {"first_calls": [row], "import_ms": 120.0, "warmed": warmed}))
    page = report.section(path)
    assert "| 1x128x64 | nf4_g64 | 1.50 | 50.2 | 0.040 |" in page
    assert "28 kernels of M in int4_g128, compiled by 8 processes with an empty cache: 6.5 s." in page


def test_without_a_gpu_the_command_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refused = CliRunner().invoke(main, ["--out", str(tmp_path / "f.json")])
    assert refused.exit_code == 1
    assert "there is none here" in refused.output
