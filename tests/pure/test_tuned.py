"""Tuned rows: files of records; near devices, merging, what is ignored and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import w4gen
from w4gen import paths, toolchain, tuned
from w4gen.api import problem_of
from w4gen.bench import report
from w4gen.cli import cli
from w4gen.errors import CacheError
from w4gen.formats import named
from w4gen.ir.lower import lower
from w4gen.ir.types import BF16
from w4gen.schedule.arch import ARCHES
from w4gen.schedule.rules import pick
from w4gen.schedule.schedule import Schedule
from w4gen.tuned import Row

PROBLEM = problem_of(m=1, n=256, k=1536)
HALF = Schedule.parse("template=gemv_half block_n=16 block_k=128 unit=halves warps=2 overlap=1")
ROW = Row(
    question=tuned.question(PROBLEM), schedule=HALF, device="NVIDIA H200", sms=132, us=2.5, floor_us=2.0, trials=30,
    date="2026-11-30", triton="3.6.0", w4gen="0.1.0", text="ab",
)  # fmt: skip
OTHER = replace(ROW, question=tuned.question(problem_of(m=8, n=256, k=1536)))


def test_rows_are_readable_json_and_come_back(tmp_path: Path) -> None:
    other = replace(ROW, question="another", device="")
    path = tmp_path / "sm_90.json"
    path.write_bytes(tuned.dump([ROW, other]))
    assert tuned.load(path) == (other, ROW), "in the order of their questions"
    (_, facts) = json.loads(path.read_text())["rows"]
    assert facts["device"] == "NVIDIA H200"
    assert facts["schedule"] == str(HALF)
    assert (facts["us"], facts["floor_us"], facts["trials"], facts["date"], facts["triton"]) == (
        2.5,
        2,
        30,
        "2026-11-30",
        "3.6.0",
    )


def test_fields_of_other_versions_are_ignored_and_missing_ones_have_defaults() -> None:
    data = {"rows": [{"question": "q", "schedule": str(HALF), "watts": 3}], "more": 1}
    assert tuned.parse("f", json.dumps(data).encode()) == (Row(question="q", schedule=HALF),)


@pytest.mark.parametrize(
    ("device", "sms", "found"),
    [
        ("NVIDIA H200", 132, "exact"),
        ("NVIDIA H100 80GB HBM3", 132, "near"),
        ("NVIDIA H100 PCIe", 114, None),
        ("", 0, "near"),  # no GPU: that of the arch's board, which has as many SMs
    ],
)
def test_a_row_holds_on_its_device_and_on_those_with_as_many_sms(
    device: str, sms: int, found: str | None, fresh_cache: Path
) -> None:
    near = replace(ROW, device="another", schedule=replace(HALF, warps=4))
    tuned.save("sm_90", [near, ROW])
    arch = replace(ARCHES["sm_90"], device=device, device_sms=sms)
    row = tuned.tuned(PROBLEM, arch)
    assert (row is not None) == (found is not None)
    assert found != "exact" or row == ROW
    assert tuned.tuned(problem_of(m=2, n=256, k=1536), arch) is None


def test_a_fast_row_is_used_with_the_triton_that_it_was_timed_with_only(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned.save("sm_90", [ROW])
    assert w4gen.compile("1x1536x256", arch="sm_90").schedule == HALF
    monkeypatch.setattr("w4gen.pipeline.version", lambda: "3.6.1")
    monkeypatch.setattr(toolchain, "version", lambda: "3.6.1")
    assert w4gen.compile("1x1536x256", arch="sm_90").schedule != HALF


def test_of_two_rows_the_newer_counts_then_that_of_more_trials_then_the_first() -> None:
    newer, longer = replace(ROW, date="2026-12-01", us=9.0), replace(ROW, trials=31)
    alike = replace(ROW, us=1.0)
    assert tuned.merged([ROW], [newer]) == tuned.merged([newer], [ROW]) == (newer,)
    assert tuned.merged([ROW], [longer]) == tuned.merged([longer], [ROW]) == (longer,)
    assert tuned.merged([ROW], [alike]) == (ROW,)
    other = replace(ROW, device="NVIDIA H100")
    assert set(tuned.merged([ROW], [other])) == {ROW, other}


def test_merge_and_diff_on_the_command_line(fresh_cache: Path, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "a" / "sm_90.json", tmp_path / "b" / "sm_90.json"
    changed = replace(ROW, schedule=replace(HALF, warps=4), date="2026-12-01", us=2.25)
    for path, rows in ((ours, [ROW]), (theirs, [changed, OTHER])):
        path.parent.mkdir()
        path.write_bytes(tuned.dump(rows))
    run = CliRunner()
    told = run.invoke(cli, ["cache", "diff", str(ours), str(theirs)]).output
    assert "2 differences" in told
    (line,) = [line for line in told.splitlines() if line.startswith(ROW.question)]
    assert "warps=2" in line
    assert "warps=4" in line
    assert "2.50" in line
    assert "2.25" in line
    assert "0 differences" in run.invoke(cli, ["cache", "diff", str(ours), str(ours)]).output
    told = run.invoke(cli, ["cache", "merge", str(ours), str(theirs)]).output
    assert "1 row of" in told
    assert "2 rows of" in told
    assert set(tuned.load(tuned.path_of("sm_90"))) == {changed, OTHER}


def test_rows_are_merged_into_the_file_of_an_arch(fresh_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_bytes(tuned.dump([ROW]))
    done = CliRunner().invoke(cli, ["cache", "merge", str(tmp_path / "rows.json")], standalone_mode=False)
    with pytest.raises(CacheError, match=r"rows.json is not called ARCH.json"):
        raise done.exception
    assert not fresh_cache.exists() or not list(fresh_cache.rglob("*.json"))


ODD = {
    "us": ({"us": float("nan")}, "us=nan of the row 'm=1..1 n=256"),
    "floor_us": ({"floor_us": float("inf")}, "floor_us=inf of the row"),
    "trials": ({"trials": -1}, "trials=-1 of the row"),
    "schedule": ({"schedule": f"{HALF} clusters=2"}, "cannot read 'clusters=2' of a schedule"),
    "question": ({"question": "nonsense"}, "'nonsense' is not the question of a row"),
}
"""What a row may say that is of no use here, and what is told of it."""


def odd_file(folder: Path) -> Path:
    """A file with a row, and such rows."""
    rows = [ROW.facts(), *(ROW.facts() | changes for changes, _ in ODD.values())]
    (folder / "sm_90.json").write_text(json.dumps({"rows": rows}))
    return folder / "sm_90.json"


def test_a_row_of_no_use_does_not_take_others_with_it(fresh_cache: Path, tmp_path: Path) -> None:
    told = CliRunner().invoke(cli, ["cache", "merge", str(odd_file(tmp_path))]).output
    assert "1 row of" in told
    assert all(f"skipped: {why}" in told for _, why in ODD.values())
    assert tuned.load(tuned.path_of("sm_90")) == (ROW,)
    figures = json.loads(CliRunner().invoke(cli, ["cache", "rules", str(tmp_path / "sm_90.json"), "--json"]).output)
    assert (figures["fitted"], figures["unreadable"]) == (1, len(ODD))


def test_rows_of_another_version_stay_in_the_file_and_are_told_once(fresh_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tuned.path_of("sm_90")
    path.parent.mkdir(parents=True)
    newer = ROW.facts() | ODD["schedule"][0]
    path.write_text(json.dumps({"rows": [newer, OTHER.facts()]}))
    with caplog.at_level("WARNING", "w4gen"):
        for _ in range(2):
            assert tuned.tuned(PROBLEM, ARCHES["sm_90"]) is None
    (record,) = caplog.records
    assert f"{path}: rows passed over: 1, the first as cannot read 'clusters=2'" in record.getMessage()
    tuned.save("sm_90", [ROW])
    assert tuned.tuned(PROBLEM, ARCHES["sm_90"]) == ROW
    assert newer in json.loads(path.read_text())["rows"]


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b'{"rows": {}}', b'{"rows": [{"question": "q"}]}', b"[" * 99_999])
def test_a_damaged_file_is_refused_by_name(data: bytes, fresh_cache: Path, tmp_path: Path) -> None:
    """Also where it would be written over."""
    path = tmp_path / "sm_90.json"
    path.write_bytes(data)
    with pytest.raises(CacheError, match=f"{path} is not a file of tuned schedules"):
        tuned.load(path)
    done = CliRunner().invoke(cli, ["cache", "merge", str(path)], standalone_mode=False)
    assert isinstance(done.exception, CacheError)
    tuned.path_of("sm_90").parent.mkdir(parents=True)
    tuned.path_of("sm_90").write_bytes(data)
    with pytest.raises(CacheError, match="is not a file of tuned schedules"):
        tuned.save("sm_90", [ROW])
    assert tuned.path_of("sm_90").read_bytes() == data


def test_rows_that_cannot_be_read_or_written_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CacheError, match="cannot be read"):
        tuned.load(tmp_path / "nowhere.json")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("W4GEN_CACHE", str(tmp_path / "file"))
    with pytest.raises(CacheError, match="cannot be written"):
        tuned.save("sm_90", [ROW])


def test_the_doctor_counts_rows_and_the_old_ones(fresh_cache: Path) -> None:
    tuned.save("sm_90", [ROW, replace(ROW, question="q", triton="3.5.0"), replace(ROW, question="r", triton="")])
    told = json.loads(CliRunner().invoke(cli, ["doctor", "--json"]).output)
    assert told["tuned rows"][0] == "3 rows, 1 timed with another Triton"


def timed(n: int, k: int, us: float, rules_us: float, m: int = 1) -> Row:
    """A row of a search in which the rules' choice of today was timed too."""
    problem = problem_of(m=m, n=n, k=k)
    rules = str(pick(lower(problem), ARCHES["sm_90"]))
    return replace(ROW, question=tuned.question(problem), us=us, rules=rules, rules_us=rules_us, floor_us=1.0)


def test_a_report_says_how_far_the_rules_are_from_what_was_found(tmp_path: Path) -> None:
    rows = [timed(256, 1536, 2.0, 2.0), timed(512, 1536, 2.0, 8.0)]
    (tmp_path / "sm_90.json").write_bytes(tuned.dump(rows))
    told = report.tuned_rows(tmp_path / "sm_90.json")
    assert told.startswith("## Tuned rows of sm_90\n\nNVIDIA H200, Triton 3.6.0\n")
    assert told.endswith("| int4_g128 | 1…1 | 2 | 2.000 | 4.00 | 50% | 60 |")
    (tmp_path / "sm_90.json").write_bytes(tuned.dump([rows[0], replace(rows[1], rules=str(HALF))]))
    told = report.tuned_rows(tmp_path / "sm_90.json")
    assert told.endswith("| int4_g128 | 1…1 | 2 | 1.000 | 1.00 | 50% | 60 |"), "the rules have changed since"


@pytest.mark.parametrize(
    "changes",
    [{}, {"gradient": True}, {"activation": "gelu", "residual": True}, {"format": named("q4_k")}, {"x": BF16, "y": BF16}],
)
def test_a_question_says_which_problem_it_is_of(changes: dict[str, Any]) -> None:
    asked = replace(PROBLEM, **changes)
    assert tuned.problem(tuned.question(asked)) == asked


def test_a_question_that_is_none_is_refused() -> None:
    with pytest.raises(CacheError, match="'q' is not the question of a row: rows are made by w4gen tune"):
        tuned.problem("q")


def test_the_rules_are_compared_with_what_was_found_over_layers_they_were_not_fitted_to(tmp_path: Path) -> None:
    new = [
        timed(3584, 3584, 2.0, 2.0),
        timed(512, 3584, 1.0, 1.21),
        timed(18944, 3584, 10.0, 10.0, m=8),
        timed(64, 3584, 1.0, 0.0),
    ]
    path = tmp_path / "sm_90.json"
    path.write_bytes(tuned.dump([*new, timed(4096, 4096, 1.0, 9.0)]))  # the last is one that the rules were fitted to
    told = json.loads(CliRunner().invoke(cli, ["cache", "rules", str(path), "--json"]).output)
    every, one, eight = told["groups"]
    assert (every["rows"], every["layers"], told["fitted"], told["untimed"]) == ("all", 3, 1, 1)
    assert every["mean"] == pytest.approx(1.21 ** (1 / 3))
    assert (every["worst"], every["at"]) == (pytest.approx(1.21), new[1].question)
    assert (one["rows"], one["mean"]) == ("int4_g128 M=1..1", pytest.approx(1.1))
    assert (eight["rows"], eight["worst"]) == ("int4_g128 M=2..8", 1.0)
    said = CliRunner().invoke(cli, ["cache", "rules", str(path), "--fitted"]).output
    assert "9.000" in said
    assert "left out: 0 of layers that the rules were fitted to, 0 timed against" in said
    assert "1 without a time of theirs" in said
    path.write_bytes(tuned.dump([]))
    assert "nan" in CliRunner().invoke(cli, ["cache", "rules", str(path)]).output


def test_a_row_counts_for_the_rules_while_they_choose_what_it_timed(tmp_path: Path) -> None:
    """A row of a version that did not tell their choice says nothing of them either."""
    path = tmp_path / "sm_90.json"
    kept, old = timed(3584, 3584, 2.0, 2.2), timed(512, 3584, 1.0, 9.0)
    facts = [each.facts() for each in (kept, replace(old, rules=f"{old.rules} ring=3"), timed(64, 3584, 1.0, 9.0))]
    del facts[2]["rules"]
    path.write_text(json.dumps({"rows": facts}))
    told = json.loads(CliRunner().invoke(cli, ["cache", "rules", str(path), "--json"]).output)
    assert (told["changed"], told["groups"][0]["layers"]) == (2, 1)
    assert told["groups"][0]["worst"] == pytest.approx(1.1)


def test_rules_are_of_an_arch(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_bytes(tuned.dump([ROW]))
    done = CliRunner().invoke(cli, ["cache", "rules", str(tmp_path / "rows.json")], standalone_mode=False)
    with pytest.raises(CacheError, match=r"rows.json is not called ARCH.json \(unknown arch 'rows'"):
        raise done.exception


def test_shipped_rows_say_what_the_rules_chose() -> None:
    """And what they choose today was timed beside them: a row stands in for nothing better."""
    for path in sorted((paths.CHECKOUT / "cache/tuned").glob("*.json")):
        for row in tuned.load(path):
            assert (row.rules == str(row.schedule)) == (row.rules_us == row.us), "the first of equals wins: the rules' choice"
            chosen = str(pick(lower(tuned.problem(row.question)), ARCHES[path.stem]))
            assert chosen in (row.rules, str(row.schedule)), "tune it again, or leave it out"


def test_explain_says_that_a_schedule_was_timed(fresh_cache: Path) -> None:
    def why() -> str:
        told = CliRunner().invoke(cli, ["explain", "--shape", "1x1536x256", "--arch", "sm_90"]).output
        (line,) = [line for line in told.splitlines() if line.lstrip().startswith("why  ")]
        return line.split("why", 1)[1].strip()

    assert why() == "the rules' choice for M=1..1 (nothing was timed)"
    tuned.save("sm_90", [ROW])
    assert why() == "stored by tuning for M=1..1"
