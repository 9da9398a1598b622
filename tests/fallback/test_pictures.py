"""Pictures and the page, of the results that are committed and of made-up ones."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from w4gen.bench import pictures
from w4gen.bench.page import devices, page, runs
from w4gen.cli import cli
from w4gen.errors import W4Error

ROOT = Path(__file__).parent.parent.parent
EVERY = sorted((ROOT / "docs" / "results").glob("*.json"))
RESULTS = [ROOT / "docs" / "results" / f"{name}-h200.json" for name in ("decode", "bf16", "end-to-end-qwen2.5-1.5b")]
WHERE = {"device": "a GPU", "date": "today", "torch": "2", "triton": "3", "cuda": "13", "command": "python -m w4gen.cli bench "}


def row(m: int, us: float, cublas: float, n: int = 4096, **more: Any) -> dict[str, Any]:
    asked = {"m": m, "k": 4096, "n": n, "format": "int4_g128", "dtype": "f16", "bytes": 4096 * n * 33 // 64}
    checked = {"floor_us": 2.0, "spread": 0.01, "error": 2e-4, "equal_repeats": 40}
    return asked | checked | {"us": us, "cublas_us": cublas} | more


def comparison(*rows: dict[str, Any]) -> dict[str, Any]:
    return WHERE | {"rows": list(rows)}


PEERS = [{"name": "gemlite", "us": 5.0, "spread": 0.01, "error": 1e-3, "first_s": 9.0}, {"name": "humming", "why": "is not here"}]
RUN = comparison(row(1, 4.0, 13.0, others=PEERS), row(8, 4.5, 13.5), row(64, 9.0, 12.0), row(1, 3.0, 6.0, n=256))
LAYER = {
    "count": 28, "m": 1, "k": 64, "n": 64, "stored": "int4_g128", "bytes": 2, "us": 4.0, "spread": 0.0, "event_us": 5.0,
    "host_us": 9.0, "dense_us": 5.0, "floor_us": 3.0, "gain": 1.05, "tax": 0.8,
}  # fmt: skip
PHASE = {
    "step_us": 900.0, "dense_step_us": 999.0, "kernels": 50,
    "layers": [LAYER | {"name": "model.layers.*.mlp.up_proj", "share": 0.25}, LAYER | {"name": "lm_head", "share": 0.4}],
}  # fmt: skip
PROFILE = WHERE | {
    "command": "python -m w4gen.cli profile x", "model": "some/config.json", "format": "int4_g128", "quantizer": "w4gen",
    "dtype": "float16", "prompt": 9,
    "phases": {"decode": PHASE, "prefill": PHASE},
}  # fmt: skip


def machine(**ceilings: float) -> dict[str, Any]:
    names = {"read": "read", "matrix": "matrix f16, 8192", "decode": "decode int4_g128 to f16"}
    told = {"unit": "x", "spread": 0.0, "method": "so"}
    figures = [
        {"name": names[name], "value": value, "of": "int4_g128" * (name == "decode")} | told for name, value in ceilings.items()
    ]
    sizes = {"sms": 1, "l2_mb": 1.0, "memory_gb": 1.0, "took_s": 1.0, "command": "python -m w4gen.cli roofline "}
    return WHERE | sizes | {"figures": figures}


def test_everyone_who_answered_is_a_line_and_who_did_not_is_none() -> None:
    found = pictures.lines(sorted(pictures.forward(RUN)[:3], key=lambda each: each["m"]))
    assert found["w4gen"] == [(1, 4.0), (8, 4.5), (64, 9.0)]
    assert found["cuBLAS"][-1] == (64, 12.0)
    assert found["gemlite"] == [(1, 5.0)]
    assert "humming" not in found


NONE: dict[str, Any] = {"figures": []}


def test_a_floor_is_reading_or_multiplying_whichever_takes_longer() -> None:
    rows = RUN["rows"]
    roof = pictures.Roof.over(rows, rows, machine(read=4600.0, matrix=700.0, decode=9000.0))
    assert roof.floor_us(row(1, 4.0, 13.0)) == 2.0
    assert roof.floor_us(row(4096, 200.0, 200.0)) == pytest.approx(2 * 4096**3 / 700e6)
    assert (roof.read, roof.matrix, roof.decode) == (4600.0, 700.0, pytest.approx(9000 * 33 / 64))


def test_no_point_is_its_own_ceiling() -> None:
    """Without large matmuls a floor is that of reading; with them, all of the machine's count and not those of a format."""
    few = [row(16, 3.2, 9.0), row(256, 20.0, 21.0)]
    without = pictures.Roof.over(few, few, NONE)
    assert without.read == pytest.approx(4096 * 4096 * 33 / 64 / 2.0 / 1e3)
    assert (without.matrix, without.decode) == (None, None)
    assert without.floor_us(few[0]) / few[0]["us"] == pytest.approx(2.0 / 3.2)
    large = [*few, row(512, 40.0, 30.0, format="nf4_g64")]
    assert pictures.Roof.over(few, large, NONE).matrix == pytest.approx(2 * 512 * 4096**2 / 30.0 / 1e6)
    seldom = pictures.Roof.over(few, large, machine(read=4600.0, matrix=400.0))
    assert seldom.matrix == pytest.approx(573, abs=1), "what was reached is below the ceiling"


def test_what_is_not_known_is_no_ceiling_of_a_picture() -> None:
    pytest.importorskip("matplotlib")
    heat, roofline, _ = pictures.drawn([comparison(row(1, 4.0, 13.0), row(8, 4.0, 13.0), row(16, 4.0, 13.0))])
    legend = [each.get_text() for each in roofline.figure.axes[0].get_legend().get_texts()]
    assert legend[-1] == "multiplying: not measured"
    assert [text.get_text() for text in heat.figure.axes[0].texts] == ["50%"] * 3
    assert heat.shows == "How near a time is to its floor: only reading the weight."


def test_the_heat_of_a_committed_file_is_the_share_that_its_table_tells() -> None:
    """Up to 16 rows nothing multiplies for as long as it reads."""
    pytest.importorskip("matplotlib")
    found = json.loads((ROOT / "docs" / "results" / "formats-h200.json").read_text())
    told = {f"{each['floor_us'] / each['us']:.0%}" for each in found["rows"] if each["format"] == "uint4_g128_z"}
    (axes,) = next(each.figure.axes for each in pictures.drawn([found]) if each.name == "floor-nvidia-h200-f16")
    y = [each.get_text() for each in axes.get_yticklabels()].index("uint4_g128_z  8192 → 28672")
    assert {text.get_text() for text in axes.texts if text.get_position()[1] == y} == told


def test_pictures_of_made_up_runs_say_what_they_hold() -> None:
    pytest.importorskip("matplotlib")
    drawn = {each.name: each for each in pictures.drawn([RUN, machine(read=4600.0, matrix=700.0, decode=9000.0), PROFILE])}
    names = [f"{kind}-a-gpu-int4-g128-f16" for kind in ("roofline", "time")]
    assert list(drawn) == ["layers-config-json-int4-g128-w4gen", "floor-a-gpu-f16", *names]
    layers, heat, roofline, time = drawn.values()
    (axes,) = roofline.figure.axes
    legend = [each.get_text() for each in axes.get_legend().get_texts()]
    assert legend == ["cuBLAS", "w4gen", "reading: 4,600 GB/s", "decoding: 4,641 GB/s", "multiplying: 700 TFLOP/s"]
    assert roofline.shows.endswith("ceilings: reading as measured on this machine, multiplying as its fastest matmul.")
    points = axes.collections[1].get_offsets()
    assert [float(each) for each in points[0]] == pytest.approx(
        [2 * 4096**2 / (4096**2 * 33 // 64 + 4 * 4096), 2 * 4096**2 / 4e6]
    )
    large, small = time.figure.axes
    assert {"2", "5", "10"} <= {each.get_text() for each in large.get_yticklabels()}, "few decades have numbers between"
    assert [large.get_title(), small.get_title()] == ["4096 → 4096", "4096 → 256"]
    assert {line.get_label(): len(line.get_xdata()) for line in large.get_lines()} == {
        "w4gen": 3,
        "cuBLAS": 3,
        "floor": 3,
        "gemlite": 1,
    }
    cells = [text.get_text() for text in heat.figure.axes[0].texts]
    assert cells == ["50%", "44%", "34%", "67%"], "64 rows are bound by multiplying"
    assert [each.get_text() for each in layers.figure.axes[0].get_yticklabels()] == ["lm_head", "mlp.up_proj"]
    widths = [bar.get_width() for bar in layers.figure.axes[0].patches]
    assert widths == pytest.approx([0.3, 0.1875, 0.1, 0.0625])


def test_points_of_two_runs_are_not_joined() -> None:
    pytest.importorskip("matplotlib")
    two = comparison(row(1, 4.0, 13.0)), comparison(row(8, 4.5, 13.5), row(64, 9.0, 12.0))
    (axes,) = next(each for each in pictures.drawn(two) if each.name.startswith("time")).figure.axes
    assert [len(line.get_xdata()) for line in axes.get_lines() if line.get_label() == "w4gen"] == [1, 2]


def test_without_matplotlib_the_way_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(W4Error, match=r"matplotlib, which draws, is not to be had .*: pip install 'w4gen\[bench\]'"):
        list(pictures.drawn([RUN]))


class Read(HTMLParser):
    """What a page refers to, and its tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.alts: list[str] = []
        self.meta: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        self.alts += [named["alt"] or ""] if tag == "img" else []
        if tag == "meta" and "name" in named:
            self.meta[named["name"] or ""] = named.get("content") or ""


def test_the_page_of_the_committed_results_needs_no_other_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    html = tmp_path / "out" / "report.html"
    arguments = ["report", *map(str, RESULTS), "--html", str(html), "--png", str(tmp_path / "png")]
    done = CliRunner().invoke(cli, arguments, standalone_mode=False)
    assert done.exception is None
    assert re.fullmatch(rf"\d+ pictures of {len(RESULTS)} files\n", done.output)
    read = Read(html.read_text())
    assert read.meta["viewport"] == "width=device-width, initial-scale=1"
    assert not {"script", "link", "iframe"} & set(read.tags)
    assert len(read.sources) == len(list((tmp_path / "png").glob("*.png"))) == 6
    for source in read.sources:
        kind, _, data = source.partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data)[:8] == b"\x89PNG\r\n\x1a\n"
    assert all(len(alt) > 30 for alt in read.alts)
    assert read.tags.count("table") >= 4
    assert "× cuBLAS" in html.read_text()


def test_what_was_drawn_is_told_as_json(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "it.json").write_text(json.dumps(PROFILE))
    asked = ["report", str(tmp_path / "it.json"), "--png", str(tmp_path / "png"), "--json"]
    (told,) = json.loads(CliRunner().invoke(cli, asked, standalone_mode=False).output)
    assert (tmp_path / "png" / f"{told['name']}.png").stat().st_size > 1000
    assert told["title"].startswith("Linear layers of config.json, int4_g128 by w4gen")


def test_tables_are_there_and_markup_is_text() -> None:
    files = {Path("mine.json"): comparison(row(1, 4.0, 13.0, others=PEERS)) | {"device": "<b>a GPU"}}
    text = page(files, [])
    assert "&lt;b&gt;a GPU" in text
    assert "<b>a GPU" not in text


def test_the_page_begins_with_the_gpus_and_their_dates() -> None:
    """What was worked out without one is not among them, unless there is nothing else."""
    runs = {Path(str(place)): {"device": device, "date": date} for place, (device, date) in enumerate([
        ("H200", "day 2"), ("cpu", "day 3"), ("H200", "day 1"), ("B200", "day 1"), ("H200", "day 2")
    ])}  # fmt: skip
    assert devices(runs) == "H200, day 1, day 2; B200, day 1"
    assert devices({Path("x"): {"facts": {"device": "cpu", "date": "day 3"}}}) == "cpu, day 3"


def test_every_committed_file_of_results_is_on_the_page() -> None:
    read = page(runs(EVERY), [])
    assert all(path.stem in read for path in EVERY)
    assert "perplexity" in read


def test_a_curve_is_drawn_with_its_steps(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "curve.json"
    CliRunner().invoke(
        cli, ["curve", "--shape", "512x256", "--arch", "sm_90", "--m", "1,2,9", "--out", str(out)], standalone_mode=False
    )
    facts = json.loads(out.read_text())
    (made,) = pictures.drawn([facts])
    assert made.shows == "Microseconds of 512 → 256 × 1, predicted on sm_90, H200 SXM, by its data sheet."
    lines = made.figure.axes[0].lines
    part = facts["parts"][0] | {"floor_us": 2.5}
    (measured,) = pictures.drawn([facts | {"parts": [part, part | {"count": 3}]}])
    assert "only reading the weights: 10 µs" in [line.get_label() for line in measured.figure.axes[0].lines]
    assert list(lines[0].get_ydata()) == facts["total_us"]
    assert sorted(line.get_xdata()[0] for line in lines[1:]) == [step["m"] for step in facts["steps"]] == [2, 9]


@pytest.mark.parametrize("text", ["[]", "{}", "{"])
def test_what_holds_no_results_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "it.json").write_text(text)
    with pytest.raises(W4Error, match="is no file of results, as it does not name the device: give JSON"):
        runs([tmp_path / "it.json"])
    with pytest.raises(W4Error, match=r"not-there\.json cannot be read \(No such file or directory\): give JSON"):
        runs([tmp_path / "not-there.json"])
    with pytest.raises(W4Error, match="a report is written to a file: name a page by --html FILE"):
        raise CliRunner().invoke(cli, ["report", str(tmp_path / "it.json")], standalone_mode=False).exception  # type: ignore[misc]


CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_the_page_reads_on_a_phone(tmp_path: Path) -> None:
    """Rendered 390 dots wide, as a phone does: nothing is wider than the page."""
    pytest.importorskip("matplotlib")
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    found = runs([tmp_path / "run.json"])
    text = page(found, list(pictures.drawn(list(found.values()))))
    probe = "<script>document.title = document.documentElement.scrollWidth + ' of ' + innerWidth</script>"
    (tmp_path / "page.html").write_text(text.replace("<details>", "<details open>").replace("</body>", f"{probe}</body>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=500,900", "--dump-dom"]
    asked = [str(CHROMIUM), *options, f"--user-data-dir={tmp_path}/profile", (tmp_path / "page.html").as_uri()]
    done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=300)
    wide, _, window = re.search(r"<title>(\d+) of (\d+)</title>", done.stdout).group(0)[7:-8].partition(" of ")  # type: ignore[union-attr]
    assert int(wide) <= int(window) <= 500
