"""What a run's own noise allows to be said: which figures cannot be, and which became worse than in an older run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from w4gen.errors import W4Error
from w4gen.tuned import Row

LEAST = 0.01
"""Noise that is taken for granted: files from before spreads of floors were noted have none of those."""
WRONG = 0.03
"""Above this error a weight was not multiplied by: roundings of the worst come to 0.02."""
QUESTION = ("k", "n", "m", "format", "dtype", "gradient")


def beats(name: str, us: float, floor_us: float | None, noise: float) -> list[str]:
    """Why a time cannot be: it beats its floor, the fastest way to only read the same bytes, by more than noise; else nothing."""
    noise = max(LEAST, noise)
    if not floor_us or us >= floor_us * (1 - noise):
        return []
    return [f"MEASURING ERROR: {name} in {us:.2f} us beats its floor of {floor_us:.2f} us by more than noise ({noise:.1%})"]


def too_fast(facts: Mapping[str, Any]) -> list[str]:
    """The figures of a run that cannot be, whatever it measured, and why."""
    return [each for timed in _timed(facts) for each in beats(*timed)]


def checked(facts: Mapping[str, Any]) -> dict[str, Any]:
    """A run with the figures of it that cannot be."""
    return {**facts, "measuring_errors": too_fast(facts)}


def impossible(row: Row) -> list[str]:
    """Why the time of a tuned row cannot be; empty where it can."""
    return beats(row.question, row.us, row.floor_us, LEAST)


def _timed(facts: Mapping[str, Any]) -> Iterator[tuple[str, float, float | None, float]]:
    """Every time of a run that has a floor: whose, microseconds, those of the floor, and the noise of both."""
    for name, row in _rows(facts):
        if "us" in row and "part" in row:
            yield name, row["us"], row["floor_us"], noise(row)
        elif "cublas_us" in row:
            yield f"{name}, w4gen", row["us"], row["floor_us"], noise(row)
            yield f"{name}, cuBLAS", row["cublas_us"], row.get("dense_floor_us"), noise(row)
            for each in row.get("others", ()):
                if "us" in each:
                    yield f"{name}, {each['name']}", each["us"], row["floor_us"], noise({**row, "spread": each["spread"]})
    for phase, found in facts.get("phases", {}).items():
        for layer in found["layers"]:
            yield f"{phase}, {layer['name']}", layer["us"], layer["floor_us"], noise(layer)
    for part in facts.get("parts", ()):
        for m, us in zip(facts["ms"], part["us"], strict=True):
            yield f"{m}x{part['k']}x{part['n']} {facts['format']}", us, part.get("floor_us"), noise(part)
    for name, variant in facts.get("variants", {}).items():
        graph, least = variant.get("graph", {}), variant.get("floor", {}).get("floor_us")
        if "linears_us" in graph:
            yield f"{name}, linear layers of a token", graph["linears_us"], least, 0.0


@dataclass(frozen=True, slots=True)
class Change:
    """A row in two runs: its time over its own run's floor, before and now, and the noise of both runs together."""

    row: str
    before: float
    now: float
    noise: float

    @property
    def more(self) -> float:
        """By what share it takes longer now."""
        return self.now / self.before - 1

    @property
    def worse(self) -> bool:
        """Whether it became slower by more than noise."""
        return self.more > self.noise


def against(now: Mapping[str, Any], old: Path) -> list[Change]:
    """The rows that a run shares with an older one, from a file, the worst first.

    Times of two runs are compared over the floors of their own runs, as clocks and temperatures differ. Raises `W4Error` where
    the file holds no run, or none of the same rows.
    """
    before, here = keyed(results(old)), keyed(now)
    shared = [(key, row) for key, row in before.items() if key in here]
    if not shared:
        raise W4Error(f"{old} has no row of the layers, M, formats and types measured now: give a run of the same")
    changes = [Change(key, over_floor(row), over_floor(here[key]), noise(row) + noise(here[key])) for key, row in shared]
    return sorted(changes, key=lambda change: -change.more)


def lost(now: Mapping[str, Any], old: Path) -> list[str]:
    """What a run cannot be compared for: rows of an older one that are not in it, and those that were right and are wrong now."""
    before, here = keyed(results(old)), keyed(now)
    gone = [f"{key}: not there any more" for key in before if key not in here]
    turned = [key for key, row in before.items() if key in here and wrong(here[key]) and not wrong(row)]
    return gone + [f"{key}: WRONG now, {wrong(here[key])}" for key in turned]


def wrong(row: Mapping[str, Any]) -> str:
    """Why the result of a row is not to be trusted; empty where it is. Rows that note no error are taken as they are."""
    error, most = row.get("error", 0.0), row.get("error_limit", WRONG)
    if not error <= most:
        return f"error {error:.1e} of at most {most:.1e}"
    return "" if row.get("equal_repeats", 1) else "launches do not give the same bits"


def results(path: Path) -> dict[str, Any]:
    """The rows of a file of results. Raises `W4Error` where it holds none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise W4Error(f"{path} is no file of results ({error}): give one that w4gen bench --out wrote") from error
    if not isinstance(found, dict) or not keyed(found):
        raise W4Error(f"{path} holds no rows with a time and a floor: give a file that w4gen bench --out wrote")
    return found


def keyed(facts: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The rows that have a time and a floor, by what was asked."""
    return {name: row for name, row in _rows(facts) if row.get("us") and row.get("floor_us")}


def _rows(facts: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for row in facts.get("rows", ()):
        yield _named(row), row
    for ladder in facts.get("ladders", ()):
        for row in ladder["rows"]:
            yield f"{_named(ladder)} {row['part']}", {**row, "floor_us": ladder["floor_us"]}


def _named(row: Mapping[str, Any]) -> str:
    told = {name: row.get(name) for name in QUESTION}
    backward = " gradient" if told["gradient"] else ""
    return f"{told['m']}x{told['k']}x{told['n']} {told['format']} {told['dtype']}{backward}"


def over_floor(row: Mapping[str, Any]) -> float:
    """A row's time in floors."""
    return float(row["us"]) / float(row["floor_us"])


def noise(row: Mapping[str, Any]) -> float:
    """The half range of a row's time and of its floor, as shares."""
    return max(LEAST, float(row.get("spread", 0.0)) + float(row.get("floor_spread", 0.0)))
