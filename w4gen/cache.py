"""Kernels on disk, by content.

A kernel's address is the hash of its text, and a binary's the hash of everything that went into it: no edit of w4gen can
serve a stale one. Entries appear whole (a folder of files and their checksums, renamed into place) and are read into memory at
once; anything damaged is a miss, and is replaced. A cache that cannot be written costs a warning and a compile, never a failure.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import filelock

from w4gen import bundle, paths
from w4gen.codegen.render import Kernel
from w4gen.errors import W4Error

log = logging.getLogger("w4gen")
closed: set[Path] = set()
"""Folders that could not be written, each told once."""

_unkept: dict[Path, dict[str, bytes]] = {}
"""Binaries that could not be written, by the folder they belong in, for the rest of this process."""

ABANDONED = 3600
"""Seconds after which a temporary file is one that a killed process left."""


def address(*parts: str) -> str:
    """sha256 of the parts, each with its length, so that no two lists of parts run together."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def kernels() -> Path:
    return paths.cache() / "kernels"


def place(source: str, key: str = "") -> str:
    """Where a text is kept (with a key: a binary of it), below the folder of kernels."""
    return "/".join(part[:32] for part in (address(source), key) if part)


def text_path(kernel: Kernel) -> Path:
    return kernels() / place(kernel.source) / "kernel.py"


def store(kernel: Kernel) -> Kernel:
    """Write the text under its own address, where it is not there yet; the kernel itself comes back."""
    if bundle.opened().get(f"kernels/{place(kernel.source)}/kernel.py") != kernel.source.encode():
        write(kernel.source)
    return kernel


def write(source: str) -> None:
    """Write a text under its own address, where it is not there yet."""
    path, data = kernels() / place(source) / "kernel.py", source.encode()
    with _tolerant():
        if not _holds(path, data):
            _room(path.parent)
            replace(path, data)


def _holds(path: Path, data: bytes) -> bool:
    """Whether a file has just these bytes."""
    with contextlib.suppress(OSError):
        return path.read_bytes() == data
    return False


def find(source: str, key: str) -> dict[str, bytes] | None:
    """The files of a binary by kind, or None where none is whole: of the bundle in use, the folder, this process."""
    where = place(source, key)
    bundled = bundle.opened()
    return (
        whole(lambda name: bundled[f"kernels/{where}/{name}"])
        or whole(lambda name: (kernels() / where / name).read_bytes())
        or _unkept.get(kernels() / where)
    )


def whole(read: Callable[[str], bytes]) -> dict[str, bytes] | None:
    """The files of a binary by kind, read by name, or None where one is missing or has another checksum."""
    try:
        sums = json.loads(read("sums.json"))
        files = {kind: read(f"kernel.{kind}") for kind in sums if re.fullmatch("[a-z]+", kind)}
        right = all(hashlib.sha256(files[kind]).hexdigest() == digest for kind, digest in sums.items())
        return files if right and "facts" in files else None
    except (OSError, LookupError, ValueError, TypeError, AttributeError, RecursionError):
        return None


def checksums(files: dict[str, bytes]) -> bytes:
    """What `sums.json` says of the files of a binary."""
    return json.dumps({kind: hashlib.sha256(data).hexdigest() for kind, data in files.items()}).encode()


def publish(source: str, key: str, files: dict[str, bytes]) -> None:
    """Put the files of a binary in place, all at once, beside its text; where the cache is closed this process remembers them."""
    write(source)
    final = kernels() / place(source, key)
    with _tolerant():
        _room(final.parent)
        _sweep(final.parent)
        fresh = _fresh(final.parent)
        try:
            fresh.mkdir()
            for kind, data in files.items():
                (fresh / f"kernel.{kind}").write_bytes(data)
            (fresh / "sums.json").write_bytes(checksums(files))
            _take_place(fresh, final)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        return
    _unkept[final] = files


def _take_place(fresh: Path, final: Path) -> None:
    """Rename a folder to its name; what is there already stays where it is whole, as another writer put it there."""
    if whole(lambda name: (final / name).read_bytes()) is not None:
        return
    if os.path.lexists(final):
        aside = _fresh(final.parent)
        os.replace(final, aside)
        shutil.rmtree(aside, ignore_errors=True) if aside.is_dir() and not aside.is_symlink() else aside.unlink()
    try:
        os.replace(fresh, final)
    except OSError:
        if whole(lambda name: (final / name).read_bytes()) is None:  # nobody was faster
            raise


def _fresh(folder: Path) -> Path:
    """A name in a folder that nobody else has."""
    return folder / f".new-{uuid.uuid4().hex}"


def _room(folder: Path) -> None:
    """The folder of a text, also where a file has its name."""
    if os.path.lexists(folder) and not folder.is_dir():
        folder.unlink()
    folder.mkdir(parents=True, exist_ok=True)


def _sweep(folder: Path) -> None:
    """Remove what processes that were killed left in a folder."""
    for path in folder.glob(".new-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


@contextlib.contextmanager
def lock(source: str, key: str) -> Iterator[None]:
    """One compile of one key at a time, across processes and threads; none where the cache cannot be written."""
    held = None
    with contextlib.suppress(OSError, NotImplementedError, filelock.Timeout):
        folder = kernels() / place(source)
        _room(folder)
        held = filelock.FileLock(str(folder / f"{key[:32]}.lock"))
        held.acquire(timeout=120)
    try:
        yield
    finally:
        if held is not None:
            with contextlib.suppress(OSError):
                held.release()


@contextlib.contextmanager
def _tolerant() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if kernels() not in closed:
            closed.add(kernels())
            log.warning("kernels are not kept, %s cannot be written (%s): set W4GEN_CACHE to a folder that can", kernels(), error)


def replace(path: Path, data: bytes) -> None:
    """Write a file in one step: whoever reads it sees the old bytes or the new ones. Raises `OSError`."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    fresh = _fresh(path.parent)
    try:
        fresh.write_bytes(data)
        os.replace(fresh, path)
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)


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
        return sorted(path for path in self.folder.glob("[!.]*") if path.is_dir())

    @property
    def targets(self) -> list[str]:
        """What its binaries run on: `sm_90`, `gfx942`."""
        found = set()
        for folder in self.binaries:
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
                arch = json.loads((folder / "kernel.json").read_text())["target"]["arch"]
                found.add(f"sm_{arch}" if isinstance(arch, int) else arch)
        return sorted(found)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        total = 0
        for path in self.folder.rglob("*"):
            with contextlib.suppress(OSError):  # another process may remove it
                total += path.stat().st_size if path.is_file() else 0
        return total

    def damage(self) -> list[str]:
        """What does not have the hash that it should have, by path in the folder; such files are never used."""
        try:
            right = place((self.folder / "kernel.py").read_text()) == self.folder.name
        except (OSError, UnicodeDecodeError):
            right = False
        return ["kernel.py"] * (not right) + [path.name for path in self.binaries if self.files(path) is None]

    def files(self, binary: Path) -> dict[str, bytes] | None:
        """The files of one of its binaries by kind, None where it is not whole."""
        return whole(lambda name: (binary / name).read_bytes())

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
