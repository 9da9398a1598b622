"""Two stores on disk: kernels by content, and tuned schedules by question.

A kernel's address is the hash of its text, and a binary's the hash of everything that went into it: no edit of w4gen can
serve a stale one. Entries appear whole (a folder of files and their checksums, renamed into place); anything damaged is a miss.
A cache that cannot be written costs a warning and a compile from a temporary folder, never a failure.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from w4gen import paths
from w4gen.codegen.render import Kernel
from w4gen.errors import W4Error
from w4gen.ir.problem import Problem
from w4gen.schedule.arch import Arch
from w4gen.schedule.schedule import Schedule

log = logging.getLogger("w4gen")
_closed: set[Path] = set()
"""Folders that could not be written, each told once."""


def address(*parts: str) -> str:
    """sha256 of the parts, each with its length, so that no two lists of parts run together."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def kernels() -> Path:
    return paths.cache() / "kernels"


def _folder(source: str) -> Path:
    return kernels() / address(source)[:32]


def store(kernel: Kernel) -> Kernel:
    """Write the text under its own address, where it is not there yet; the kernel itself comes back."""
    path = text_path(kernel)
    if not path.is_file() or path.read_text() != kernel.source:
        with _tolerant():
            path.parent.mkdir(parents=True, exist_ok=True)
            _replace(path, kernel.source.encode())
    return kernel


def text_path(kernel: Kernel) -> Path:
    return _folder(kernel.source) / "kernel.py"


def find(source: str, key: str) -> dict[str, Path] | None:
    """The files of a binary by kind, or None where there is none or a checksum is wrong."""
    return _files(_folder(source) / key[:32])


def _files(folder: Path) -> dict[str, Path] | None:
    """The files of a binary's folder by kind, or None where one is missing or has another checksum."""
    try:
        sums = json.loads((folder / "sums.json").read_text())
        files = {kind: folder / f"kernel.{kind}" for kind in sums}
        whole = all(hashlib.sha256(files[kind].read_bytes()).hexdigest() == digest for kind, digest in sums.items())
        return files if whole and "facts" in files else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def publish(source: str, key: str, files: dict[str, bytes]) -> dict[str, Path]:
    """Put the files of a binary in place, all at once, and say where they are (a temporary folder where the cache is closed)."""
    final = _folder(source) / key[:32]
    sums = {kind: hashlib.sha256(data).hexdigest() for kind, data in files.items()}
    with _tolerant():
        final.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=final.parent))
        try:
            _fill(fresh, files, sums)
            if final.exists():  # damaged, or it would have been found
                shutil.rmtree(final, ignore_errors=True)
            os.replace(fresh, final)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        return {kind: final / f"kernel.{kind}" for kind in files}
    return _fill(Path(tempfile.mkdtemp(prefix="w4gen-")), files, sums)


def _fill(folder: Path, files: dict[str, bytes], sums: dict[str, str]) -> dict[str, Path]:
    for kind, data in files.items():
        (folder / f"kernel.{kind}").write_bytes(data)
    (folder / "sums.json").write_text(json.dumps(sums))
    return {kind: folder / f"kernel.{kind}" for kind in files}


@contextlib.contextmanager
def lock(source: str, key: str) -> Iterator[None]:
    """One compile of one key at a time, across processes; none where the cache cannot be written."""
    try:
        _folder(source).mkdir(parents=True, exist_ok=True)
        held = filelock.FileLock(str(_folder(source) / f"{key[:32]}.lock"))
        held.acquire(timeout=120)
    except (OSError, filelock.Timeout):
        yield
        return
    try:
        yield
    finally:
        held.release()


@contextlib.contextmanager
def _tolerant() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if kernels() not in _closed:
            _closed.add(kernels())
            log.warning("kernels are not kept, %s cannot be written (%s): set W4GEN_CACHE to a folder that can", kernels(), error)


def _replace(path: Path, data: bytes) -> None:
    handle, fresh = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(fresh, path)
    finally:
        Path(fresh).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Entry:
    """One kernel on disk: its folder, named by the hash of the text, holds the text and a folder for each binary."""

    folder: Path

    @property
    def question(self) -> str:
        """What the kernel answers, as the text's first line says it."""
        return self._header().partition(" · template=")[0]

    @property
    def schedule(self) -> str:
        """How, as the text's first line says it."""
        return "".join(self._header().partition("template=")[1:])

    def _header(self) -> str:
        with contextlib.suppress(OSError, UnicodeDecodeError), (self.folder / "kernel.py").open() as file:
            return file.readline().removeprefix("# ").strip()
        return "unreadable"

    @property
    def binaries(self) -> list[Path]:
        """The folders of its binaries."""
        return sorted(path for path in self.folder.iterdir() if path.is_dir() and not path.name.startswith("."))

    @property
    def targets(self) -> list[str]:
        """What its binaries run on: `sm_90`, `gfx942`."""
        found = set()
        for folder in self.binaries:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                arch = json.loads((folder / "kernel.json").read_text())["target"]["arch"]
                found.add(f"sm_{arch}" if isinstance(arch, int) else arch)
        return sorted(found)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def damage(self) -> list[str]:
        """What does not have the hash that it should have, by path in the folder; such files are never used."""
        try:
            whole = _folder((self.folder / "kernel.py").read_text()).name == self.folder.name
        except (OSError, UnicodeDecodeError):
            whole = False
        return ["kernel.py"] * (not whole) + [path.name for path in self.binaries if _files(path) is None]

    def remove(self) -> None:
        """Remove the folder, or only the link where it is one. Raises `W4Error` where it cannot be removed."""
        try:
            self.folder.unlink() if self.folder.is_symlink() else shutil.rmtree(self.folder)
        except OSError as error:
            raise W4Error(f"{self.folder} cannot be removed: {error}") from error


def entries() -> list[Entry]:
    """The kernels on disk, by name. Anything else in the folder is not ours, and no entry."""
    folder = kernels()
    found = folder.iterdir() if folder.is_dir() else ()
    return [Entry(path) for path in sorted(found) if re.fullmatch("[0-9a-f]{32}", path.name) and path.is_dir()]


def question(problem: Problem) -> str:
    """What a tuned row answers."""
    sizes = f"m={problem.m[0]}..{problem.m[1]} n={problem.n} k={problem.k}"
    return f"{sizes} {problem.format} {problem.x}->{problem.y} {problem.epilogue}".rstrip()


def tuned(problem: Problem, arch: Arch) -> Schedule | None:
    """The stored winner for a question, or None. A row that cannot be read is skipped with a warning."""
    for folder in dict.fromkeys((paths.cache(), paths.shipped())):
        path = folder / "tuned" / f"{arch.name}.json"
        try:
            rows: dict[str, Any] = json.loads(path.read_text())["rows"]
            if question(problem) in rows:
                return Schedule.parse(rows[question(problem)]["schedule"])
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError, KeyError, TypeError, W4Error) as error:
            log.warning("%s is not a file of tuned schedules (%s): remove it or tune again", path, error)
    return None
