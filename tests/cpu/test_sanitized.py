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

    monkeypatch.setattr(sanitized.launch, "launcher", launcher)
    assert not called(ask, 1, torch.device("cpu"))["right"]
    assert len(launches) == sanitized.LAUNCHES


def test_moved_codes_are_compared_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitized.repack, "STARTS", {})
    told = sanitized.moved(torch.device("cpu"), n=125, k=128)
    assert told == {"template": "repack", "kernels": ["repack"], "right": True}
    assert len(sanitized.repack.STARTS) == 3, "each by a kernel of its own"
    by_kernel = sanitized.repack.by_kernel
    monkeypatch.setattr(sanitized.repack, "by_kernel", lambda *given: by_kernel(*given) ^ 1)
    assert not sanitized.moved(torch.device("cpu"), n=125, k=128)["right"]
