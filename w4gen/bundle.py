"""A bundle: kernels and tuned rows in one file that can be taken to another machine.

A `.w4g` file is a zip of just what a cache folder holds: `kernels/HASH/kernel.py`, `kernels/HASH/KEY/…` with its checksums,
`tuned/ARCH.json`, and `bundle.json`, which says what it was made of. `W4GEN_CACHE=kernels.w4g` reads it in place.
"""

from __future__ import annotations

import json
import logging
import zipfile
import zlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from w4gen import paths
from w4gen.errors import CacheError

log = logging.getLogger("w4gen")
DAMAGE = (OSError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, LookupError, NotImplementedError, RuntimeError)
"""What reading a damaged zip raises."""

FIRST = (1980, 1, 1, 0, 0, 0)
"""The date of every file in a bundle, so that equal contents are equal bytes."""


def write(path: Path, contents: Mapping[str, bytes]) -> None:
    """Write a bundle. Raises `CacheError` where the file cannot be written."""
    fresh = path.with_name(f".new-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(fresh, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in sorted(contents):
                archive.writestr(zipfile.ZipInfo(name, FIRST), contents[name], zipfile.ZIP_DEFLATED)
        fresh.replace(path)
    except OSError as error:
        raise CacheError(f"{path} cannot be written ({error}): give another --out") from error
    finally:
        fresh.unlink(missing_ok=True)


def read(path: Path) -> dict[str, bytes]:
    """What a bundle holds, by name. Raises `CacheError` where it is none or is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            contents = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
        facts(contents)
    except FileNotFoundError as error:
        raise CacheError(f"there is no bundle {path}: w4gen compile --model … --out FILE.w4g makes one") from error
    except DAMAGE as error:
        raise CacheError(f"{path} is not a whole bundle ({error}): copy it again, or make it anew") from error
    return contents


def facts(contents: Mapping[str, bytes]) -> dict[str, Any]:
    """What a bundle was made of."""
    found = json.loads(contents["bundle.json"])
    if not isinstance(found, dict) or not isinstance(found.get("triton"), str):
        raise ValueError("bundle.json does not say what it was made with")
    return found


def foreign(contents: Mapping[str, bytes], triton: str) -> str:
    """What is wrong with a bundle of another Triton than the one here, none of whose binaries is found; empty for one of this."""
    made = facts(contents)["triton"] if contents else triton
    return "" if made == triton else f"was made with Triton {made}, and {triton} here finds none of its kernels: make it anew"


@lru_cache(maxsize=4)
def tell(triton: str, path: Path | None) -> None:
    """Warn, once, that the bundle in use is of another Triton than the one here."""
    if wrong := foreign(opened(), triton):
        log.warning("%s %s", path, wrong)


def opened() -> Mapping[str, bytes]:
    """What the bundle that W4GEN_CACHE names holds; nothing where it names none, or one that cannot be read (told once)."""
    path = paths.bundle()
    if path is None:
        return {}
    try:
        state = path.stat()
        return _opened(path, state.st_mtime_ns, state.st_size)
    except OSError:
        return _opened(path, 0, 0)


@lru_cache(maxsize=4)
def _opened(path: Path, changed: int, size: int) -> Mapping[str, bytes]:
    try:
        return read(path)
    except CacheError as error:
        log.warning("%s", error)
        return {}
