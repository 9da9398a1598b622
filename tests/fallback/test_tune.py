"""Tuning without a GPU: trials and checks are made up; candidates, rows, resuming and running out of memory are not."""

from __future__ import annotations

import base64
import json
import pickle
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import w4gen
from w4gen import ahead, pipeline, processes, tuned
from w4gen.api import problem_of
from w4gen.cli import cli, main
from w4gen.codegen.render import Kernel
from w4gen.commands.tune import wanted
from w4gen.errors import ScheduleError, W4Error
from w4gen.ir.lower import lower
from w4gen.layers import LAYERS, PRESETS, layers, random_layers, read
from w4gen.runtime import tune
from w4gen.schedule.arch import ARCHES
from w4gen.schedule.rules import pick
from w4gen.schedule.schedule import Schedule

HERE = replace(ARCHES["sm_80"], device="a GPU that is made up", device_sms=108)
CPU = torch.device("cpu")
QUESTIONS = [tune.Question(problem_of(m=1, n=256, k=512), 1, 2), tune.Question(problem_of(m=8, n=64, k=256), 8)]


@pytest.fixture
def trials(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[Kernel]:
    """The trials that were made; fewer warps are faster."""
    made: list[Kernel] = []

    def trial(kernel: Kernel, m: int, device: torch.device) -> tune.Timer:
        made.append(kernel)
        return lambda: 10.0 + kernel.schedule.warps

    def compiled(
        asks: Iterable[ahead.Question], workers: int = 0, wanted: Callable[[ahead.Question], bool] = bool
    ) -> Iterator[ahead.Done]:
        for ask in asks:
            if isinstance(ask, ahead.Ranking):
                yield ahead.Done(ask, **ask.answer())
            else:
                yield ahead.Done(ask, error="too odd" if ask.schedule.stages == 4 else "" if wanted(ask) else ahead.UNWANTED)  # type: ignore[union-attr]

    monkeypatch.setattr(tune, "arch_of", lambda device: HERE)
    monkeypatch.setattr(tune, "trial", trial)
    monkeypatch.setattr(tune, "right", lambda kernel, device: True)
    monkeypatch.setattr(ahead, "compiled", compiled)
    return made


def run(questions: list[tune.Question] = QUESTIONS, seconds: float = 4.0, **options: Any) -> list[Any]:
    return list(tune.tune(questions, seconds, lambda nbytes, device, overlap: nbytes / 1e6, device=CPU, **options))


def test_winners_become_rows_and_are_taken_by_compiles(trials: list[Kernel]) -> None:
    told = run()
    rows = tuned.load(tuned.path_of("sm_80"))
    assert {row.question for row in rows} == {tuned.question(each.problem) for each in QUESTIONS}
    assert {row for _, row, _ in told} == set(rows)
    for question, row, found in told:
        assert (row.device, row.sms, row.trials) == ("a GPU that is made up", 108, found.trials)
        assert row.us == 10.0 + row.schedule.warps
        assert row.rules_us == 10.0 + pick(lower(question.problem), ARCHES["sm_80"]).warps
        assert row.rules == str(pick(lower(question.problem), ARCHES["sm_80"]))
        assert row.schedule.warps == min(kernel.schedule.warps for kernel in trials if kernel.problem == question.problem)
        assert row.triton
        assert row.date
        assert row.floor_us >= 0
        assert pipeline.compile(question.problem, HERE).schedule == row.schedule
        assert any("it does not compile: too odd" in why for _, why in found.skipped)
    assert trials[0].schedule == pick(lower(QUESTIONS[0].problem), ARCHES["sm_80"]), "the rules' choice is timed first"


def test_a_candidate_faster_than_the_floor_is_left_out(trials: list[Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    """The floor is the least of those of the launches that are tried: one that starts early may be below that of others."""
    asked: list[bool] = []

    def floor(nbytes: int, device: torch.device, overlap: bool) -> float:
        asked.append(overlap)
        return 10.0

    monkeypatch.setattr(
        tune, "trial", lambda kernel, m, device: lambda: 12.0 if kernel.schedule == pick(lower(kernel.problem), HERE) else 1.0
    )
    ((_, row, found),) = tune.tune(QUESTIONS[:1], 4.0, floor, device=CPU)
    assert row.us == row.rules_us == 12.0
    assert found.trials == 1
    assert sum("1.00 us beat the floor of 10.00 us" in why for _, why in found.skipped) >= 3
    assert set(asked) == {False}, "no kernel of sm_80 starts early"


def test_a_second_run_goes_on_where_the_first_was_stopped(trials: list[Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(kernel: Kernel, m: int, device: torch.device) -> tune.Timer:
        if m == 8:
            raise KeyboardInterrupt
        return lambda: 10.0

    with monkeypatch.context() as patch:
        patch.setattr(tune, "trial", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run()
    assert len(tuned.load(tuned.path_of("sm_80"))) == 1, "what is done is kept"
    told = run()
    assert [(each.m, row is not None) for each, row, _ in told] == [(1, False), (8, True)]
    assert {kernel.problem.m for kernel in trials} == {(2, 8)}
    trials.clear()
    assert [row for _, row, _ in run()] == [None, None]
    assert not trials
    assert all(row for _, row, _ in run(again=True))


def test_out_of_memory_leaves_a_question_to_the_rules(trials: list[Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(kernel: Kernel, m: int, device: torch.device) -> tune.Timer:
        if m == 1:
            raise torch.cuda.OutOfMemoryError("no room")
        return lambda: 10.0

    monkeypatch.setattr(tune, "trial", full)
    assert [(row is not None, found is not None) for _, row, found in run()] == [(False, False), (True, True)]


def test_nothing_that_is_wrong_is_kept(trials: list[Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "right", lambda kernel, device: False)
    assert all(row is None and found.winner is None for _, row, found in run())
    assert not tuned.path_of("sm_80").exists()

    def broken(*_: object) -> float:
        raise ScheduleError("the GPU refuses it")

    monkeypatch.setattr(tune, "trial", broken)
    assert all(row is None for _, row, _ in run())


def test_what_is_asked_more_often_and_takes_longer_is_worth_more(trials: list[Kernel]) -> None:
    large = tune.Question(problem_of(m=8, n=8192, k=8192), 8)
    often = replace(QUESTIONS[0], count=90)
    worth = {plan.question: plan.value for plan in tune.planned([QUESTIONS[1], often, large], HERE, 60)}
    assert worth[QUESTIONS[1]] < worth[often]
    assert worth[QUESTIONS[1]] < worth[large]


def test_weights_that_are_worth_most_come_first_with_all_their_buckets(trials: list[Kernel]) -> None:
    asked = [tune.Question(problem_of(m=m, n=n, k=4096), m) for n in (1024, 28672, 8192) for m in (1, 8)]
    found = [(plan.question.problem.n, plan.question.m) for plan in tune.planned(asked, HERE, 60)]
    assert found == [(28672, 1), (28672, 8), (8192, 1), (8192, 8), (1024, 1), (1024, 8)]


def test_more_seconds_try_more_candidates(trials: list[Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "cores", lambda: 16)
    few, many = (tune.planned(QUESTIONS[1:], HERE, seconds)[0] for seconds in (0.0, 60.0))
    assert len(few.asks) == len(few.predicted) == tune.LEAST
    assert len(many.asks) == tune.MOST
    assert many.asks[: tune.LEAST] == few.asks
    assert few.asks[0].schedule == pick(lower(QUESTIONS[1].problem), ARCHES["sm_80"])
    monkeypatch.setattr(ahead, "cores", lambda: 1)
    assert len(tune.planned(QUESTIONS[1:], HERE, 20)[0].asks) == 20, "as many as one core compiles"


def test_seconds_end_a_run_after_one_question_at_least(trials: list[Kernel]) -> None:
    assert [each.m for each, row, _ in run(seconds=0.0) if row] == [1]
    assert [(each.m, row is not None) for each, row, _ in run(seconds=0.0)] == [(1, False), (8, True)], "and the next goes on"


def test_a_question_asked_twice_is_tuned_once(trials: list[Kernel]) -> None:
    alike = replace(QUESTIONS[1], m=4, problem=replace(QUESTIONS[1].problem, bias=True))
    assert [(each.m, row is not None) for each, row, _ in run([QUESTIONS[1], alike])] == [(4, False), (8, True)]


def test_near_the_floor_no_second_candidate_is_timed(trials: list[Kernel]) -> None:
    ((_, row, found),) = tune.tune(QUESTIONS[:1], 4.0, lambda *_: 14.0, device=CPU)
    assert found is not None
    assert row is not None
    assert row.schedule == pick(lower(QUESTIONS[0].problem), ARCHES["sm_80"])
    assert found.trials == row.trials == 1


def test_what_takes_longest_is_compiled_first() -> None:
    """So that no worker is left alone with it at the end; each ask once."""
    asks = [ahead.Ask(problem_of(m=m, n=64, k=128), HERE) for m in (1, 300, 16, 1)]
    assert [ask.problem.m for ask in ahead.longest_first(asks)] == [(257, 512), (9, 16), (1, 1)]


def test_rankings_are_made_in_other_processes_and_what_is_not_wanted_is_not_made(fresh_cache: Path) -> None:
    ranking = ahead.Ranking(QUESTIONS[0].problem, HERE, 1, 3)
    (done,) = ahead.compiled([ranking], workers=1)
    assert [tuple(each) for each in done.ranked] == ranking.answer()["ranked"]
    assert (len(done.ranked), done.error) == (3, "")
    asked = [ahead.Ask(each.problem, HERE) for each in QUESTIONS]
    assert [done.error for done in ahead.compiled(asked, 1, lambda ask: False)] == [ahead.UNWANTED] * 2


def test_a_worker_is_ours_where_another_lies_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "w4gen").mkdir()
    (tmp_path / "w4gen" / "__init__.py").write_text("raise SystemExit('another')")
    monkeypatch.chdir(tmp_path)
    (done,) = ahead.compiled([ahead.Ranking(QUESTIONS[0].problem, HERE, 1, 1)], workers=1)
    assert (done.error, len(done.ranked)) == ("", 1)
    asked = processes.program("import sys, w4gen; print(w4gen.__version__, *sys.argv[1:])", "as asked")
    told = subprocess.run(asked, env=processes.environment(), capture_output=True, text=True, check=True).stdout
    assert told.split(" ", 1) == [w4gen.__version__, "as asked\n"]


def test_a_worker_that_nobody_hears_ends_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    worker = ahead.started("w4gen.ahead")
    worker.stdout.close()
    with worker.stdin as asked:
        asked.write(base64.b64encode(pickle.dumps(ahead.Ranking(QUESTIONS[0].problem, HERE, 1, 1))).decode() + "\n")
    assert (worker.wait(), capfd.readouterr().err) == (0, "")


def options(**changed: Any) -> dict[str, Any]:
    return {"arch": "", "layout": None, "format_name": "int4_g128", "m": "1,8", "dtype": "float16"} | changed


def test_layers_that_models_share_are_one_question_of_all_that_have_them() -> None:
    found = {
        (each.k, each.n, each.format.label, m): count for each, m, count in wanted(["Llama-3.1-8B", "Mistral-7B"], "1", options())
    }
    assert found[4096, 4096, "int4_g128", 1] == found[4096, 4096, "int4_g128", 8] == 128
    assert found[4096, 32768, "int4_g128", 1] == 1
    assert len(found) == 2 * 6
    both = wanted(["Qwen2.5-1.5B"], "1", options(format_name="int4_g128,nf4_g64"))
    assert {each.format.label for each, _, _ in both} == {"int4_g128", "nf4_g64"}
    assert not any(each.bias for each, _, _ in both), "a row answers with and without a bias"
    assert len(both) == 2 * 2 * 4


def test_random_layers_are_tuned_that_the_rules_were_never_fitted_to() -> None:
    drawn = random_layers(3)
    found = wanted([], "1", options(format_name="int4_g128,nf4_g64"), drawn)
    assert [f"{each.k}x{each.n}" for each, _, _ in found] == [layer for layer in drawn for _ in range(4)]
    assert [(each.format.label, m, count) for each, m, count in found[:4]] == [
        ("int4_g128", 1, 1), ("int4_g128", 8, 1), ("nf4_g64", 1, 1), ("nf4_g64", 8, 1),
    ]  # fmt: skip
    assert not {(each.k, each.n) for each, _, _ in found} & set(LAYERS)


def test_all_presets_are_one_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `make tuned-rows` has it; what the seconds did not reach is told."""
    asked: list[Any] = []

    def made(questions: list[Any], seconds: float, again: bool) -> Iterator[Any]:
        asked.extend(questions)
        yield tune.Question(*questions[0]), None, None

    monkeypatch.setattr(w4gen, "tune", made, raising=False)
    command = ["tune", "--presets", "--format", "int4_g128,nf4_g64", "--m", "1,8,16,32,64", "--budget", "150"]
    told = CliRunner().invoke(cli, command, standalone_mode=False).output
    every = [layer for model in PRESETS for layer in layers(read(Path(model)))]
    assert len(asked) == len({(layer.n, layer.k) for layer in every}) * 5 * 2
    counts = [count for problem, m, count in asked if m == 1 and problem.format.label == "nf4_g64"]
    assert sum(counts) == sum(layer.count for layer in every)
    assert f"1/{len(asked)} 1x" in told
    assert f"{len(asked) - 1} questions left: run it again to go on" in told


def test_without_a_gpu_the_command_says_so_and_exits_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["w4gen", "tune", "--shape", "1x4096x4096", "--budget", "1"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "w4gen: times come from GPUs only, and PyTorch sees none here: run w4gen tune where the kernels will run\n"
    )


def test_a_row_that_beats_its_floor_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is found, and in JSON."""
    asked = problem_of(m=8, n=64, k=256)
    row = tuned.Row(question=tuned.question(asked), schedule=Schedule.parse("template=gemm"), us=1.0, rules_us=1.0, floor_us=2.0)
    monkeypatch.setattr(w4gen, "tune", lambda questions, *_: [(tune.Question(*questions[0]), row, None)], raising=False)
    command = ["tune", "--shape", "8x256x64"]
    line = f"MEASURING ERROR: {row.question} in 1.00 us beats its floor of 2.00 us by more than noise (1.0%)"
    assert CliRunner().invoke(cli, command, standalone_mode=False).output.splitlines()[1:] == [line]
    (told,) = json.loads(CliRunner().invoke(cli, [*command, "--json"], standalone_mode=False).output)
    assert told["measuring_errors"] == [line]


def test_the_command_tells_each_question(trials: list[Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    def made(asked: list[Any], seconds: float, again: bool) -> Iterator[Any]:
        yield from run([tune.Question(*each) for each in asked], seconds, again=again)

    monkeypatch.setattr(w4gen, "tune", made, raising=False)
    told = CliRunner().invoke(cli, ["tune", "--shape", "8x256x64", "--budget", "5"], standalone_mode=False)
    assert re.match(
        r"1/1 8x256x64 int4_g128: 1\d\.00 us, rules 1\d\.00, floor \d\.\d\d, \d+ trials?, \d+ skipped, \d\.\d s; [0-5] s left\n",
        told.output,
    )
    told = CliRunner().invoke(cli, ["tune", "--shape", "8x256x64", "--budget", "5"], standalone_mode=False)
    assert "passed over: tuned before" in told.output
    refused = CliRunner().invoke(cli, ["tune", "--shape", "8x256x64", "--arch", "sm_90"], standalone_mode=False)
    assert isinstance(refused.exception, W4Error)
