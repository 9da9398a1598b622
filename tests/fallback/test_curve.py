"""Time against M without a GPU: predictions as the model gives them, and measurements that are made up."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import w4gen
from w4gen import ahead
from w4gen.api import problem_of
from w4gen.bench import curve as room
from w4gen.bench import report
from w4gen.cli import cli
from w4gen.codegen.render import Kernel
from w4gen.errors import ShapeError, ToolchainError
from w4gen.ir.lower import lower
from w4gen.layers import layers, read
from w4gen.pipeline import compile, made
from w4gen.schedule.arch import ARCHES
from w4gen.schedule.rules import BUCKETS
from w4gen.schedule.space import judged

H200 = ARCHES["sm_90"]


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[ahead.Ask]:
    """A GPU that is made up: it takes 10 us, and one more for each row. What was compiled ahead."""
    asked: list[ahead.Ask] = []

    def compiled(asks: Iterable[ahead.Ask], workers: int) -> Iterator[ahead.Done]:
        asked.extend(dict.fromkeys(asks))
        yield from map(ahead.Done, asked)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU that is made up")
    monkeypatch.setattr(room, "arch_of", lambda: replace(H200, device="a GPU that is made up", device_sms=132))
    monkeypatch.setattr(room, "on_gpu", lambda kernel, m: 10.0 + m)
    monkeypatch.setattr(room, "floor_us", lambda kernels: 11.5)
    monkeypatch.setattr(ahead, "compiled", compiled)
    return asked


def test_without_a_gpu_times_are_predicted_and_the_curve_says_so(fresh_cache: Path) -> None:
    found = w4gen.curve("512x256", (8, 1, 16), arch="sm_90")
    assert (found.source, found.ms, found.format) == ("predicted", (1, 8, 16), "int4_g128")
    assert "sm_90" in found.where
    (part,) = found.parts
    assert (part.n, part.k, part.count) == (256, 512, 1)
    for m, us in zip(found.ms, part.us, strict=True):
        program = lower(problem_of(m=m, n=256, k=512))
        own = judged(program, compile(program.problem, H200).schedule, H200, m).us
        assert us == pytest.approx(own, abs=5e-4)


def test_a_models_curve_is_the_sum_of_its_layers(fresh_cache: Path, on_a_gpu: list[ahead.Ask]) -> None:
    found = w4gen.curve("SmolLM2-135M", (1, 2, 3, 9), progress=False)
    assert (found.source, found.where) == ("measured", "a GPU that is made up")
    count = sum(each.count for each in layers(read(Path("SmolLM2-135M"))))
    assert found.total_us == tuple(count * (10.0 + m) for m in (1, 2, 3, 9))
    assert len(on_a_gpu) == 4 * 3, "a kernel of each bucket for each of four shapes"
    assert found.steps == {2: "bucket 2..8", 9: "bucket 9..16"}
    assert [found.at(m) for m in (1, 2, 4, 9)] == [*found.total_us[:2], found.total_us[3], found.total_us[3]]
    with pytest.raises(ShapeError, match="M=10 is not on the curve, which is for 1 to 9"):
        found.at(10)


def test_every_bucket_is_a_step(fresh_cache: Path) -> None:
    found = w4gen.curve("512x256", arch="sm_90")
    assert {low: found.steps[low] for low, _ in BUCKETS[1:]}.keys() <= found.steps.keys()
    assert (found.steps[129], found.steps[2049]) == ("bucket 129..256", "bucket 2049 and more")


def test_tiles_of_rows_are_steps_too() -> None:
    program = lower(problem_of(m=128, n=256, k=512))
    tall = compile(program.problem, H200).schedule
    kernel = made(program, replace(tall, block_m=32), H200)
    ms = (65, 90, 96, 97, 128)
    assert room.steps_of(ms, [[kernel] * 5]) == {97: "4 tiles of 32 rows"}
    dense = compile(problem_of(m=4096, n=256, k=512), H200)
    assert room.steps_of((2049, 4096), [[dense] * 2]) == {}


def test_an_arch_that_is_named_is_predicted_where_a_gpu_is_too(on_a_gpu: list[ahead.Ask], fresh_cache: Path) -> None:
    assert w4gen.curve("512x256", (1,), arch="sm_80").source == "predicted"
    assert not on_a_gpu


def test_what_does_not_compile_is_told(on_a_gpu: list[ahead.Ask], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "compiled", lambda asks, workers: iter([ahead.Done(asks[0], error="too odd")]))
    with pytest.raises(ToolchainError, match=r"n=256 k=512 .* does not compile: too odd"):
        w4gen.curve("512x256", (1,), progress=False)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli, ["curve", *arguments], standalone_mode=False)


def test_the_command_plots_and_says_what_is_predicted(fresh_cache: Path) -> None:
    told = run("--model", "SmolLM2-135M", "--arch", "sm_90", "--m", "1,16,512").output
    assert told.startswith("predicted on sm_90, H200 SXM, by its data sheet: a model's times, which rank and are no measurement")
    head, *rows = told.splitlines()[2:]
    assert head.split() == ["M", "576->576", "x60", "576->192", "x60", "576->1536", "x60", "1536->576", "x30", "all", "step"]
    bars = [row.count("█") for row in rows]
    assert bars == sorted(bars)
    assert bars[-1] == 40
    assert rows[1].endswith("bucket 9..16")


def test_the_command_tells_json_of_what_was_measured(tmp_path: Path, on_a_gpu: list[Kernel]) -> None:
    told = run("--shape", "512x256", "--m", "1,2", "--json").output
    facts = json.loads(told[told.index("{") :])
    assert (facts["source"], facts["ms"], facts["total_us"]) == ("measured", [1, 2], [11.0, 12.0])
    assert facts["steps"] == [{"m": 2, "why": "bucket 2..8"}]
    assert (facts["parts"][0]["us"], facts["parts"][0]["floor_us"]) == ([11.0, 12.0], 11.5)
    beaten = "MEASURING ERROR: 1x512x256 int4_g128 in 11.00 us beats its floor of 11.50 us by more than noise (1.0%)"
    assert facts["measuring_errors"] == [beaten]
    assert beaten in run("--shape", "512x256", "--m", "1,2").output.splitlines()
    (tmp_path / "curve.json").write_text(json.dumps(facts))
    section = report.section(tmp_path / "curve.json")
    assert "Measured on a GPU that is made up, int4_g128" in section
    assert "| floor | 11.50 | 11.5 | only reading the weights |" in section
    assert "Method: graph replay over rotating copies" in section
    assert "| 2 | 12.00 | 12.0 | bucket 2..8 |" in section


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --model config.json, or --shape KxN"),
        (("--shape", "1x2x3"), "'1x2x3' is not KxN: give inputs x outputs"),
        (("--shape", "512x256", "--model", "x"), "a curve is of a model or of one layer"),
        (("--shape", "512x256", "--m", "0"), "positive whole number"),
    ],
)
def test_what_is_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        raise run(*arguments).exception
