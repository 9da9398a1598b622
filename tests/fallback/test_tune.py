"""Tuning without a GPU: trials and checks are made up; candidates, rows, resuming and running out of memory are not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import w4gen
from w4gen import ahead, pipeline, tuned
from w4gen.api import problem_of
from w4gen.cli import cli, main
from w4gen.codegen.render import Kernel
from w4gen.errors import ScheduleError, W4Error
from w4gen.ir.lower import lower
from w4gen.runtime import tune
from w4gen.schedule.arch import ARCHES
from w4gen.schedule.rules import pick

HERE = replace(ARCHES["sm_80"], device="a GPU that is made up", device_sms=108)
CPU = torch.device("cpu")
QUESTIONS = [tune.Question(problem_of(m=1, n=256, k=512), 1, 2), tune.Question(problem_of(m=8, n=64, k=256), 8)]


@pytest.fixture
def trials(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[Kernel]:
    """The trials that were made; fewer warps are faster."""
    made: list[Kernel] = []

    def trial(kernel: Kernel, m: int, device: torch.device) -> float:
        made.append(kernel)
        return 10.0 + kernel.schedule.warps

    def compiled(asks: Iterable[ahead.Ask]) -> Iterator[ahead.Done]:
        yield from (ahead.Done(ask, error="too odd" if ask.schedule.stages == 4 else "") for ask in asks)  # type: ignore[union-attr]

    monkeypatch.setattr(tune, "arch_of", lambda device: HERE)
    monkeypatch.setattr(tune, "trial", trial)
    monkeypatch.setattr(tune, "right", lambda kernel: True)
    monkeypatch.setattr(ahead, "compiled", compiled)
    return made


def run(questions: list[tune.Question] = QUESTIONS, seconds: float = 4.0, **options: Any) -> list[Any]:
    return list(tune.tune(questions, seconds, lambda nbytes, device, overlap: nbytes / 1e6, device=CPU, **options))


def test_winners_become_rows_and_are_taken_by_compiles(trials: list[Kernel]) -> None:
    told = run()
    rows = tuned.load(tuned.path_of("sm_80"))
    assert {row.question for row in rows} == {tuned.question(each.problem) for each in QUESTIONS}
    assert {row for _, row, _ in told} == set(rows)
    for question, row, found in told:
        assert (row.device, row.sms, row.trials) == ("a GPU that is made up", 108, found.trials)
        assert row.us == 10.0 + row.schedule.warps
        assert row.schedule.warps == min(kernel.schedule.warps for kernel in trials if kernel.problem == question.problem)
        assert row.triton
        assert row.date
        assert row.floor_us >= 0
        assert pipeline.compile(question.problem, HERE).schedule == row.schedule
        assert any("it does not compile: too odd" in why for _, why in found.skipped)
    assert trials[0].schedule == pick(lower(QUESTIONS[0].problem), ARCHES["sm_80"]), "the rules' choice is timed first"


def test_a_second_run_goes_on_where_the_first_was_stopped(trials: list[Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(kernel: Kernel, m: int, device: torch.device) -> float:
        if m == 8:
            raise KeyboardInterrupt
        return 10.0

    with monkeypatch.context() as patch:
        patch.setattr(tune, "trial", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run()
    assert len(tuned.load(tuned.path_of("sm_80"))) == 1, "what is done is kept"
    told = run()
    assert [(each.m, row is not None) for each, row, _ in told] == [(1, False), (8, True)]
    assert {kernel.problem.m for kernel in trials} == {(2, 8)}
    trials.clear()
    assert [row for _, row, _ in run()] == [None, None]
    assert not trials
    assert all(row for _, row, _ in run(again=True))


def test_out_of_memory_leaves_a_question_to_the_rules(trials: list[Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(kernel: Kernel, m: int, device: torch.device) -> float:
        if m == 1:
            raise torch.cuda.OutOfMemoryError("no room")
        return 10.0

    monkeypatch.setattr(tune, "trial", full)
    assert [(row is not None, found is not None) for _, row, found in run()] == [(False, False), (True, True)]


def test_nothing_that_is_wrong_is_kept(trials: list[Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "right", lambda kernel: False)
    assert all(row is None and found.winner is None for _, row, found in run())
    assert not tuned.path_of("sm_80").exists()

    def broken(*_: object) -> float:
        raise ScheduleError("the GPU refuses it")

    monkeypatch.setattr(tune, "trial", broken)
    assert all(row is None for _, row, _ in run())


def test_what_is_asked_more_often_and_takes_longer_is_worth_more() -> None:
    small, often, large = QUESTIONS[1], replace(QUESTIONS[1], count=9), tune.Question(problem_of(m=8, n=8192, k=8192), 8)
    assert small.value(HERE) < often.value(HERE)
    assert small.value(HERE) < large.value(HERE)


def test_more_seconds_try_more_candidates() -> None:
    few, many = (tune.tried(QUESTIONS[1], HERE, seconds) for seconds in (0.0, 60.0))
    assert len(few) == 8
    assert len(many) == tune.MOST
    assert many[:8] == few


def test_without_a_gpu_the_command_says_so_and_exits_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("w4gen.commands.tune.detected", lambda: "portable")
    monkeypatch.setattr("sys.argv", ["w4gen", "tune", "--shape", "1x4096x4096", "--budget", "1"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "w4gen: times come from GPUs only and there is none here: run w4gen tune where the kernels will run\n"
    )


def test_the_command_tells_each_question(trials: list[Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    def made(asked: list[Any], seconds: float, again: bool) -> Iterator[Any]:
        yield from run([tune.Question(*each) for each in asked], seconds, again=again)

    monkeypatch.setattr("w4gen.commands.tune.detected", lambda: "sm_80")
    monkeypatch.setattr(w4gen, "tune", made, raising=False)
    told = CliRunner().invoke(cli, ["tune", "--shape", "8x256x64", "--budget", "5"], standalone_mode=False)
    assert re.match(r"1/1 8x256x64 int4_g128: 1\d\.00 us, floor \d\.\d\d, \d+ trials, \d+ skipped; [0-5] s left\n", told.output)
    told = CliRunner().invoke(cli, ["tune", "--shape", "8x256x64", "--budget", "5"], standalone_mode=False)
    assert "passed over: tuned before" in told.output
    refused = CliRunner().invoke(cli, ["tune", "--shape", "8x256x64", "--arch", "sm_90"], standalone_mode=False)
    assert isinstance(refused.exception, W4Error)
