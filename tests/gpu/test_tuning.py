"""Tuning on a GPU: a row that is right and no slower than the rules' choice, and one that cannot run is skipped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from workers import made_up

import w4gen
from w4gen import cache, toolchain, tuned
from w4gen.api import problem_of
from w4gen.errors import ScheduleError
from w4gen.ir.lower import lower
from w4gen.paths import CHECKOUT
from w4gen.pipeline import compile, made
from w4gen.runtime.launch import arch_of
from w4gen.runtime.tune import right, trial

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("m", [1, 16])
def test_a_layer_is_tuned_and_used(m: int, fresh_cache: Path) -> None:
    device = torch.device("cuda", 0)
    problem, arch = problem_of(m=m, n=3072, k=4096), arch_of(device)  # of no model whose rows are shipped
    before = trial(compile(problem, arch), m, device)()
    ((_, row, found),) = w4gen.tune([(problem, m, 1)], 30)  # seconds in all: of the process too
    assert row is not None
    assert (row.device, row.triton) == (arch.device, tuned.load(tuned.path_of(arch.name))[0].triton)
    assert row.us <= 1.1 * before
    assert 0 < row.floor_us < row.us
    assert found.trials > 1
    kernel = compile(problem, arch)
    assert kernel.schedule == row.schedule
    assert right(kernel, device)
    ((_, again, _),) = w4gen.tune([(problem, m, 1)], 20)
    assert again is None, "known by now"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_all_gpus_tune(fresh_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A process on each; what they find is in one file."""
    asked = [(problem_of(m=m, n=n, k=4096), m, 1) for n in (1048, 3072) for m in (1, 16)]  # of no model
    found = list(w4gen.tune(asked, 40))
    assert not caplog.records
    assert {str(each.problem) for each, _, _ in found} == {str(problem) for problem, _, _ in asked}
    rows = tuned.load(tuned.path_of(arch_of(torch.device("cuda", 0)).name))
    assert {row.question for row in rows} == {tuned.question(problem) for problem, _, _ in asked}
    assert all(row.device == torch.cuda.get_device_name(0) and 0 < row.floor_us < row.us <= 1.05 * row.rules_us for row in rows)


WORKER = """
import sys
import torch
import triton
import triton.language as tl
from w4gen import ahead
from w4gen.bench import tune
from w4gen.ir.lower import lower
from w4gen.runtime import tune as runtime
from w4gen.schedule.rules import pick
from w4gen.toolchain import able

@triton.jit
def astray(y_ptr):
    tl.store(y_ptr + (1 << 42), 1.0)

@triton.jit
def trap(y_ptr):
    code = tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(y_ptr, code.to(tl.float32))

made, broken = runtime.trial, {1: trap, 16: astray}

def trial(kernel, m, device):
    if m in broken and kernel.schedule == pick(lower(kernel.problem), able(runtime.arch_of(device))):
        broken[m][(1,)](torch.zeros(1, device=device))
    return made(kernel, m, device)

runtime.trial, runtime.MOST = trial, 6
tune.main(sys.stdin, ahead.answers())
"""


def test_kernels_that_break_the_context_cost_their_question_alone(
    fresh_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The rules' choice traps for one row and writes out of bounds for sixteen; a second run tunes both without it."""
    made_up(WORKER, tmp_path, monkeypatch)
    asked = [(problem_of(m=m, n=1024, k=1024), m, 1) for m in (1, 16, 64)]
    found = {question.m: row for question, row, _ in w4gen.tune(asked, 120)}
    assert {m: row is not None for m, row in found.items()} == {1: False, 16: False, 64: True}
    assert [("CUDA" in each.message, "which no run does again" in each.message) for each in caplog.records] == [(True, True)] * 2
    caplog.clear()
    again = {question.m: (row, search) for question, row, search in w4gen.tune(asked, 120)}
    assert {m: row is not None for m, (row, _) in again.items()} == {1: True, 16: True, 64: False}
    assert all(again[m][1].skipped[0][0] == 0 and "ended the process" in again[m][1].skipped[0][1] for m in (1, 16))
    assert not caplog.records
    assert torch.ones(2, device="cuda").sum() == 2, "the caller's context is whole"


def test_a_curve_is_measured(fresh_cache: Path) -> None:
    found = w4gen.curve("1536x1536", (1, 16, 4096), progress=False)
    assert (found.source, found.where) == ("measured", torch.cuda.get_device_name())
    one, _, many = found.total_us
    assert 0.5 < one < many / 3, "4096 rows take the matrix cores tens of microseconds"


@pytest.mark.parametrize(("m", "form"), [(1, "int4_g128"), (16, "nf4_g64")])
def test_every_part_of_an_ablation_is_right(m: int, form: str, fresh_cache: Path) -> None:
    (told,) = w4gen.ablate([f"{m}x4096x4096"], [form])["ladders"]
    found = {row["part"]: row for row in told["rows"]}
    assert {"portable", "layout", "schedule", "overlap"} <= {part for part, row in found.items() if "us" in row}
    assert all(row["right"] for row in found.values() if "us" in row), told
    assert found["overlap"]["us"] < found["portable"]["us"]
    assert told["floor_us"] < found["overlap"]["us"]


def test_outputs_that_are_not_written_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    kernel = compile(problem_of(m=1, n=256, k=256), replace(arch_of(device)))
    monkeypatch.setattr("w4gen.runtime.tune.launcher", lambda *_: lambda *call: call[0].mul_(1))
    with pytest.raises(ScheduleError, match="were not written whole"):
        trial(kernel, 1, device)()


def test_shipped_rows_are_right_with_other_versions_too() -> None:
    """Those that were not timed as they are now: with this Triton, and with the text that w4gen prints today."""
    device = torch.device("cuda", 0)
    arch = arch_of(device)
    path = CHECKOUT / "cache" / "tuned" / f"{arch.name}.json"
    for row in tuned.load(path) if path.exists() else ():
        kernel = made(lower(tuned.problem(row.question)), row.schedule, arch)
        if (row.triton, row.text) != (toolchain.version(), cache.address(kernel.source)):
            assert right(kernel, device), row
