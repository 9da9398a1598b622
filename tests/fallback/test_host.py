"""The measurement of host time, with a stand-in for the launcher: that each door leads to a launch, and all are timed."""

from __future__ import annotations

import pytest
import torch

from w4gen.bench import host


@pytest.mark.parametrize("m", [1, 8])
def test_every_door_is_timed_and_leads_to_the_kernel(m: int, gpu: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.launch, "launcher", gpu.load)
    monkeypatch.setattr(torch, "equal", lambda a, b: a.shape == b.shape)  # the stand-in counts launches in y
    row = host.measure(m, 256, 32, "int4_g128", torch.float16, torch.device("cpu"), rounds=1)
    assert set(row["us"]) == {"nn.Linear", "w4gen.Linear", "op", "bound kernel"}
    assert min((*row["us"].values(), *row["spent_us"].values())) > 0
    assert row["share"] == pytest.approx(row["us"]["w4gen.Linear"] / row["us"]["nn.Linear"], abs=1e-3)
    assert f"{m}x256x32 int4_g128 float16" in host.told(row)
    doors, rounds = 5, 2  # the prepared call and its launch are doors too, and the first round warms up
    assert len(gpu.launched) == 2 + doors * rounds * host.TURN + 2
