"""The comparison without a GPU: times are made up; weights, peers, errors and what is told of them are not."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from w4gen import ahead, tuned
from w4gen.api import problem_of
from w4gen.bench import compare, contenders, report
from w4gen.bench.contenders import Contender
from w4gen.bench.noise import against, checked, impossible, results, too_fast
from w4gen.bench.peers import PEERS, Given, PeerError
from w4gen.cli import cli
from w4gen.errors import W4Error
from w4gen.runtime.timer import Timing
from w4gen.runtime.weight import Weight
from w4gen.schedule.schedule import Schedule

US = {"w4gen": 5.0, "cuBLAS": 10.0, "dequantize, matmul": 20.0, "gemlite": 8.0, "humming": 7.0}
CPU = torch.device("cpu")


class Packed(torch.nn.Module):
    """What two libraries have in common: a layer that is handed codes and scales, and dequantizes them by loops of its own."""

    def __init__(self, k: int, n: int, group: int) -> None:
        super().__init__()
        self.k, self.n, self.group = k, n, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w.to(x.dtype).T


class GemLite(Packed):
    def __init__(self, bits: int, group_size: int, in_features: int, out_features: int, **kinds: str) -> None:
        super().__init__(in_features, out_features, group_size)
        assert (bits, kinds) == (4, {"input_dtype": "f16", "output_dtype": "f16"})

    def pack(self, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bias: None) -> None:
        each = (codes.float().view(self.n, -1, self.group) - zeros[..., None]) * scales[..., None]
        self.w = each.view(self.n, self.k)


class Humming(Packed):
    def __init__(self, shape_n: int, shape_k: int, weight_config: dict[str, Any], torch_dtype: torch.dtype) -> None:
        super().__init__(shape_k, shape_n, weight_config["group_size"])
        assert weight_config["dtype"] == "int4"
        self.steps: list[str] = []

    def load_from_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        words, scales = tensors["weight"], tensors["weight_scale"]
        assert (words.dtype, words.shape) == (torch.int32, (self.n, self.k // 8))
        self.w = torch.empty(self.n, self.k)
        for n in range(self.n):
            for k in range(self.k):
                code = (int(words[n, k // 8]) >> 4 * (k % 8)) & 15
                self.w[n, k] = (code - 8) * float(scales[n, k // self.group])

    def transform(self) -> None:
        self.steps.append("transform")

    def prepare_default_kernel_configs(self) -> None:
        assert self.steps == ["transform"]


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """GemLite and Humming as their pages describe them; bitsandbytes is not installed."""
    for name, held in {
        "gemlite": {}, "humming": {},
        "gemlite.core": {"DType": SimpleNamespace(FP16="f16", BF16="bf16"), "GemLiteLinear": GemLite},
        "humming.layer": {"HummingLayer": Humming},
    }.items():  # fmt: skip
        module = ModuleType(name)
        vars(module).update(held)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch, libraries: None) -> None:
    """A GPU that is made up: its times are `US`; who answers multiplies on the CPU."""

    def timed(there: list[Contender]) -> dict[str, Timing]:
        for each in there:
            assert len(each.calls) == 2
        return {each.name: Timing(US[each.name], 0.01) for each in there}

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(compare, "bind", lambda kernel: lambda x, w: (x.double() @ w.dequantize(torch.float64).T).to(x.dtype))
    monkeypatch.setattr(compare, "dequantized", lambda w, dtype: lambda x, each: x @ each.dequantize(x.dtype).T)
    monkeypatch.setattr(compare, "timed", timed)
    monkeypatch.setattr(compare, "host_us", lambda there, m: {each.name: 30.0 for each in there})
    monkeypatch.setattr(compare, "once_us", lambda call: 10.0)
    monkeypatch.setattr(contenders, "once_us", lambda call: 50.0)
    monkeypatch.setattr(compare, "floor", lambda nbytes, *_: Timing(nbytes / 25000, 0.01))
    for room in (compare, contenders):
        monkeypatch.setattr(room, "copies_for", lambda *_: 2)


def row(format: str = "int4_g128", m: int = 2) -> dict[str, Any]:
    return compare.measure(m, 256, 64, format, "float16", CPU)


def test_peers_answer_with_the_same_weight_and_others_say_why_not(on_a_gpu: None) -> None:
    found = row()
    others = {each["name"]: each for each in found["others"]}
    assert list(others) == ["dequantize, matmul", "tinygemm", "gemlite", "humming", "bitsandbytes"]
    assert (found["us"], found["cublas_us"], found["host_us"], found["cublas_host_us"]) == (5.0, 10.0, 30.0, 30.0)
    for name in ("dequantize, matmul", "gemlite", "humming"):
        assert others[name]["us"] == US[name]
        assert 0 < others[name]["error"] < 1e-3, "it multiplied by the same weight"
    assert others["tinygemm"]["why"].startswith("failed with NotImplementedError: ")
    assert others["bitsandbytes"]["why"] == f"takes NF4 with a scale for a group, not {found['format']}"
    of_nf4 = {each["name"]: each.get("why", "") for each in row("nf4_g64")["others"]}
    assert of_nf4["bitsandbytes"].startswith("is not here (")
    assert of_nf4["bitsandbytes"].endswith("pip install bitsandbytes")
    assert of_nf4["gemlite"] == "takes 4-bit integers with a 16-bit scale for a group and no zero, not nf4_g64"


@pytest.mark.parametrize("cached", [False, True], ids=["compiled", "found"])
def test_our_first_call_counts_packing_and_compiling_too(
    on_a_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cached: bool
) -> None:
    """Where the cache had the kernel, what compiling takes is not known."""
    packings: list[float] = []

    def stored_for(w: Weight, device: torch.device) -> Weight:
        packings.append(0.05)
        time.sleep(packings[-1])
        return w

    monkeypatch.setattr(ahead, "compiled", lambda asks, workers: (ahead.Done(ask, cached=cached, seconds=7.5) for ask in asks))
    monkeypatch.setattr(compare, "here", lambda: CPU)
    monkeypatch.setattr(compare, "stored_for", stored_for)
    facts = compare.compare(["256x64"], tokens=[2], progress=lambda line: None)
    (found,) = facts["rows"]
    assert len(packings) == 2, "when the weight was made, and for the first call: the other copies are not packed"
    assert found["compile_s"] == (None if cached else 7.5)
    assert 0.05 < found["first_s"] - (0.0 if cached else 7.5) < 5
    (tmp_path / "it.json").write_text(json.dumps(facts))
    assert f"*first*, s: w4gen {found['first_s']:.2f}, " in report.section(tmp_path / "it.json")


def test_what_is_measured_is_kept_when_it_is_stopped(on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def progress(line: str) -> None:
        told.append(line)
        if len(told) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(compare, "here", lambda: CPU)
    monkeypatch.setattr(ahead, "compiled", lambda asks, workers: (ahead.Done(ask) for ask in asks))
    rows = compare.compare(["256x64"], tokens=[1, 2, 3], progress=progress, peers=["humming"])["rows"]
    assert [each["m"] for each in rows] == [1, 2]
    assert told[2] == "stopped: 2 of 3 rows are kept"
    assert [each["name"] for each in rows[0]["others"]] == ["dequantize, matmul", "humming"], "the peers asked for"


def test_a_peer_that_is_none_is_refused_before_anything_is_compiled() -> None:
    with pytest.raises(PeerError, match="marlin is no peer: give one of tinygemm, gemlite, humming, bitsandbytes"):
        compare.compare(["256x64"], peers=["humming", "marlin"])


@pytest.mark.parametrize(
    ("format", "takers"),
    [
        ("int4_g128", {"tinygemm", "gemlite", "humming"}), ("uint4_g64", set()), ("uint4_g64_z", set()), ("int4_row", set()),
        ("int4_g32_e8m0", set()), ("nf4_g64", {"bitsandbytes"}), ("nf4_g128", {"bitsandbytes"}), ("fp4", set()),
    ],
)  # fmt: skip
def test_what_a_peer_takes(format: str, takers: set[str]) -> None:
    form = Weight.from_float(torch.randn(8, 256), format).format
    assert {each.name for each in PEERS if each.takes(form)} == takers


def test_a_peer_that_multiplies_by_something_else_is_wrong(on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GemLite, "forward", lambda self, x: -(x @ self.w.to(x.dtype).T))
    assert [each["why"] for each in row()["others"] if each["name"] == "gemlite"] == ["is wrong: error 2.0e+00"]


def test_a_peer_that_takes_minutes_is_told_and_not_timed(on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "once_us", lambda call: 64000.0)
    why = {each["name"]: each.get("why") for each in row()["others"]}
    assert why["humming"] == "takes 64000 us, over 20 times cuBLAS's time: not timed"
    assert why["dequantize, matmul"] is None


def test_blocks_that_cross_rows_are_refused() -> None:
    given = Given.of(Weight.from_float(torch.randn(8, 96), "nf4_g64"))
    peer = next(each for each in PEERS if each.name == "bitsandbytes")
    with pytest.raises(PeerError, match="has blocks of 64 that cross rows of K=96"):
        peer.make(given, torch.float16)


def test_bitsandbytes_finds_the_codes_that_the_weight_was_made_of() -> None:
    pytest.importorskip("bitsandbytes")
    w = Weight.from_float(torch.randn(32, 256), "nf4_g64")
    call = next(each for each in PEERS if each.name == "bitsandbytes").ready(Given.of(w), torch.bfloat16)
    x = torch.randn(4, 256).bfloat16()
    truth = x.double() @ w.dequantize(torch.float64).T
    assert float((call(x).double() - truth).norm() / truth.norm()) < 0.01


def test_bytes_of_tinygemm_hold_two_codes_the_first_on_top(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, torch.Tensor] = {}
    aten = SimpleNamespace(
        _convert_weight_to_int4pack=lambda codes, tiles: seen.update(codes=codes),
        _weight_int4pack_mm=lambda x, packed, group, both: seen.update(both=both) or x,
    )
    monkeypatch.setattr(torch, "ops", SimpleNamespace(aten=aten))
    given = Given.of(Weight.from_float(torch.randn(8, 256), "int4_g128"))
    next(each for each in PEERS if each.name == "tinygemm").make(given, torch.bfloat16)(torch.zeros(1, 256))
    for n, k in ((0, 0), (3, 7), (7, 255)):
        byte = int(seen["codes"][n, k // 2])
        assert (byte & 15 if k % 2 else byte >> 4) == int(given.codes[n, k])
    assert seen["both"].shape == (2, 8, 2)
    assert torch.equal(seen["both"][..., 0], given.scales.T.bfloat16())
    assert not seen["both"][..., 1].any()


def test_a_figure_that_beats_its_floor_is_a_measuring_error(on_a_gpu: None) -> None:
    found = row()
    assert too_fast({"rows": [found]}) == []
    assert too_fast({"rows": [{**found, "floor_us": 5.05, "dense_floor_us": 9.0}]}) == [], "within the noise of 2 %"
    fast = {**found, "floor_us": 7.5, "dense_floor_us": 11.0}
    of = "MEASURING ERROR: 2x256x64 int4_g128 f16"
    assert [each.split(" in ")[0] for each in too_fast({"rows": [fast]})] == [f"{of}, w4gen", f"{of}, cuBLAS", f"{of}, humming"]
    assert "beats its floor of 7.50 us by more than noise (2.0%)" in compare.told("2x256x64", fast)


LAYER = {"name": "mlp.up_proj", "us": 1.0, "floor_us": 5.0, "spread": 0.01}
SHAPE = {"m": 1, "k": 64, "n": 32, "format": "int4_g128", "dtype": "f16"}


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (
            {
                "ladders": [
                    SHAPE | {"floor_us": 5.0, "rows": [{"part": "tuned", "us": 1.0, "spread": 0.01}, {"part": "x", "why": ""}]}
                ]
            },
            "1x64x32 int4_g128 f16 tuned",
        ),
        ({"phases": {"decode": {"layers": [LAYER, LAYER | {"us": 5.0}]}}}, "decode, mlp.up_proj"),
        (
            {"ms": [1, 8], "format": "int4_g128", "parts": [{"k": 64, "n": 32, "us": [1.0, 5.0], "floor_us": 5.0}]},
            "1x64x32 int4_g128",
        ),
        (
            {"variants": {"int4": {"graph": {"linears_us": 1.0}, "floor": {"floor_us": 5.0}}, "bf16": {}}},
            "int4, linear layers of a token",
        ),
    ],
    ids=["ablation", "profile", "curve", "model"],
)
def test_so_it_is_in_every_run(run: dict[str, Any], name: str) -> None:
    (told,) = checked(run)["measuring_errors"]
    assert told.startswith(f"MEASURING ERROR: {name} in 1.00 us beats its floor of 5.00 us")


def test_a_tuned_row_that_beats_its_floor_is_told(fresh_cache: Path) -> None:
    question = tuned.question(problem_of(m=1, n=64, k=256))
    row = tuned.Row(
        question=question,
        schedule=Schedule.parse("template=gemv"),
        device="a GPU",
        us=1.0,
        floor_us=5.0,
        trials=3,
        triton="3.6.0",
    )
    path = tuned.save("sm_90", [row])
    assert f"**MEASURING ERROR: {question} in 1.00 us beats its floor" in report.tuned_rows(path)
    assert impossible(replace(row, us=5.0)) == []


def test_no_committed_figure_beats_its_floor() -> None:
    """Nor does a tuned row that comes with the package."""
    files = [json.loads(path.read_text()) for path in Path("docs/results").glob("*.json")]
    assert sum(len(facts.get("rows", ())) for facts in files) > 50
    assert [each for facts in files for each in too_fast(facts)] == []
    rows = [row for path in Path("cache/tuned").glob("*.json") for row in tuned.load(path)]
    assert [each for row in rows for each in impossible(row)] == []


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli, ["bench", *arguments], standalone_mode=False)


def written(path: Path, **changes: float) -> Path:
    asked, times = {"k": 256, "n": 64, "format": "int4_g128", "dtype": "f16"}, {"us": 5.0, "cublas_us": 10.0, "floor_us": 4.0}
    rows = [
        asked
        | times
        | {"m": m, "spread": 0.02}
        | ({"floor_spread": 0.01} | changes if m == 8 else {})
        for m in (1, 8)
    ]  # fmt: skip
    path.write_text(json.dumps({"rows": rows}))
    return path


def test_what_became_slower_is_told_and_the_exit_status_is_1(tmp_path: Path) -> None:
    old, now = written(tmp_path / "old.json"), written(tmp_path / "now.json", us=5.5)
    done = run("--results", str(now), "--against", str(old))
    assert done.exit_code == 1
    assert done.output.splitlines() == [
        f"2 rows as in {old}, 1 slower by more than the noise of both runs",
        "8x256x64 int4_g128 f16: 1.38 floors, before 1.25: +10.0%, noise 6.0%",
    ]
    assert run("--results", str(old), "--against", str(now)).exit_code == 0, "faster is not worse"


def test_rows_that_are_gone_wrong_or_too_fast_are_told(tmp_path: Path) -> None:
    """A row that was wrong before is no news."""
    old = written(tmp_path / "old.json")
    for changes, line in (
        ({"m": 9}, "8x256x64 int4_g128 f16: not there any more"),
        ({"error": 0.9}, "8x256x64 int4_g128 f16: WRONG now, error 9.0e-01 of at most 3.0e-02"),
        ({"error": 2e-3, "error_limit": 1e-3}, "8x256x64 int4_g128 f16: WRONG now, error 2.0e-03 of at most 1.0e-03"),
        ({"equal_repeats": 0}, "8x256x64 int4_g128 f16: WRONG now, launches do not give the same bits"),
        ({"us": 1.0}, "MEASURING ERROR: 8x256x64 int4_g128 f16, w4gen in 1.00 us beats its floor of 4.00 us"),
    ):
        now = written(tmp_path / "now.json", **changes)
        done = run("--results", str(now), "--against", str(old))
        assert done.exit_code == 1
        count, told = done.output.splitlines()
        assert count.endswith(" 0 slower by more than the noise of both runs")
        assert told.startswith(line)
        assert "us" in changes or "m" in changes or run("--results", str(now), "--against", str(now)).exit_code == 0
    facts = json.loads(run("--results", str(now), "--against", str(now), "--json").output)
    assert len(facts["measuring_errors"]) == 1


def test_noise_of_both_runs_and_slower_machines_are_no_regressions(tmp_path: Path) -> None:
    old = written(tmp_path / "old.json")
    assert run("--results", str(written(tmp_path / "noisy.json", us=5.25)), "--against", str(old)).exit_code == 0
    slower = written(tmp_path / "slower.json", us=7.5, floor_us=6.0)
    assert [round(each.more, 6) for each in against(results(slower), old)] == [0, 0], "floors were slower, too"


def test_parts_of_an_ablation_are_compared_too(tmp_path: Path) -> None:
    ladder = {"m": 1, "k": 256, "n": 64, "format": "int4_g128", "dtype": "f16", "floor_us": 2.0}
    for name, us in (("old", 4.0), ("now", 5.0)):
        parts = [{"part": "layout", "us": us, "spread": 0.01}, {"part": "tuned", "why": "no row"}]
        (tmp_path / name).write_text(json.dumps({"ladders": [ladder | {"rows": parts}]}))
    (change,) = against(results(tmp_path / "now"), tmp_path / "old")
    assert (change.row, change.before, change.now, change.worse) == ("1x256x64 int4_g128 f16 layout", 2.0, 2.5, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is no file of results"), ("[]", "holds no rows with a time and a floor"), ('{"rows": []}', "holds no rows")],
)
def test_files_that_hold_no_run_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "it.json").write_text(text)
    with pytest.raises(W4Error, match=message):
        raise run("--against", str(tmp_path / "it.json")).exception
    with pytest.raises(W4Error, match="name its file by --against"):
        raise run("--results", str(tmp_path / "it.json")).exception


def test_runs_of_nothing_in_common_are_refused(tmp_path: Path) -> None:
    other = {"rows": [{"m": 3, "k": 8, "n": 8, "us": 1.0, "floor_us": 1.0}]}
    (tmp_path / "other.json").write_text(json.dumps(other))
    with pytest.raises(W4Error, match="has no row of the layers, M, formats and types measured now"):
        against(other, written(tmp_path / "old.json"))


def test_the_page_tells_of_peers(on_a_gpu: None, tmp_path: Path) -> None:
    where = dict.fromkeys(("device", "torch", "triton", "cuda", "date", "command"), "some")
    rows = [row(), row("nf4_g64")]
    (tmp_path / "it.json").write_text(json.dumps(where | {"method": compare.METHOD, "rows": rows}))
    page = report.section(tmp_path / "it.json")
    assert "| K → N | M | format | x | dequantize, matmul | tinygemm | gemlite | humming | bitsandbytes |" in page
    share = rows[0]["floor_us"] / 8.0
    assert f"8.00 · {share:.0%} · 1.25 · 30 |" in page
    assert "- gemlite takes 4-bit integers with a 16-bit scale for a group and no zero, not nf4_g64 (1 of 2 rows)" in page
    assert "MEASURING ERROR" not in page
