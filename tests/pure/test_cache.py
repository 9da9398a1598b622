"""Kernels by content, binaries by everything that went into them, tuned schedules by question; nothing stale, nothing half."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import pytest

import w4gen
from w4gen import cache, knobs, paths, toolchain, tuned
from w4gen.api import problem_of
from w4gen.errors import W4Error
from w4gen.schedule.schedule import Schedule

FILES = {"facts": b"{}", "cubin": bytes(range(256))}


def binary(folder: Path) -> Path:
    """The folder of the one binary of these tests."""
    return folder / "kernels" / cache.place("text", "a" * 64)


def made(*shape: str) -> w4gen.compile:  # type: ignore[valid-type]
    return w4gen.compile(*shape, arch="portable")


def test_the_address_of_parts_tells_them_apart() -> None:
    every = [("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ("", "abc"), ("text", "80", "3.6"), ("text", "90", "3.6")]
    assert len({cache.address(*parts) for parts in every}) == len(every)
    assert cache.address("a", "b") == cache.address("a", "b")


def test_a_kernel_is_stored_under_the_hash_of_its_text(fresh_cache: Path) -> None:
    kernel, other = made("1x256x64"), made("1x256x65")
    assert cache.text_path(kernel).read_text() == kernel.source
    assert cache.text_path(kernel).is_relative_to(fresh_cache / "kernels")
    assert cache.text_path(kernel) != cache.text_path(other)
    assert cache.text_path(kernel) == cache.text_path(made("1x256x64"))


def test_a_changed_text_in_the_cache_is_mended(fresh_cache: Path) -> None:
    kernel = made("1x256x64")
    cache.text_path(kernel).write_text(kernel.source[: len(kernel.source) // 2])
    assert made("1x256x64").source == kernel.source == cache.text_path(kernel).read_text()


def test_what_is_published_is_found(fresh_cache: Path) -> None:
    assert cache.find("text", "a" * 64) is None
    cache.publish("text", "a" * 64, FILES)
    assert cache.find("text", "a" * 64) == FILES
    assert cache.find("text", "b" * 64) is None, "another target, compiler or option"
    assert cache.find("texts", "a" * 64) is None, "another text"


def test_a_binary_is_never_without_its_text(fresh_cache: Path) -> None:
    """A rendered file that is run alone builds a kernel whose text nobody stored."""
    cache.publish("# a question · template=gemv", "a" * 64, FILES)
    (entry,) = cache.entries()
    assert (entry.question, entry.damage()) == ("a question", [])


@pytest.mark.parametrize("kind", ["cubin", "facts", "sums"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "gone"])
def test_a_damaged_binary_is_a_miss_and_can_be_published_again(kind: str, damage: str, fresh_cache: Path) -> None:
    cache.publish("text", "a" * 64, FILES)
    path = binary(fresh_cache) / ("sums.json" if kind == "sums" else f"kernel.{kind}")
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"truncated": data[:-1], "flipped": bytes([data[0] ^ 1]) + data[1:], "empty": b""}[damage])
    assert cache.find("text", "a" * 64) is None
    cache.publish("text", "a" * 64, FILES)
    assert cache.find("text", "a" * 64) == FILES


@pytest.mark.parametrize("sums", ["[]", "{}", "null", '{"cubin": 3}', "3"])
def test_checksums_that_make_no_sense_are_a_miss(sums: str, fresh_cache: Path) -> None:
    cache.publish("text", "a" * 64, FILES)
    (binary(fresh_cache) / "sums.json").write_text(sums)
    assert cache.find("text", "a" * 64) is None


def test_publishing_leaves_no_temporary_files(fresh_cache: Path) -> None:
    cache.publish("text", "a" * 64, FILES)
    cache.publish("text", "a" * 64, FILES)
    made("1x256x64")
    names = [path.name for path in fresh_cache.rglob("*")]
    assert names
    assert not [name for name in names if name.startswith(".")]


def test_a_failed_publish_leaves_nothing(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("power cut")

    monkeypatch.setattr(cache, "checksums", broken)
    with pytest.raises(RuntimeError):
        cache.publish("text", "a" * 64, FILES)
    assert cache.find("text", "a" * 64) is None
    assert not [path for path in fresh_cache.rglob("*") if path.name.startswith(".new-")]


def test_many_writers_of_one_entry_leave_one_whole_entry(fresh_cache: Path) -> None:
    threads = [threading.Thread(target=cache.publish, args=("text", "a" * 64, FILES)) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert cache.find("text", "a" * 64) == FILES
    assert not list(fresh_cache.rglob(".new-*"))


@pytest.fixture
def closed_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that nobody, not even root, can write: below a regular file."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("W4GEN_CACHE", str(tmp_path / "file" / "cache"))
    return tmp_path / "file" / "cache"


def test_a_cache_that_cannot_be_written_costs_one_warning(closed_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "w4gen"):
        kernel = made("1x256x64")
    assert "def gemv" in kernel.source
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cannot be written" in caplog.text
    assert str(closed_cache) in caplog.text
    assert "set W4GEN_CACHE to a folder that can" in caplog.text


def test_a_binary_that_cannot_be_kept_is_still_there_to_run(closed_cache: Path) -> None:
    with cache.lock("text", "a" * 64):
        cache.publish("text", "a" * 64, FILES)
    assert cache.find("text", "a" * 64) == FILES


def test_a_lock_is_held_by_one(fresh_cache: Path) -> None:
    order: list[str] = []

    def second() -> None:
        with cache.lock("text", "a" * 64):
            order.append("second")

    with cache.lock("text", "a" * 64):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(timeout=0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def tune(folder: Path, rows: object, arch: str = "sm_90") -> None:
    (folder / "tuned").mkdir(parents=True)
    (folder / "tuned" / f"{arch}.json").write_text(rows if isinstance(rows, str) else json.dumps({"rows": rows}))


def row(schedule: str, **more: object) -> list[dict[str, object]]:
    return [{"question": tuned.question(problem_of(m=1, n=256, k=1536)), "schedule": schedule, **more}]


HALF = "template=gemv_half block_n=16 block_k=128 unit=halves"


def test_a_tuned_schedule_is_used(fresh_cache: Path) -> None:
    chosen = f"{HALF} warps=2 overlap=1"
    before = w4gen.compile("1x1536x256", arch="sm_90")
    tune(fresh_cache, row(chosen))
    after = w4gen.compile("1x1536x256", arch="sm_90")
    assert str(after.schedule) == str(Schedule.parse(chosen)) != str(before.schedule)
    assert "WARPS = gl.constexpr(2)" in after.source


def test_a_tuned_schedule_of_a_fast_template_is_used_with_its_triton_only(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gluon changes between releases, and no interpreter runs it."""
    tune(fresh_cache, row(f"{HALF} warps=2 overlap=1"))
    monkeypatch.setattr(toolchain, "version", lambda: "3.7.0")
    assert w4gen.compile("1x1536x256", arch="sm_90").name == "gemm"
    monkeypatch.undo()
    monkeypatch.setenv("W4GEN_CACHE", str(fresh_cache))
    assert w4gen.compile("1x1536x256", arch="sm_90").name == "gemv_half"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert w4gen.compile("1x1536x256", arch="sm_90").name == "gemm"


@pytest.mark.parametrize(
    "other", [{"shape": "1x1536x257"}, {"shape": "2x1536x256"}, {"format": "int4_g64"}, {"arch": "sm_80"}, {"dtype": "bfloat16"}]
)
def test_a_tuned_schedule_answers_its_own_question_only(other: dict[str, str], fresh_cache: Path) -> None:
    asked = {"shape": "1x1536x256", "format": "int4_g128", "arch": "sm_90", "dtype": "float16", **other}
    before = w4gen.compile(**asked).schedule
    tune(fresh_cache, row(f"{HALF} warps=2 overlap=1"))
    assert w4gen.compile(**asked).schedule == before


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (row("template=gemv_half block_n=16 block_k=48 unit=halves"), "does not hold any more"),
        (row("template=gemv block_n=4 block_k=1024"), "does not hold any more"),
        (row(f"{HALF} warps=64"), "does not hold any more"),
        (row("template=gemv colour=3"), "rows passed over: 1"),
        (row("template=gemv block_n=0"), "rows passed over: 1"),
        ("{", "is not a file of tuned schedules"),
        ("[]", "is not a file of tuned schedules"),
        ([], None),
        ([3], "is not a file of tuned schedules"),
        (row(3), "is not a file of tuned schedules"),
        (row(HALF, us="fast"), "is not a file of tuned schedules"),
        ({"": 3}, "is not a file of tuned schedules"),
    ],
)
def test_a_tuned_row_that_does_not_hold_is_left_out_with_a_warning(
    rows: object, message: str | None, fresh_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = w4gen.compile("1x1536x256", arch="sm_90")
    tune(fresh_cache, rows)
    with caplog.at_level(logging.WARNING, "w4gen"):
        assert w4gen.compile("1x1536x256", arch="sm_90").source == before.source
    assert len(caplog.records) == (message is not None)
    assert (message or "") in caplog.text


@pytest.mark.parametrize("schedule", [f"{HALF} vector=4", HALF.replace("gemv_half", "gemm")])
def test_a_tuned_row_that_the_template_cannot_render_is_left_out_with_a_warning(
    schedule: str, fresh_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A legal program without a text for it: the rules answer."""
    before = w4gen.compile("1x1536x256", arch="sm_90")
    tune(fresh_cache, row(schedule))
    with caplog.at_level(logging.WARNING, "w4gen"):
        assert w4gen.compile("1x1536x256", arch="sm_90").source == before.source
    assert len(caplog.records) == 1


def test_the_question_tells_formats_of_one_label_apart() -> None:
    """Two formats that are called alike but mean different things must not share a tuned row."""
    mine = w4gen.Format("int4", bits=4, origin=-7.0)
    codebook = w4gen.Format("int4", bits=4, codebook=tuple(range(16)))
    questions = {tuned.question(problem_of(m=1, n=256, k=1536, format=form)) for form in ("int4_g128", mine, codebook)}
    assert len(questions) == 3


def test_the_cache_is_where_the_knob_says(fresh_cache: Path) -> None:
    assert paths.cache() == fresh_cache


def test_templates_are_found() -> None:
    assert (paths.templates() / "gemv.py.jinja").is_file()


@pytest.mark.parametrize("text", ["yes", "-1", "1.5"])
def test_a_knob_that_is_no_number_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("W4GEN_STRICT", text)
    with pytest.raises(W4Error, match=f"W4GEN_STRICT='{text}' is not a whole number"):
        knobs.STRICT.number()


def test_knobs_are_few_named_and_described() -> None:
    assert len(knobs.ALL) <= 8
    assert all(knob.name.startswith("W4GEN_") and knob.sentence for knob in knobs.ALL)


def test_debug_tells_the_choice(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for level in range(5):
        monkeypatch.setenv("W4GEN_DEBUG", str(level))
        kernel = w4gen.compile("1x1536x256", arch="sm_90")
        said.append(capsys.readouterr().err)
    assert said[0] == ""
    assert str(kernel.schedule) in said[1]
    assert "offline" in said[3]
    assert kernel.source in said[4]
