"""Tuning goes on when a kernel ends the process that times it: processes are scripted, or real ones with made-up trials."""

from __future__ import annotations

import io
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from workers import made_up

from w4gen import ahead, cache, faults, pipeline, tuned
from w4gen.api import problem_of
from w4gen.bench import tune
from w4gen.bench.tune import Share, everywhere, main, read, written
from w4gen.errors import CacheError, W4Error
from w4gen.ir.lower import lower
from w4gen.runtime.tune import At, Question
from w4gen.schedule.arch import ARCHES
from w4gen.schedule.rules import pick

QUESTIONS = [Question(problem_of(m=m, n=64, k=256), m) for m in (1, 8, 16)]
ARCH = ARCHES["sm_80"]
BROKEN = "CUDA error: an illegal memory access was encountered"
Script = tuple[list[Any], int]


def answer(question: Question) -> tuple[Question, None, None]:
    return question, None, None


def trial(question: Question) -> At:
    return At(question, 3, ahead.Ask(question.problem, ARCH, pick(lower(question.problem), ARCH)))


def share(seconds: float = 99.0) -> Share:
    return Share(5, (), tuple(QUESTIONS), time.time() + seconds, False)


@pytest.fixture
def scripted(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Share]]:
    """Processes that tell what they are to tell and end with a status; the shares that they were given."""

    def script(*processes: Script) -> list[Share]:
        given, left = list[Share](), list(processes)

        def started(module: str) -> Any:
            told, status = left.pop(0)
            lines = (each if isinstance(each, str) else written(each) + "\n" for each in told)
            stdin = SimpleNamespace(write=lambda line: given.append(read(line)), close=lambda: None)
            return SimpleNamespace(stdin=stdin, stdout=lines, wait=lambda: status, kill=lambda: None)

        monkeypatch.setattr(ahead, "started", started)
        return given

    return script


@pytest.mark.parametrize(
    ("last", "status", "how"), [([RuntimeError(BROKEN)], 1, BROKEN), ([], -9, "status -9"), (["gASV"], -9, "status -9")]
)
def test_a_candidate_that_ends_its_process_is_named_and_the_rest_goes_on(
    last: list[Any], status: int, how: str, scripted: Callable[..., list[Share]], caplog: pytest.LogCaptureFixture
) -> None:
    one, two, three = QUESTIONS
    given = scripted(([answer(one), At(two), trial(two), *last], status), ([answer(three)], 0))
    found = list(everywhere([share()]))
    assert [each for each, _, _ in found] == QUESTIONS
    assert found[1][2].skipped == ((3, how),)
    assert [each.questions for each in given] == [tuple(QUESTIONS), (three,)]
    assert given[0].end == given[1].end, "the same budget"
    assert [each.message for each in caplog.records] == [
        f"{two.problem} is left to the rules, as the process that tuned it ended: {how}; "
        f"it timed {trial(two).ask.schedule}, which no run does again"
    ]
    kernel = trial(two).ask.kernel()
    assert faults.fault(kernel, ARCH) == how
    assert not faults.fault(kernel, ARCHES["sm_86"])
    assert not any(entry.damage() for entry in cache.entries()), "its text is there to look at"
    assert not faults.fault(pipeline.compile(one.problem, ARCH), ARCH)


def test_a_candidate_that_hangs_is_ended(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = threading.Event()

    def lines() -> Iterator[str]:
        yield written(trial(QUESTIONS[0])) + "\n"
        killed.wait(300)

    stdin = SimpleNamespace(write=lambda line: None, close=lambda: None)
    hanging = SimpleNamespace(stdin=stdin, stdout=lines(), wait=lambda: -9, kill=killed.set)
    monkeypatch.setattr(ahead, "started", lambda module: hanging)
    monkeypatch.setattr(tune, "HUNG_S", 0.1)
    ((_, _, found),) = everywhere([replace(share(), questions=tuple(QUESTIONS[:1]))])
    assert found.skipped == ((3, "not done after 0.1 s"),)
    assert faults.fault(trial(QUESTIONS[0]).ask.kernel(), ARCH) == "not done after 0.1 s"


def test_a_process_that_ends_between_candidates_has_none_to_blame(
    scripted: Callable[..., list[Share]], caplog: pytest.LogCaptureFixture
) -> None:
    one, two, three = QUESTIONS
    given = scripted(([trial(one), At(one)], -9), ([answer(two), answer(three)], 0))
    assert [each for each, _, _ in everywhere([share()])] == QUESTIONS
    assert given[1].questions == (two, three)
    assert "ended: status -9; it timed nothing" in caplog.text
    assert not faults.fault(trial(one).ask.kernel(), ARCH)


@pytest.mark.parametrize(
    ("told", "status", "how"),
    [
        ([RuntimeError("CUDA-capable devices are busy")], 1, "CUDA-capable devices are busy"),  # before anything was begun
        ([trial(QUESTIONS[0])], 1, "status 1"),  # our own mistake, with a traceback
        ([], -9, "status -9"),
    ],
)
def test_what_no_kernel_did_is_told_and_not_tried_again(
    told: list[Any], status: int, how: str, scripted: Callable[..., list[Share]], caplog: pytest.LogCaptureFixture
) -> None:
    given = scripted((told, status))
    assert list(everywhere([share()])) == []
    assert len(given) == 1
    assert [each.message for each in caplog.records] == [f"tuning on GPU 5 ended: {how}; a second run goes on with the rest"]


def test_no_process_is_begun_when_the_seconds_are_over(scripted: Callable[..., list[Share]]) -> None:
    given = scripted(([trial(QUESTIONS[0])], -9))
    assert [each for each, _, _ in everywhere([share(0.0)])] == QUESTIONS[:1]
    assert len(given) == 1


def test_each_question_ends_one_process_at_most(scripted: Callable[..., list[Share]]) -> None:
    given = scripted(*(([trial(each)], -9) for each in QUESTIONS))
    assert [each for each, _, _ in everywhere([share()])] == QUESTIONS
    assert [len(each.questions) for each in given] == [3, 2, 1]


def test_what_a_process_raises_for_its_caller_is_raised_here(scripted: Callable[..., list[Share]]) -> None:
    scripted(([answer(QUESTIONS[0]), At(QUESTIONS[1]), CacheError("rows cannot be written")], 1))
    found = everywhere([share()])
    assert next(found)[0] == QUESTIONS[0]
    with pytest.raises(CacheError, match="rows cannot be written"):
        next(found)


@pytest.mark.parametrize(("error", "told"), [(RuntimeError(f"{BROKEN}\nmore of it"), BROKEN), (W4Error("no"), "no")])
def test_a_process_tells_what_ends_it(error: Exception, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def here(questions: Any, seconds: float, again: bool, at: Callable[[At], None]) -> Iterator[Any]:
        at(At(questions[0]))
        tune.log.debug("too small to tell")
        raise error
        yield

    monkeypatch.setattr(tune, "here", here)
    monkeypatch.setattr(tune.log, "handlers", [])
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: None)
    out = io.StringIO()
    with pytest.raises(SystemExit):
        main(io.StringIO(written(share()) + "\n"), out)
    at, record, last = map(read, out.getvalue().splitlines())
    assert at == At(QUESTIONS[0])
    assert isinstance(record, logging.LogRecord)
    assert "Traceback" in record.getMessage(), "for those who listen: it is not printed"
    assert (type(last), str(last)) == (type(error), told)


WORKER = """
import sys
from dataclasses import replace
from types import SimpleNamespace
import torch
from w4gen import ahead
from w4gen.bench import tune
from w4gen.ir.lower import lower
from w4gen.runtime import tune as runtime
from w4gen.schedule.arch import ARCHES
from w4gen.schedule.rules import pick

def trial(kernel, m, device):
    if (m, kernel.schedule.warps) == (8, 4):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\\nmore of it")
    return lambda: 10.0

def compiled(asks, workers=0, wanted=None):
    for each in asks:
        warps = (2, 4, 8) if isinstance(each, ahead.Ranking) else ()
        rules = pick(lower(each.problem), ARCHES["sm_75"])
        yield ahead.Done(each, ranked=[(str(replace(rules, warps=each)), 1.0) for each in warps])

torch.cuda.set_device, torch.cuda.current_device = (lambda gpu: None), (lambda: 0)
ahead.compiled, tune.floor = compiled, lambda *_: SimpleNamespace(us=1.0)
runtime.arch_of, runtime.trial, runtime.right = (lambda device: ARCHES["sm_75"]), trial, (lambda *_: True)
tune.main(sys.stdin, ahead.answers())
"""


def test_a_second_run_tunes_what_the_first_gave_up_without_the_candidate_at_fault(
    fresh_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made_up(WORKER, tmp_path, monkeypatch)
    caplog.set_level(logging.INFO, "w4gen")
    assert {question.m: row is not None for question, row, _ in everywhere([share()])} == {1: True, 8: False, 16: True}
    assert [each.levelname for each in caplog.records].count("WARNING") == 1
    caplog.clear()
    again = {question.m: (row, found) for question, row, found in everywhere([share()])}
    row, found = again.pop(8)
    assert again == {1: (None, None), 16: (None, None)}, "tuned before"
    why = f"it ended the process that timed it before: {BROKEN}"
    assert ((1, why) in found.skipped, row.schedule.warps) == (True, 2)
    assert f"overlap=0 is skipped: {why}" in caplog.text, "logged here too"
    assert len(tuned.load(tuned.path_of("sm_75"))) == 3
    assert "WARNING" not in caplog.text
