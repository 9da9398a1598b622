"""Candidates from hardware and the model that ranks them: granules, legality, ceilings, waves, and measured times."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from w4gen import tuned
from w4gen.api import problem_of
from w4gen.cli import cli
from w4gen.ir.lower import lower
from w4gen.pipeline import made
from w4gen.schedule.apply import apply
from w4gen.schedule.arch import ARCHES
from w4gen.schedule.cost import Prediction, predicted, residents
from w4gen.schedule.rules import pick
from w4gen.schedule.schedule import Schedule
from w4gen.schedule.space import ALIKE, candidates, shortlist, space
from w4gen.schedule.stored import layout_for
from w4gen.toolchain import version

H200 = ARCHES["sm_90"]
RESULTS = Path(__file__).parent.parent.parent / "docs" / "results"


def prediction(schedule: Schedule, arch: str = "sm_90", m: int = 16, n: int = 4096, k: int = 4096, **asked: Any) -> Prediction:
    program = lower(problem_of(m=m, n=n, k=k, **asked))
    return predicted(apply(program, schedule, ARCHES[arch]), schedule, ARCHES[arch], m)


GEMM = Schedule(template="gemm", block_m=16, block_n=64, block_k=128, unit="mma", side="left", stages=3)


CASES = [("int4_g128", 1, "sm_90"), ("nf4_g64", 8, "sm_90"), ("int4_g128", 64, "sm_80"), ("int3_g128", 1, "gfx942")]


@pytest.mark.parametrize(("form", "m", "arch"), [*CASES, ("int4_g128", 8, "portable")])
def test_candidates_are_many_legal_ones_in_order_and_hold_what_the_rules_pick(form: str, m: int, arch: str) -> None:
    problem = problem_of(m=m, n=1024, k=2048, format=form)
    program, target = lower(problem), ARCHES[arch]
    found = candidates(program, target, m)
    legal = [each for each in found if not each.refused]
    assert len(legal) >= 10
    assert [each.us for each in found] == sorted(each.us for each in found)
    assert pick(program, target) in [each.schedule for each in legal]
    assert len({each.schedule for each in found}) == len(found)
    assert all(each.refused or 0 < each.us < 1e6 for each in found)
    assert found == candidates(program, target, m), "two processes agree"
    layout = layout_for(problem.format, target, 1024, 2048)
    if layout.row_units() is None:
        assert all(each.block_n % layout.block["n"] == each.block_k % layout.block["k"] == 0 for each in space(program, target))


def test_the_shortlist_begins_with_the_rules_choice_and_its_neighbours() -> None:
    program = lower(problem_of(m=16, n=4096, k=4096))
    first, *others = shortlist(program, H200, 16)
    assert first.schedule == pick(program, H200)
    assert not any(each.refused for each in others)
    assert {first.schedule, *(each.schedule for each in others)} == {
        each.schedule for each in candidates(program, H200, 16) if not each.refused
    }
    assert all(a.us <= b.us * (1 + 2 * ALIKE) for a, b in itertools.pairwise(others))
    own = set(str(first.schedule).split())
    alike = [len(set(str(each.schedule).split()) - own) for each in others if each.us == others[0].us]
    assert alike == sorted(alike)


@pytest.mark.parametrize(("m", "arch"), [(1, "sm_90"), (8, "sm_90"), (64, "sm_90"), (1, "portable"), (512, "gfx942")])
def test_what_is_legal_has_a_text(m: int, arch: str) -> None:
    """The first ones, which a tuner tries; each is a kernel of its own."""
    program, target = lower(problem_of(m=m, n=1024, k=2048)), ARCHES[arch]
    first = [each for each in candidates(program, target, m) if not each.refused][:12]
    assert len({made(program, each.schedule, target).source for each in first}) == 12


def test_what_a_template_cannot_do_is_refused_in_words() -> None:
    reasons = {
        each.refused for m, arch in ((8, "sm_90"), (64, "sm_90"), (128, "sm_90"), (512, "gfx942"))
        for each in candidates(lower(problem_of(m=m, n=1024, k=2048)), ARCHES[arch], m)
    }  # fmt: skip
    said = (
        "bytes of shared memory, sm_90 has 49152",
        "8 warps of 16 outputs each are more",
        "computes all rows of x",
        "maxnreg=80 leaves",
    )
    for words in said:
        assert any(words in reason for reason in reasons), words


def test_a_program_more_than_whole_waves_costs_a_wave() -> None:
    whole, more = (prediction(GEMM, m=128, n=n, k=4096) for n in (64 * 132, 64 * 133))
    assert (whole.waves, whole.busy) == (pytest.approx(132 * 8 / 132 / whole.resident), 1.0)
    assert more.busy < 1.0
    assert more.ceilings_us["matrix"] > 1.05 * whole.ceilings_us["matrix"]


@pytest.mark.parametrize(
    ("m", "n", "k", "teams", "rows"),
    [
        (16, 8192, 8192, 2, {16}),
        (64, 8192, 8192, 2, {32, 64}),
        (64, 28672, 8192, 4, {32, 64}),
        (128, 28672, 8192, 4, {32, 64, 128}),
    ],
    ids=str,
)
def test_teams_try_tiles_that_fit_their_registers_and_the_rows_of_x(m: int, n: int, k: int, teams: int, rows: set[int]) -> None:
    """Four teams fill an SM: with fewer registers, or 128 k beside sums of 128 rows, products wait or registers spill."""
    found = [each for each in space(lower(problem_of(m=m, n=n, k=k)), H200) if each.template == "gemm_wgmma"]
    assert {each.teams for each in found} == {teams}
    assert {each.block_m for each in found} == rows
    assert {each.maxnreg for each in found} == ({0, 80} if teams == 2 else {0})
    assert all(each.block_k == 64 for each in found if each.block_m == 128)


def test_few_programs_leave_most_of_a_gpu_idle() -> None:
    alone = prediction(GEMM, n=64)
    assert alone.busy == pytest.approx(1 / 132)
    assert alone.bottleneck == "waves"
    assert prediction(replace(GEMM, split_k=8), n=1024).ceilings_us["bytes"] < prediction(GEMM, n=1024).ceilings_us["bytes"]


def test_an_sm_holds_what_its_threads_registers_and_shared_memory_allow() -> None:
    f16 = problem_of(m=16, n=4096, k=4096)
    assert residents(replace(GEMM, warps=4), H200, f16) == 4  # 128 registers for each of 128 threads
    assert residents(replace(GEMM, warps=4, maxnreg=64), H200, f16) == 8
    assert residents(replace(GEMM, warps=16, maxnreg=32), H200, f16) == 4
    assert residents(replace(GEMM, block_m=64, block_k=512, stages=3), H200, f16) == 1  # 192 KB of x
    assert residents(replace(GEMM, warps=4), ARCHES["gfx942"], f16) == 2  # warps of 64


def test_candidates_have_other_teams_and_none_that_cannot_share() -> None:
    """Every legal one is a kernel; none is refused by the template only."""
    program = lower(problem_of(m=16, n=8192, k=8192))
    found = [each for each in candidates(program, H200, 16) if each.schedule.template == "gemv_mma"]
    legal = [each.schedule for each in found if not each.refused]
    assert {each.teams for each in legal} == {1, 2}
    assert all(each.launched == each.warps * each.teams for each in legal)
    assert any("teams do not share block_n=16" in each.refused for each in found)
    for each in legal:
        made(program, each, H200)
    teamed = next(each for each in legal if each.teams == 2)
    alone = replace(teamed, teams=1)
    assert residents(teamed, H200, program.problem) <= residents(alone, H200, program.problem), "it has twice the warps"


def test_each_ceiling_can_be_the_one_that_is_hit() -> None:
    assert prediction(GEMM, m=16, n=8192, k=8192).bottleneck == "bytes"
    assert prediction(replace(GEMM, block_m=64), m=128, n=8192, k=8192).bottleneck == "matrix"
    lanes = Schedule(template="gemv", block_n=4, block_k=1024, warps=1)
    assert prediction(lanes, "portable", m=1, n=8192, k=8192, format="nf4_g64", dtype_name="bfloat16").bottleneck == "lanes"


def measured() -> list[tuple[float, float]]:
    """(measured, predicted) microseconds of every committed row."""
    found = []
    for path in sorted(RESULTS.glob("*-h200.json")):
        rows = json.loads(path.read_text()).get("rows", [])
        for row in (each for each in rows if "cublas_us" in each):  # others are of other measurements
            dtype = {"f16": "float16", "bf16": "bfloat16"}[row["dtype"]]
            asked = {"m": row["m"], "n": row["n"], "k": row["k"], "format": row["format"], "dtype_name": dtype}
            asked["gradient"] = row.get("gradient", False)
            found.append((row["us"], prediction(Schedule.parse(row["schedule"]), **asked).us))
    return found


def test_the_order_of_predictions_is_that_of_times() -> None:
    """Spearman's rank correlation, over what was measured on an H200: shapes of known models, M = 1 … 128, five formats."""
    pairs = np.array(measured())
    assert len(pairs) >= 100
    ranks = [np.argsort(np.argsort(column)) for column in pairs.T]
    assert np.corrcoef(*ranks)[0, 1] > 0.9
    assert np.exp(np.std(np.log(pairs[:, 1] / pairs[:, 0]))) < 1.6, "typical factor between a prediction and a time"


def test_explain_shows_candidates_and_why_they_lost() -> None:
    done = CliRunner().invoke(cli, ["explain", "--shape", "8x4096x4096", "--arch", "sm_90", "--json"])
    facts = json.loads(done.output)
    own, *others = facts["candidates"]
    assert own["schedule"] == "as it is"
    assert own["us"] > 0
    assert {"us", "bound_by", "why"} <= set(own)
    assert any("times the one taken" in each["why"] for each in others)
    assert any(each["why"].startswith("refused: what is in flight takes") for each in others)
    assert 0 < facts["legal"] < facts["tried"]
    done = CliRunner().invoke(cli, ["explain", "--shape", "8x4096x4096", "--arch", "sm_90", "--all", "--json"])
    every = json.loads(done.output)["candidates"]
    assert len(every) == facts["tried"]
    assert sum(each["why"].startswith("refused: ") for each in every) == facts["tried"] - facts["legal"]
    assert all(each in every for each in facts["candidates"])
    words = CliRunner().invoke(cli, ["explain", "--shape", "8x4096x4096", "--arch", "sm_90"]).output
    assert "candidates" in words
    assert f"{facts['legal']} of {facts['tried']} schedules are legal" in words


@pytest.mark.parametrize(
    ("timed", "who"),
    [(False, "the rules, which were fitted to timings, chose otherwise"), (True, "that one was found by timing")],
)
def test_explain_says_why_what_the_model_has_faster_is_not_taken(timed: bool, who: str, fresh_cache: Path) -> None:
    shape, problem = "1x4096x14336", problem_of(m=1, n=14336, k=4096)
    if timed:
        tuned.save("sm_90", [tuned.Row(question=tuned.question(problem), schedule=pick(lower(problem), H200), triton=version())])
    facts = json.loads(CliRunner().invoke(cli, ["explain", "--shape", shape, "--arch", "sm_90", "--all", "--json"]).output)
    own, *others = facts["candidates"]
    legal = [each for each in others if each["us"]]
    faster = [each for each in legal if round(each["us"] / own["us"], 2) < 1]
    assert 0 < len(faster) < len(legal)
    assert all(each["why"].endswith(f"the model has it faster, but {who}") for each in faster)
    assert not any(who in each["why"] for each in legal if each not in faster)


def test_explain_names_one_bottleneck(fresh_cache: Path) -> None:
    ask = ["explain", "--shape", "1x4096x14336", "--arch", "sm_90"]
    facts = json.loads(CliRunner().invoke(cli, [*ask, "--json"]).output)
    assert facts["candidates"][0]["bound_by"] == facts["bottleneck"] == "lanes"
    assert facts["candidates"][0]["us"] == facts["predicted_us"]
    other = next(each for each in facts["others"] if each["change"] == "template=gemm unit=mma")
    words = CliRunner().invoke(cli, ask).output
    assert f"bound by  lanes: a model predicts {facts['predicted_us']:.2f} us" in words
    assert re.fullmatch(r"predicted \d+\.\d\d us, bound by \w+", other["why"])
    assert "slowest" not in words


def test_a_gradient_has_tiles_of_any_height() -> None:
    """The grid covers the rows of dY; what is legal has a text."""
    program = lower(problem_of(m=512, n=1024, k=2048, format="int8_g128", gradient=True))
    legal = [each.schedule for each in candidates(program, H200, 512) if not each.refused]
    assert len(legal) > 50
    assert {each.block_m for each in legal} >= {32, 64, 128}
    assert pick(program, H200) in legal
    assert all("tl.dot(" in made(program, each, H200).source for each in legal[:3])


def test_a_gradient_of_turned_words_has_its_tiles_beside_those_of_any_format() -> None:
    program = lower(problem_of(m=512, n=1024, k=2048, gradient=True))
    legal = [each.schedule for each in candidates(program, H200, 512) if not each.refused]
    assert {each.template for each in legal} == {"dgrad", "dgrad_wgmma"}
    assert {each.block_m for each in legal if each.template == "dgrad_wgmma"} == {64, 128, 256}
    assert pick(program, H200) in legal
