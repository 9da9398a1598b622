"""Tuned schedules on disk: `tuned/ARCH.json`, rows that say which question they answer on which device, and how they were found.

A row records versions and does not go by them: it is used where its schedule is still legal. What is no file of rows is refused;
in one that is, a row that says what this version does not know is passed over, told, and left where it is.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import filelock

from w4gen import bundle, cache, paths
from w4gen.errors import ArchError, CacheError, W4Error
from w4gen.ir.lower import lower
from w4gen.ir.problem import Problem
from w4gen.ir.types import Format, dtype
from w4gen.schedule import arch as arches
from w4gen.schedule.arch import Arch
from w4gen.schedule.rules import pick
from w4gen.schedule.schedule import Schedule

log = logging.getLogger("w4gen")
KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float)}
"""What JSON has for a field that is no text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A schedule that was the fastest of some trials, for one question on one device.

    sms: of the device · us, floor_us: microseconds of a call, and of only reading its bytes · rules, rules_us: what the rules
    chose, and what that took in the same search · text: the address of the kernel that was timed · the rest: when and with what.
    A row without a device holds on all.
    """

    question: str
    schedule: Schedule
    device: str = ""
    sms: int = 0
    us: float = 0.0
    floor_us: float = 0.0
    rules: str = ""
    rules_us: float = 0.0
    trials: int = 0
    date: str = ""
    triton: str = ""
    w4gen: str = ""
    text: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """What tells rows of one arch apart."""
        return self.question, self.device

    @property
    def rules_ratio(self) -> float:
        """How many times as long as the row's schedule the rules' choice takes; NaN where it was not timed."""
        return self.rules_us / self.us if self.rules_us and self.us else math.nan

    def facts(self) -> dict[str, Any]:
        """The row as JSON has it."""
        return asdict(self) | {"schedule": str(self.schedule)}

    @classmethod
    def read(cls, facts: Any) -> Row:
        """The row that `facts` wrote; fields of other versions are ignored. Raises `ValueError` on what is no row, and `W4Error`
        on one with a figure that is none, or with a schedule of another version."""
        if not isinstance(facts, dict) or not {"question", "schedule"} <= set(facts):
            raise ValueError(f"a row is an object with a question and a schedule, not {facts!r:.60}")
        known = {field.name: facts[field.name] for field in fields(cls) if field.name in facts}
        kinds = {field.name: KINDS.get(str(field.type), (str,)) for field in fields(cls)}
        wrong = [name for name, value in known.items() if not isinstance(value, kinds[name])]
        if wrong:
            raise ValueError(f"{wrong[0]}={known[wrong[0]]!r:.60} of the row {facts['question']!r:.60} is of the wrong type")
        odd = [name for name, value in known.items() if not isinstance(value, str) and not 0 <= value < math.inf]
        if odd:
            raise CacheError(f"{odd[0]}={known[odd[0]]} of the row {facts['question']!r:.60} is no figure: tune it again")
        return cls(**known | {"schedule": Schedule.parse(known["schedule"])})


@dataclass(frozen=True, slots=True)
class Held:
    """What a file holds: rows, and others as JSON has them, which this version does not read, and why it does not."""

    rows: tuple[Row, ...] = ()
    others: tuple[Any, ...] = ()
    why: tuple[str, ...] = ()


def question(problem: Problem) -> str:
    """What a tuned row answers."""
    sizes = f"m={problem.m[0]}..{problem.m[1]} n={problem.n} k={problem.k}"
    asked = f"{sizes} {problem.format} {problem.x}->{problem.y} {problem.epilogue}".rstrip()
    return asked + " gradient=1" * problem.gradient


def problem(question: str) -> Problem:
    """The problem that a row's question is of. Raises `CacheError` on anything else."""
    found = re.fullmatch(r"m=(\d+)\.\.(\d+) n=(\d+) k=(\d+) (\S+) (\w+)->(\w+)(?: (.*))?", question)
    if found is None:
        raise CacheError(f"{question!r:.60} is not the question of a row: rows are made by w4gen tune")
    low, high, n, k, form, x, y, more = found.groups()
    given = dict(part.split("=", 1) for part in (more or "").split())
    return Problem(
        m=(int(low), int(high)), n=int(n), k=int(k), format=Format.parse(form), x=dtype(x), y=dtype(y),
        activation=given.get("activation", ""), residual="residual" in given, gradient="gradient" in given,
    )  # fmt: skip


def current(row: Row, arch: Arch) -> bool:
    """Whether the choice of the rules that a row timed is the one they make now."""
    return row.rules == str(pick(lower(problem(row.question)), arch))


def arch_of(path: Path) -> Arch:
    """The arch whose rows a file holds. Raises `CacheError` where it is not called after one."""
    try:
        return arches.arch(path.stem)
    except ArchError as error:
        raise CacheError(
            f"{path} is not called ARCH.json ({error}): name it after the arch of its rows, as sm_90.json"
        ) from error


def tuned(problem: Problem, arch: Arch) -> Row | None:
    """The stored winner for a question, or None: of the device itself, else of one with as many SMs.

    The bundle in use is asked first, then the cache, then what came with the package. A damaged file is told and passed over.
    """
    asked, sms = question(problem), arch.device_sms or arch.sms
    for rows in sources(arch.name):
        found = [row for row in rows if row.question == asked and (not row.device or arch.device == row.device or sms == row.sms)]
        if found:
            return max(found, key=lambda row: row.device == arch.device)
    return None


def sources(arch: str) -> Iterator[tuple[Row, ...]]:
    """The rows of an arch, place by place, in the order in which they are asked."""
    name = f"tuned/{arch}.json"
    bundled = bundle.opened().get(name)
    if bundled is not None:
        yield _told(str(paths.bundle()), bundled)
    for folder in dict.fromkeys((paths.cache(), paths.shipped())):
        try:
            yield _told(str(folder / name), (folder / name).read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            log.warning("%s cannot be read: %s", folder / name, error)


@lru_cache(maxsize=16)
def _told(name: str, data: bytes) -> tuple[Row, ...]:
    """The rows of a file, none where it is damaged, which is told once."""
    try:
        return parse(name, data)
    except CacheError as error:
        log.warning("%s", error)
        return ()


def parse(name: str, data: bytes) -> tuple[Row, ...]:
    """The rows that a file's bytes hold, others being told. Raises `CacheError` that names the file where it holds no rows."""
    held = read(name, data)
    if held.others:
        log.warning("%s: rows passed over: %d, the first as %s", name, len(held.others), held.why[0])
    return held.rows


def read(name: str, data: bytes) -> Held:
    """What a file's bytes hold. Raises `CacheError` that names the file where these are no rows."""
    try:
        held = json.loads(data)
        found = held.get("rows") if isinstance(held, dict) else None
        if not isinstance(found, list):
            raise ValueError(f"it holds an object with a list of rows, not {held!r:.60}")
        each = [_read(facts) for facts in found]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CacheError(f"{name} is not a file of tuned schedules ({error}): remove it or tune again") from error
    return Held(
        tuple(row for row in each if isinstance(row, Row)),
        tuple(facts for facts, row in zip(found, each, strict=True) if isinstance(row, W4Error)),
        tuple(str(row) for row in each if isinstance(row, W4Error)),
    )


def _read(facts: Any) -> Row | W4Error:
    """A row, or why it is none for this version."""
    try:
        return Row.read(facts)
    except W4Error as error:
        return error


def answers(rows: Iterable[Row]) -> tuple[dict[Row, Problem], list[str]]:
    """Rows with the problems that they answer, and why others answer none."""
    found, refused = dict[Row, Problem](), list[str]()
    for row in rows:
        try:
            found[row] = problem(row.question)
        except W4Error as error:
            refused.append(str(error))
    return found, refused


def load(path: Path) -> tuple[Row, ...]:
    """The rows of a file. Raises `CacheError` that names it where it is not there or is damaged."""
    return opened(path).rows


def opened(path: Path) -> Held:
    """What a file holds. Raises `CacheError` that names it where it is not there or is damaged."""
    try:
        return read(str(path), path.read_bytes())
    except OSError as error:
        raise CacheError(
            f"{path} cannot be read ({error.strerror}): name a file of tuned schedules, as tuned/sm_90.json"
        ) from error


def dump(rows: Iterable[Row], others: Iterable[Any] = ()) -> bytes:
    """The file of some rows, in the order of their questions, and of others as they were read."""
    ordered = sorted(rows, key=lambda row: row.key)
    return (json.dumps({"rows": [*(row.facts() for row in ordered), *others]}, indent=1, ensure_ascii=False) + "\n").encode()


def merged(*files: Iterable[Row]) -> tuple[Row, ...]:
    """The rows of several files. Of two for one question and device: the newer, then that of more trials, then the first."""
    best: dict[tuple[str, str], Row] = {}
    for row in (row for rows in files for row in rows):
        held = best.get(row.key)
        if held is None or (row.date, row.trials) > (held.date, held.trials):
            best[row.key] = row
    return tuple(best.values())


def diff(old: Iterable[Row], new: Iterable[Row]) -> list[tuple[Row | None, Row | None]]:
    """What two files say differently: pairs of rows for one question and device, None where a file has none."""
    before, after = ({row.key: row for row in rows} for rows in (old, new))
    keys = sorted(before.keys() | after.keys())
    pairs = [(before.get(key), after.get(key)) for key in keys]
    return [(a, b) for a, b in pairs if a is None or b is None or a.schedule != b.schedule]


def path_of(arch: str) -> Path:
    """The file that rows of an arch are written to."""
    return paths.cache() / "tuned" / f"{arch}.json"


def save(arch: str, rows: Iterable[Row]) -> Path:
    """Merge rows into the cache's file of an arch. Raises `CacheError` where that file is damaged or cannot be written."""
    path = path_of(arch)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{path}.lock", timeout=60):
            held = opened(path) if path.exists() else Held()
            cache.replace(path, dump(merged(held.rows, rows), held.others))
    except (OSError, filelock.Timeout) as error:
        raise CacheError(f"{path} cannot be written ({error}): set W4GEN_CACHE to a folder that can") from error
    return path
