"""Tuning on a GPU: a row that is right and no slower than the rules' choice, and one that cannot run is skipped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import w4gen
from w4gen import tuned
from w4gen.api import problem_of
from w4gen.errors import ScheduleError
from w4gen.pipeline import compile
from w4gen.runtime.launch import arch_of
from w4gen.runtime.tune import right, trial

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("m", [1, 16])
def test_a_layer_is_tuned_and_used(m: int, fresh_cache: Path) -> None:
    device = torch.device("cuda", 0)
    problem, arch = problem_of(m=m, n=4096, k=4096), arch_of(device)
    before = trial(compile(problem, arch), m, device)
    ((_, row, found),) = w4gen.tune([(problem, m, 1)], 30)
    assert row is not None
    assert (row.device, row.triton) == (arch.device, tuned.load(tuned.path_of(arch.name))[0].triton)
    assert row.us <= 1.1 * before
    assert 0 < row.floor_us < row.us
    assert found.trials > 4
    kernel = compile(problem, arch)
    assert kernel.schedule == row.schedule
    assert right(kernel)
    ((_, again, _),) = w4gen.tune([(problem, m, 1)], 30)
    assert again is None, "known by now"


def test_outputs_that_are_not_written_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    kernel = compile(problem_of(m=1, n=256, k=256), replace(arch_of(device)))
    monkeypatch.setattr("w4gen.runtime.tune.launcher", lambda *_: lambda *call: call[0].mul_(1))
    with pytest.raises(ScheduleError, match="were not written whole"):
        trial(kernel, 1, device)
