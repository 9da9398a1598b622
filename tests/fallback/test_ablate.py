"""What parts are worth, without a GPU: times are made up; problems, schedules, weights and what is told of them are not."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from click.testing import CliRunner

import w4gen
from w4gen import ahead, tuned
from w4gen.ahead import Ask
from w4gen.api import problem_of
from w4gen.bench import ablate, report
from w4gen.cli import cli
from w4gen.errors import ScheduleError, ShapeError, W4Error
from w4gen.runtime.reference import error
from w4gen.runtime.weight import Weight
from w4gen.schedule.arch import ARCHES
from w4gen.schedule.rules import pick
from w4gen.schedule.schedule import Schedule

HERE = replace(ARCHES["sm_90"], device="a GPU that is made up", device_sms=132)
PARTS = ("portable", "layout", "decode", "schedule", "tuned", "overlap")
US = dict(zip(PARTS, (40.0, 20.0, 10.0, 5.0, 4.0, 2.0), strict=True))


def rungs(m: int = 1, n: int = 256, k: int = 512, form: str = "int4_g128", arch: Any = HERE) -> dict[str, Ask | str]:
    return ablate.rungs(problem_of(m=m, n=n, k=k, format=form), arch)


def tune(form: str = "int4_g128", m: int = 1) -> Schedule:
    """A row for a layer 512 -> 256: its schedule."""
    problem = problem_of(m=m, n=256, k=512, format=form)
    found = replace(w4gen.compile(f"{m}x512x256", form, arch="sm_90").schedule, warps=2, stages=2)
    row = tuned.Row(question=tuned.question(problem), schedule=found, device=HERE.device, sms=132, triton="3.6.0")
    tuned.save("sm_90", [row])
    return found


@pytest.fixture
def on_a_gpu(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Ask, Weight]]:
    """A GPU that is made up. It multiplies each rung's weight by x in f64: what was attempted."""
    made: list[tuple[Ask, Weight]] = []

    def attempt(ask: Ask, w: Weight, x: torch.Tensor, truth: torch.Tensor) -> ablate.Attempt:
        made.append((ask, w))
        us = next(us for part, us in US.items() if rungs()[part] == ask) if w.format.name.startswith("int4") else 1.0
        return ablate.Attempt(lambda: us, error(x.double() @ w.dequantize(torch.float64).T, truth), 1e-12, True)

    def compiled(asks: Iterable[Ask]) -> Iterator[ahead.Done]:
        yield from map(ahead.Done, asks)

    real = torch.device
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(ablate.torch, "device", lambda *given: real("cpu") if given == ("cuda", 0) else real(*given))
    monkeypatch.setattr(ablate, "arch_of", lambda device: HERE)
    monkeypatch.setattr(ablate, "attempt", attempt)
    monkeypatch.setattr(ablate, "vendor", lambda w, x: lambda: 3.0)
    monkeypatch.setattr(ablate, "floor", lambda *_: type("Timing", (), {"us": 1.5}))
    monkeypatch.setattr(ahead, "compiled", compiled)
    monkeypatch.setattr("w4gen.commands.bench.detected", lambda: "sm_90")
    return made


def test_parts_come_one_after_the_other(fresh_cache: Path) -> None:
    own = tune()
    found = rungs()
    assert tuple(found) == PARTS
    portable, layout, decode, schedule, stored, overlap = found.values()
    assert all(isinstance(each, Ask) for each in found.values())
    assert portable.problem.format.codebook == layout.problem.format.codebook == tuple(range(-8, 8))
    assert portable.problem.layout.row_units() is not None
    assert layout.problem.layout.row_units() is None
    assert decode.problem.format.codebook is None
    assert (layout.schedule.template, decode.schedule) == ("gemm", layout.schedule), "but for how values are made, all is alike"
    assert (decode.schedule.split_k, decode.schedule.stages, decode.schedule.overlap) == (1, 1, 0)
    assert schedule.schedule == replace(pick(ablate.lower(schedule.problem), HERE), overlap=0)
    assert (stored.schedule, overlap.schedule) == (replace(own, overlap=0), own)


@pytest.mark.parametrize(
    ("options", "part", "why"),
    [
        ({"form": "nf4_g64"}, "decode", "nf4_g64 is a table itself"),
        ({"form": "int3_g128"}, "layout", "int3_g128 of this shape stays in rows"),
        ({}, "tuned", "no row of this GPU: w4gen tune makes one"),
        ({"arch": ARCHES["sm_80"]}, "overlap", "gemv_half waits on sm_80"),
        ({"m": 4096}, "overlap", "dequant waits on sm_90"),
    ],
)
def test_a_part_that_is_not_there_is_told(options: dict[str, Any], part: str, why: str, fresh_cache: Path) -> None:
    assert rungs(**options)[part] == why


@pytest.mark.parametrize(
    "form", ["int4_g128", "uint4_g128_z", "uint4_g64_zf", "uint4_g32_m", "e2m1_g32", "fp8_e4m3_g64", "int3_g64"]
)
@pytest.mark.parametrize("m", [1, 8, 64])
def test_a_table_of_the_same_values_is_the_same_layer(form: str, m: int) -> None:
    """Codes, scales and zeros are the same, and the values of the table are those of the oracle."""
    w = Weight.from_float(torch.randn(64, 256, generator=torch.Generator().manual_seed(0)), form)
    table = ablate.looked_up(w.format)
    parts = {name: part for name, part in w.parts().items() if not name.endswith("codebook")}
    same = Weight.from_parts(parts, table)
    assert torch.equal(same.dequantize(torch.float64), w.dequantize(torch.float64))
    values = np.array(oracle.VALUES[w.format.name])
    assert np.array_equal(np.array(table.codebook)[np.isfinite(values)], values[np.isfinite(values)])
    portable = rungs(m=m, form=form)["portable"]
    assert isinstance(portable, Ask)
    assert portable.schedule.template == ("dequant" if m == 64 else portable.schedule.template)


def test_a_ladder_has_times_gains_and_errors(on_a_gpu: list[tuple[Ask, Weight]]) -> None:
    tune()
    (told,) = ablate.ablate(["1x512x256"])["ladders"]
    assert (told["m"], told["k"], told["n"], told["format"], told["dtype"]) == (1, 512, 256, "int4_g128", "f16")
    assert (told["cublas_us"], told["floor_us"]) == (3.0, 1.5)
    assert [(row["part"], row["us"], row["gain"]) for row in told["rows"]] == [
        ("portable", 40, 1), ("layout", 20, 2), ("decode", 10, 2), ("schedule", 5, 2), ("tuned", 4, 1.25), ("overlap", 2, 2)
    ]  # fmt: skip
    assert all(row["right"] and row["error"] < 1e-12 and row["equal_repeats"] == 40 for row in told["rows"])
    assert [w.layout.row_units() is None for _, w in on_a_gpu] == [False] + 5 * [True]


def test_gains_are_over_the_last_part_that_is_there(on_a_gpu: list[tuple[Ask, Weight]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "compiled", lambda asks: (ahead.Done(ask, error="too odd" * ask.schedule.overlap) for ask in asks))
    inner = ablate.attempt

    def refused(ask: Ask, *rest: Any) -> ablate.Attempt:
        if ask.problem.format.codebook and ask.problem.layout.row_units() is None:
            raise ScheduleError("the GPU refuses it")
        return inner(ask, *rest)

    monkeypatch.setattr(ablate, "attempt", refused)
    (told,) = ablate.ablate(["1x512x256"])["ladders"]
    assert [row.get("why", row.get("gain")) for row in told["rows"]] == [
        1, "the GPU refuses it", 4, 2, "no row of this GPU: w4gen tune makes one", "too odd"
    ]  # fmt: skip


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli, ["bench", *arguments], standalone_mode=False)


def test_the_command_prints_a_table_and_writes_json(on_a_gpu: list[tuple[Ask, Weight]], tmp_path: Path) -> None:
    out = tmp_path / "results" / "ablation.json"
    done = run("--ablate", "--shape", "1x512x256", "--format", "int4_g128", "--format", "nf4_g64", "--out", str(out))
    assert done.exception is None
    first, head, *rows = done.output.splitlines()
    assert first == "1x512x256 int4_g128 f16: cuBLAS 3.00 us, floor 1.50 us"
    assert head.split() == ["with", "us", "gain", "of", "floor", "error", "schedule"]
    assert rows[3].split()[:5] == ["schedule", "5.00", "2.00", "x", "30%"]
    assert "tuned" in rows[4]
    assert "w4gen tune makes one" in rows[4]
    facts = json.loads(out.read_text())
    assert [each["format"] for each in facts["ladders"]] == ["int4_g128", "nf4_g64"]
    assert {"device", "date", "torch", "triton", "command", "method"} <= set(facts)
    section = report.section(out)
    assert "| schedule | 5.00 | 2.00 | 30% | ±0.0% |" in section
    assert "**512 → 256, M = 1, nf4_g64, f16**: cuBLAS 3.00 µs, floor 1.50 µs" in section
    assert "| decode | – | | | | | |" in section
    assert "\n\n- decode: nf4_g64 is a table itself\n- tuned: no row of this GPU" in section


def test_a_part_that_beats_its_floor_is_told(on_a_gpu: list[tuple[Ask, Weight]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablate, "floor", lambda *_: type("Timing", (), {"us": 2.5}))
    told = run("--ablate", "--shape", "1x512x256").output
    assert told.count("MEASURING ERROR: 1x512x256 int4_g128 f16 overlap in 2.00 us beats its floor of 2.50 us") == 1
    assert len(ablate.ablate(["1x512x256"])["measuring_errors"]) == 1


def test_a_wrong_part_is_called_wrong(on_a_gpu: list[tuple[Ask, Weight]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablate, "attempt", lambda *_: ablate.Attempt(lambda: 1.0, 0.5, 3e-4, False))
    told = run("--ablate", "--shape", "1x512x256").output
    assert told.count("5.0e-01, 0 equal, WRONG") == 5


def test_a_comparison_is_asked_for_by_layers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("w4gen.commands.bench.detected", lambda: "sm_90")
    monkeypatch.setattr(w4gen, "compare", lambda *given: asked.append(given) or {"rows": []}, raising=False)
    told = run("--layer", "512x256", "--m", "1", "--m", "16", "--json", "--out", str(tmp_path / "rows.json")).output
    assert json.loads(told) == json.loads((tmp_path / "rows.json").read_text()) == {"rows": []}
    assert asked[0][:5] == (("512x256",), 0, (1, 16), ("int4_g128",), ("float16",))


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (("--ablate",), ShapeError, "--ablate, or --cold, and --shape MxKxN go together"),
        (("--shape", "1x2x3"), ShapeError, "--ablate, or --cold, and --shape MxKxN go together"),
        (("--layer", "512x256"), W4Error, "there is none here: run w4gen bench where one is"),
    ],
)
def test_what_is_refused(arguments: tuple[str, ...], kind: type[W4Error], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("w4gen.commands.bench.detected", lambda: "portable")
    with pytest.raises(kind, match=message):
        raise run(*arguments).exception
