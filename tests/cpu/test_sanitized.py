"""The calls that compute-sanitizer watches, here under the interpreter: right ones are called right, wrong ones wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from w4gen.ahead import Ask
from w4gen.bench import sanitized
from w4gen.bench.sanitized import called
from w4gen.formats import named
from w4gen.ir.problem import Problem
from w4gen.schedule.arch import ARCHES


def test_a_call_is_checked_against_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Ask(Problem(m=(1, 1), n=6, k=128, format=named("int4_g128"), bias=True), ARCHES["portable"])
    told = called(ask, 1, torch.device("cpu"))
    assert (told["right"], told["template"], told["kernels"]) == (True, "gemv", ["gemv"])
    assert told["error"] <= told["error_limit"]
    launches = []

    def launcher(kernel: Any, device: torch.device) -> Any:
        def launch(y: torch.Tensor, *call: Any) -> None:
            launches.append(y.zero_())

        return launch

    monkeypatch.setattr(sanitized, "launcher", launcher)
    assert not called(ask, 1, torch.device("cpu"))["right"]
    assert len(launches) == sanitized.LAUNCHES
