"""Measurements, as far as they run without a GPU: what they call, what they write, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import click.testing
import pytest
import torch

from w4gen.bench import host


def test_a_turn_is_of_every_call_in_each_round() -> None:
    seen: list[str] = []
    us = host.turns({"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, 2, lambda: seen.append("wait"))
    turn = ["wait", *["a"] * host.TURN, "wait", *["b"] * host.TURN]
    assert seen == [*turn * 3, "wait"]
    assert us.keys() == {"a", "b"}
    assert min(us.values()) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_host_time_is_not_measured_without_a_gpu(tmp_path: Path) -> None:
    done = click.testing.CliRunner().invoke(host.main, ["--out", str(tmp_path / "host.json")])
    assert done.exit_code == 1
    assert "there is none here" in done.output
    assert not (tmp_path / "host.json").exists()
