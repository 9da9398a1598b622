"""Measurements on a GPU: what they find is possible, and what is known of it beforehand is found."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

import w4gen
from w4gen.bench import profile
from w4gen.bench.ceilings import measured
from w4gen.bench.end_to_end import TINY
from w4gen.bench.machine import CACHED_MB
from w4gen.bench.noise import too_fast

pytestmark = pytest.mark.gpu
WIDE = TINY | {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 2}


def test_ceilings_are_in_their_order() -> None:
    facts = w4gen.roofline()
    assert facts["took_s"] < 60

    def value(name: str, of: str = "") -> float:
        found = measured(facts, name, of)
        assert found is not None, name
        return found

    cached = [value(f"L2 read, {size} MB") for size in CACHED_MB]  # small reads are little more than their launch
    assert max(cached) > 0.5 * value("read") > 0.25 * value("copy")
    assert value("matrix f16, 8192") > value("matrix f16, 1024")
    assert value("decode int4_g128", "int4_g128") > value("decode e2m1_g32", "e2m1_g32") > 100, "it takes more operations"
    assert 0.1 < value("dependent launch") <= 1.1 * value("launch") < 5 < value("host launch") < 200
    spreads = [each["spread"] for each in facts["figures"]]
    assert statistics.median(spreads) < 0.1, "other tests share the GPU, and disturb some"


@pytest.mark.parametrize(("m", "form", "peer"), [(1, "int4_g128", "tinygemm"), (16, "int4_g128", "tinygemm"), (1, "nf4_g64", "")])
def test_others_answer_with_the_same_weight(m: int, form: str, peer: str) -> None:
    (row,) = w4gen.compare(["4096x4096"], 0, [m], [form])["rows"]
    assert row["error"] <= row["error_limit"]
    assert row["equal_repeats"] == 40
    assert too_fast({"rows": [row]}) == []
    others: dict[str, Any] = {each["name"]: each for each in row["others"]}
    assert others["dequantize, matmul"]["us"] > row["us"]
    assert others["dequantize, matmul"]["error"] < 1e-3
    assert not peer or others[peer]["error"] < 0.01, others[peer]
    assert all("us" in each or each["why"] for each in others.values())
    assert 1 < row["host_us"] < 500
    assert 0 < row["first_s"] - (row["compile_s"] or 0) < 60


def test_a_profile_is_of_the_layers_and_not_of_the_host() -> None:
    pytest.importorskip("transformers")
    found = w4gen.profile(WIDE, "int4_g128", prompt=64)
    assert found["fallbacks"] == found["measuring_errors"] == []
    for name, m in (("decode", 1), ("prefill", 64)):
        phase = found["phases"][name]
        layers = {each["name"]: each for each in phase["layers"] if each["name"] != "lm_head"}
        assert len(layers) == 7
        assert {each["m"] for each in layers.values()} == {m}
        for each in layers.values():
            assert 0.5 * each["floor_us"] < each["us"] < 50
            assert each["event_us"] < each["us"] + 10, "the host takes tens of microseconds: it would be seen"
            assert each["host_us"] > 1
        assert 0 < sum(each["share"] for each in phase["layers"]) < 1.2
        assert phase["kernels"] > 2 * 7


def test_a_curve_has_floors_and_beats_none() -> None:
    found = w4gen.curve("4096x14336", (1, 16, 512), progress=False)
    (part,) = found.parts
    assert 3 < part.floor_us < min(part.us)
    assert found.facts()["measuring_errors"] == []


def test_events_see_the_gpu_and_not_a_slow_host() -> None:
    """A layer whose host is slow, and whose GPU has next to nothing to do."""
    import time

    x, layer = torch.zeros(1, 64, device="cuda"), torch.nn.Linear(64, 64, device="cuda").requires_grad_(False)
    plain = layer.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        time.sleep(5e-5)
        return plain(x)

    layer.forward = forward  # type: ignore[method-assign]
    least = min(
        profile.event_us({"it": layer}, lambda: layer(x))["it"] for _ in range(5)
    )  # other processes may have the GPU between
    assert least < 25
    assert profile.host_us({"it": layer}, lambda: layer(x))["it"] > 50


def test_what_comes_before_a_first_answer(fresh_cache: Path) -> None:
    (row,) = w4gen.cold(["1x4096x14336"])["amortized"]
    assert row["first"]["compile_s"] > 10 * row["again"]["compile_s"]
    assert row["break_even_first"] > row["break_even_again"] > 0
