"""The cache under fire: many writers, writers killed at any byte, damaged files, folders that cannot be written, full disks.

Whatever is done to the folder, a build gives the right binary; damage is a miss, and is mended; nothing half-written ever has a
final name. A compile is replaced by one that takes no time and notes in a file that it ran; all around it is what runs otherwise.
"""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import w4gen
from w4gen import cache, paths, pipeline, toolchain, tuned
from w4gen.codegen.render import Kernel
from w4gen.ir.lower import lower
from w4gen.ir.problem import Problem
from w4gen.schedule.arch import ARCHES, arch

FACTS = {"registers": 32, "spills": 0, "shared_bytes": 16}
METADATA = {"target": {"arch": 80}, "shared": 16, "name": "gemv"}
FILES = {"json": json.dumps(METADATA).encode(), "cubin": bytes(range(256)), "facts": json.dumps(FACTS).encode()}
TARGET = ARCHES["sm_80"]


@pytest.fixture
def compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many compiles have run, in this process and those forked from it."""
    notes = tmp_path / "compiles"
    notes.write_text("")

    def compile(*_: object) -> dict[str, bytes]:
        with notes.open("a") as file:
            file.write("x")
        return FILES

    monkeypatch.setattr(toolchain, "_compile", compile)
    return lambda: len(notes.read_text())


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    return w4gen.compile("1x256x64", arch="sm_80")


def build(kernel: Kernel) -> dict[str, bytes]:
    (binary,) = toolchain.build(cache.store(kernel), TARGET).values()
    return binary.files


def folder_of(kernel: Kernel) -> Path:
    """Where the binary of a kernel is kept."""
    return cache.kernels() / cache.place(kernel.source, toolchain.key(kernel, kernel.pieces[0], TARGET))


def leftovers(folder: Path) -> list[Path]:
    return list(folder.rglob(".new-*"))


def in_child(run: Callable[[], object]) -> int:
    """Run in a forked process; its status as `os.waitpid` has it, 0 where it went well."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


def contend(kernel: Kernel, threads: int) -> None:
    """What one of the processes does: build one new key in several threads at once."""
    found: list[dict[str, bytes]] = []
    running = [threading.Thread(target=lambda: found.append(build(kernel))) for _ in range(threads)]
    for each in running:
        each.start()
    for each in running:
        each.join()
    if found != [FILES] * threads:
        raise SystemExit(1)


@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_eight_processes_of_four_threads_compile_a_new_key_once(
    rounds: int, kernel: Kernel, compiles: Callable[[], int], fresh_cache: Path
) -> None:
    fork = multiprocessing.get_context("fork")
    for turn in range(rounds):
        new = replace(kernel, source=f"{kernel.source}# {turn}\n")
        processes = [fork.Process(target=contend, args=(new, 4)) for _ in range(8)]
        for each in processes:
            each.start()
        for each in processes:
            each.join()
        assert [each.exitcode for each in processes] == [0] * 8
        assert compiles() == turn + 1
        assert build(new) == FILES
        assert cache.text_path(new).read_text() == new.source
    assert not leftovers(fresh_cache)


def test_without_a_lock_every_writer_gets_the_binary(
    kernel: Kernel, compiles: Callable[[], int], fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the file system has no locks."""

    def refused(*_: object, **__: object) -> None:
        raise NotImplementedError("no locks here")

    monkeypatch.setattr(cache.filelock.FileLock, "acquire", refused)
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=contend, args=(kernel, 4)) for _ in range(4)]
    for each in processes:
        each.start()
    for each in processes:
        each.join()
    assert [each.exitcode for each in processes] == [0] * 4
    assert not leftovers(fresh_cache)


def killed_at(byte: int, kernel: Kernel) -> int:
    """Build in a child that the system kills when it writes a file's byte of that number."""

    def run() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (byte, byte))
        cache.store(kernel)
        cache.publish(kernel.source, toolchain.key(kernel, kernel.pieces[0], TARGET), FILES)

    return in_child(run)


def test_a_writer_that_is_killed_at_any_byte_leaves_nothing_half(
    kernel: Kernel, compiles: Callable[[], int], fresh_cache: Path
) -> None:
    longest = len(kernel.source.encode())
    within_binary = [0, 1, 50, 150, 200, 255]
    for byte in [*within_binary, longest // 2, longest - 1]:
        if byte in within_binary:
            cache.store(kernel)  # so that the child gets on to the binary
        status = killed_at(byte, kernel)
        assert os.WTERMSIG(status) == signal.SIGXFSZ
        assert not folder_of(kernel).exists()
        path = cache.text_path(kernel)
        assert not path.exists() or path.read_text() == kernel.source
        path.unlink(missing_ok=True)
    assert leftovers(fresh_cache), "nobody can tidy up after having been killed"
    for path in leftovers(fresh_cache):
        os.utime(path, (time.time() - 2 * cache.ABANDONED,) * 2)
    assert build(kernel) == FILES
    assert not leftovers(fresh_cache), "the next writer does"


@pytest.mark.parametrize("when", range(4))
def test_a_writer_that_is_killed_at_a_rename_leaves_nothing_half(
    when: int, kernel: Kernel, compiles: Callable[[], int], fresh_cache: Path
) -> None:
    build(kernel)
    (folder_of(kernel) / "kernel.cubin").write_bytes(b"damaged, so that it is moved away first")
    cache.text_path(kernel).write_text("damaged")
    seen: list[int] = []
    rename = os.replace

    def dies(*call: object) -> None:
        if len(seen) == when:
            os._exit(9)
        seen.append(rename(*call))  # type: ignore[arg-type, func-returns-value]

    def run() -> None:
        os.replace = dies  # type: ignore[assignment]
        build(kernel)

    assert os.WEXITSTATUS(in_child(run)) == (9 if when < 3 else 0)
    assert build(kernel) == FILES
    assert build(kernel) == FILES
    assert compiles() == (3 if when in (1, 2) else 2), "the text comes before the compile"


SHAPES = ("[]", "{}", "null", "3", '"text"', "[[]]", '{"facts": 3}', '{"cubin": []}', '{"../x": "y"}', "[" * 100_000, "{")
DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "flipped": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 0x80]) + path.read_bytes()[1:]),
    "flipped at the end": lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
    "emptied": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir(), (path / "inside").write_text("")),
    "a link to nowhere": lambda path: (path.unlink(), path.symlink_to("nowhere")),
    **{f"JSON {shape[:12]}": (lambda path, shape=shape: path.write_text(shape)) for shape in SHAPES},  # type: ignore[misc]
}


@pytest.mark.parametrize("file", ["kernel.cubin", "kernel.facts", "kernel.json", "sums.json"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_binary_is_compiled_again_and_mended(
    damage: str, file: str, kernel: Kernel, compiles: Callable[[], int], fresh_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build(kernel)
    DAMAGE[damage](folder_of(kernel) / file)
    assert build(kernel) == FILES
    assert build(kernel) == FILES
    assert compiles() == 2
    assert not caplog.records
    assert not leftovers(fresh_cache)


@pytest.mark.parametrize("shape", ["[]", "{}", '{"registers": 1}', '{"registers": 1, "spills": 2, "shared_bytes": 3, "more": 4}'])
def test_facts_of_another_shape_are_a_miss_although_their_checksum_is_right(
    shape: str, kernel: Kernel, compiles: Callable[[], int], fresh_cache: Path
) -> None:
    build(kernel)
    other = FILES | {"facts": shape.encode()}
    (folder_of(kernel) / "kernel.facts").write_bytes(other["facts"])
    (folder_of(kernel) / "sums.json").write_bytes(cache.checksums(other))
    assert build(kernel) == FILES
    assert compiles() == 2


@pytest.mark.parametrize("damage", [*DAMAGE])
def test_a_damaged_text_is_written_again(damage: str, kernel: Kernel, fresh_cache: Path) -> None:
    DAMAGE[damage](cache.text_path(cache.store(kernel)))
    assert cache.text_path(cache.store(kernel)).read_text() == kernel.source
    assert not leftovers(fresh_cache)


def test_other_things_in_the_places_of_folders_are_replaced(
    kernel: Kernel, compiles: Callable[[], int], fresh_cache: Path
) -> None:
    for place in (folder_of(kernel), folder_of(kernel).parent):
        build(kernel)
        shutil.rmtree(place)
        place.write_text("a file")
        assert build(kernel) == build(kernel) == FILES
    lock = folder_of(kernel).with_name(folder_of(kernel).name + ".lock")
    shutil.rmtree(folder_of(kernel))
    lock.unlink(missing_ok=True)
    lock.mkdir()
    assert build(kernel) == FILES
    assert compiles() == 4


def test_what_lists_the_cache_survives_damage(kernel: Kernel, compiles: Callable[[], int], fresh_cache: Path) -> None:
    build(kernel)
    for damage in DAMAGE.values():
        damage(folder_of(kernel) / "kernel.json")
        cache.text_path(kernel).write_bytes(b"\xff\xfe")
        (entry,) = cache.entries()
        assert entry.damage() == ["kernel.py", folder_of(kernel).name]
        assert (entry.question, entry.targets) == ("unreadable", [])
        assert entry.nbytes >= 0
        shutil.rmtree(folder_of(kernel))
        build(kernel)


def test_a_folder_that_vanishes_between_finding_and_running_does_not_matter(
    kernel: Kernel, compiles: Callable[[], int], fresh_cache: Path
) -> None:
    found = build(kernel)
    shutil.rmtree(fresh_cache)
    assert found == FILES


def unprivileged() -> None:
    """Drop root's rights, which nothing is closed to."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)


def expect_memory(kernel: Kernel, warned: pytest.LogCaptureFixture) -> None:
    """A build works, twice, with one compile and one warning in all; else the process ends badly."""
    found = [build(kernel), build(kernel)]
    if found != [FILES, FILES] or len(warned.records) != 1:
        raise SystemExit(f"{found} {warned.text}")


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "w4gen")
    cache.closed.clear()
    return caplog


@pytest.mark.parametrize("mode", [0o555, 0o000])
def test_a_folder_that_is_read_only_or_another_users_is_compiled_around(
    mode: int, kernel: Kernel, compiles: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    warned: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    closed = tmp_path / "cache"
    closed.mkdir()
    for path in (tmp_path / "compiles", *tmp_path.parents[:-2], tmp_path):
        path.chmod(0o777)
    closed.chmod(mode)
    monkeypatch.setenv("W4GEN_CACHE", str(closed))

    def run() -> None:
        unprivileged()
        expect_memory(kernel, warned)

    assert in_child(run) == 0
    closed.chmod(0o755)
    assert compiles() == 1
    assert not list(closed.iterdir())


def test_what_one_user_wrote_others_can_read(kernel: Kernel, compiles: Callable[[], int], fresh_cache: Path) -> None:
    old = os.umask(0o022)
    try:
        build(kernel)
    finally:
        os.umask(old)
    kept = [path for path in folder_of(kernel).parent.rglob("*") if path.suffix != ".lock"]
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in kept)


def test_without_a_home_kernels_are_compiled_and_not_kept(
    kernel: Kernel, compiles: Callable[[], int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, warned: pytest.LogCaptureFixture
) -> None:
    """As for a user whom the system does not know."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    for asked in ("", "~", "~/kernels"):
        monkeypatch.setenv("W4GEN_CACHE", asked)
        monkeypatch.setattr(paths, "CHECKOUT", tmp_path)
        warned.clear()
        cache.closed.clear()
        expect_memory(kernel, warned)
        assert "set W4GEN_CACHE to a folder that can" in warned.text
    assert [path.name for path in tmp_path.iterdir()] == ["compiles"]


@pytest.mark.parametrize("name", ["with spaces", "schlüssel 鍵", "a'b\"c$d", "x" * 200, "kernels.d"])
def test_a_path_may_have_any_name(
    name: str, kernel: Kernel, compiles: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("W4GEN_CACHE", str(tmp_path / name))
    assert build(kernel) == build(kernel) == FILES
    assert compiles() == 1
    assert folder_of(kernel).is_relative_to(tmp_path / name)


def test_home_and_relative_paths_are_made_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for asked, expected in (("~", tmp_path), ("~/k", tmp_path / "k"), ("k", tmp_path / "k"), (" ~/k ", tmp_path / "k")):
        monkeypatch.setenv("W4GEN_CACHE", asked)
        assert paths.cache() == expected
    for asked in ("", "  "):
        monkeypatch.setenv("W4GEN_CACHE", asked)
        assert paths.cache() == paths.CHECKOUT / "cache"


CODES = ("ENOSPC", "EDQUOT", "EBUSY", "ESTALE", "ENOENT", "EROFS", "EIO", "EACCES")


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("where", ["rename", "write", "mkdir"])
def test_a_disk_that_refuses_costs_one_warning(
    where: str, code: str, kernel: Kernel, compiles: Callable[[], int], fresh_cache: Path, monkeypatch: pytest.MonkeyPatch,
    warned: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def refuse(*call: object, **_: object) -> None:
        raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))

    with monkeypatch.context() as patch:
        patch.setattr(*{"rename": (os, "replace"), "write": (Path, "write_bytes"), "mkdir": (Path, "mkdir")}[where], refuse)
        expect_memory(kernel, warned)
    assert compiles() == 1
    assert not leftovers(fresh_cache)
    assert not folder_of(kernel).exists()
    assert not cache.text_path(kernel).exists()


def test_a_disk_that_is_full_after_some_bytes_leaves_no_file(
    kernel: Kernel, compiles: Callable[[], int], fresh_cache: Path, warned: pytest.LogCaptureFixture
) -> None:
    def run() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        expect_memory(kernel, warned)

    assert in_child(run) == 0
    assert compiles() == 1
    assert not [path for path in fresh_cache.rglob("*") if path.is_file() and path.suffix != ".lock"]


def address(arch_name: str = "sm_90", changes: str = "", **asked: str) -> str:
    """Where the binary of a kernel is kept."""
    target = arch(arch_name)
    made = w4gen.compile(**{"shape": "64x1536x256", "format": "uint4_g128_z", **asked}, arch=arch_name)
    if changes:
        chosen = type(made.schedule).parse(f"{made.schedule} {changes}")
        made = pipeline.made(lower(Problem.parse(str(made.problem))), chosen, target)
    return cache.place(made.source, toolchain.key(made, made.pieces[0], target))


def test_whatever_changes_a_binary_changes_its_address(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    places = [
        address(),
        *(address(name) for name in ("sm_80", "sm_86", "sm_89", "sm_100", "sm_103", "sm_120", "sm_121", "gfx942")),
        address(dtype="bfloat16"),
        *(address(format=form) for form in ("uint4_g64_z", "uint4_g128_zf", "uint4_g128_m", "uint4_g128", "uint4_g128_z_f32")),
        *(address(shape=shape) for shape in ("64x1536x512", "64x3072x256", "32x1536x256", "1x1536x256")),
        *(address(changes=change) for change in ("stages=3", "stages=4", "maxnreg=128", "split_k=1")),
        *(address(shape="16x1536x256", changes=change) for change in ("warps=1", "warps=2", "warps=4")),
    ]
    for version in ("3.6.1", "3.7.0"):
        monkeypatch.setattr(toolchain, "version", lambda version=version: version)
        places.append(address())
    monkeypatch.undo()
    monkeypatch.setenv("W4GEN_CACHE", str(fresh_cache))
    assembler = tmp_path / "ptxas"
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(assembler))
    for at in (0, 1, 2):
        if at:
            assembler.write_text("another release")
            os.utime(assembler, (at, at))
        places.append(address())
    monkeypatch.setenv("PTXAS_OPTIONS", "-O1")
    places.append(address())
    assert len(set(places)) == len(places)


def test_binaries_of_sm_120_and_sm_121_are_apart_although_their_kernels_are_alike(kernel: Kernel) -> None:
    keys = {toolchain.key(kernel, kernel.pieces[0], arch(name)) for name in ("sm_120", "sm_121", "sm_100", "sm_103")}
    assert len(keys) == 4


def test_a_file_of_rows_that_cannot_be_read_is_told_once(fresh_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    tuned.path_of("sm_90").parent.mkdir(parents=True)
    tuned.path_of("sm_90").write_bytes(b"\xff{")
    with caplog.at_level(logging.WARNING, "w4gen"):
        for _ in range(3):
            w4gen.compile("1x1536x256", arch="sm_90")
    assert len(caplog.records) == 1
