"""Tuning on several GPUs: questions shared out, processes that answer, die, or are left; the GPUs are made up."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from workers import made_up

from w4gen.api import problem_of
from w4gen.bench import tune
from w4gen.bench.tune import Share, alike, everywhere, main, nbytes, read, shared_out, written
from w4gen.runtime.tune import At, Question

LAYERS = [(4096, 4096, 64), (1024, 4096, 64), (14336, 4096, 64), (4096, 14336, 32), (128256, 4096, 1)]
QUESTIONS = [Question(problem_of(m=m, n=n, k=k, format=f), m, count)
             for f in ("int4_g128", "nf4_g64") for n, k, count in LAYERS for m in (1, 8, 16)]  # fmt: skip


@pytest.mark.parametrize("count", [1, 2, 3, 8, 100])
def test_every_question_is_of_one_gpu_and_the_buckets_of_a_weight_stay_together(count: int) -> None:
    parts = shared_out(QUESTIONS, count)
    assert len(parts) == min(count, 2 * len(LAYERS))
    assert sorted(str(each) for part in parts for each in part) == sorted(map(str, QUESTIONS))
    homes = [{place for place, part in enumerate(parts) for each in part if weight(each) == of} for of in map(weight, QUESTIONS)]
    assert all(len(each) == 1 for each in homes)
    largest = max(nbytes([each for each in QUESTIONS if weight(each) == of]) for of in map(weight, QUESTIONS))
    assert max(map(nbytes, parts)) <= nbytes(QUESTIONS) / count + largest


def weight(each: Question) -> tuple[str, int, int]:
    return each.problem.format.label, each.problem.n, each.problem.k


def test_two_equal_weights_are_of_two_gpus() -> None:
    assert [len(part) for part in shared_out(QUESTIONS, 2)] == [15, 15]
    assert shared_out([], 2) == []


def test_gpus_of_another_kind_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [("H200", 132), ("A100", 108), ("H200", 132), ("H200", 114)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(kinds))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    facts = [SimpleNamespace(name=name, multi_processor_count=sms) for name, sms in kinds]
    monkeypatch.setattr(torch.cuda, "get_device_properties", facts.__getitem__)
    assert alike() == [2, 0]


WORKER = """
import os, sys, time
from w4gen.bench.tune import read, written
share = read(sys.stdin.readline())
for each in share.questions[:1] if share.gpu == 1 else share.questions:
    print(written((each, None, None)), flush=True)
if share.gpu == 1:
    os.kill(os.getpid(), 9)
if share.gpu == 2:
    time.sleep(900)
"""


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that answer all; that of GPU 1 dies after the first, that of GPU 2 never ends."""
    made_up(WORKER, tmp_path, monkeypatch)


def share(gpu: int, questions: list[Question]) -> Share:
    return Share(gpu, (), tuple(questions), time.time() + 99, False)


def test_what_processes_find_is_told_and_one_that_dies_costs_its_own_share(
    workers: None, caplog: pytest.LogCaptureFixture
) -> None:
    zero, one = shared_out(QUESTIONS, 2)
    found = [each for each, _, _ in everywhere([share(0, zero), share(1, one)])]
    assert sorted(map(str, found)) == sorted(map(str, [*zero, one[0]]))
    assert [each.message for each in caplog.records] == ["tuning on GPU 1 ended: status -9; a second run goes on with the rest"]


def test_a_caller_that_stops_ends_the_processes(workers: None, caplog: pytest.LogCaptureFixture) -> None:
    start, stream = time.monotonic(), everywhere([share(2, QUESTIONS[:1])])
    assert next(stream)[0] == QUESTIONS[0]
    stream.close()  # type: ignore[attr-defined]
    assert time.monotonic() - start < 300
    assert not caplog.records, "it was asked to end"


def test_several_gpus_have_a_share_of_questions_and_cores_each(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Share] = []
    monkeypatch.setattr(tune, "alike", lambda: [1, 0])
    monkeypatch.setattr(tune, "everywhere", given.extend)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 4})
    tune.tune([(each.problem, each.m, each.count) for each in QUESTIONS], 60.0, True)
    assert [(each.gpu, each.cores, each.again) for each in given] == [(1, (0, 2, 4), True), (0, (1, 3), True)]
    assert 30 < given[0].end - time.time() <= 60
    assert sum(len(each.questions) for each in given) == len(QUESTIONS)


@pytest.mark.parametrize("gpus", [[0], [0, 1]])
def test_one_weight_is_tuned_in_one_process(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Share] = []
    monkeypatch.setattr(tune, "alike", lambda: gpus)
    monkeypatch.setattr(tune, "everywhere", given.extend)
    tune.tune([(each.problem, each.m, each.count) for each in QUESTIONS[:3]], 5.0)
    (share,) = given
    assert (share.gpu, share.questions, share.again) == (0, tuple(QUESTIONS[:3]), False)
    assert set(share.cores) == os.sched_getaffinity(0)
    tune.tune([])
    assert len(given) == 1, "nothing asked, nothing begun"


def test_a_process_tunes_its_share_on_its_gpu_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []

    def here(questions: tuple[Question, ...], seconds: float, again: bool, at: Callable[[At], None]) -> Iterator[Any]:
        used.append(9.0 < seconds <= 99.0)
        at(At(questions[0]))
        yield from ((each, None, None) for each in questions)

    monkeypatch.setattr(tune, "here", here)
    monkeypatch.setattr(tune.log, "handlers", [])
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: used.append(cores))
    out = io.StringIO()
    main(io.StringIO(written(Share(3, (0,), tuple(QUESTIONS[:2]), time.time() + 99, False)) + "\n"), out)
    assert used == [(0,), 3, True]
    first, *found = map(read, out.getvalue().splitlines())
    assert first == At(QUESTIONS[0])
    assert [each for each, _, _ in found] == QUESTIONS[:2]
