"""What a run's own noise allows to be said: which figures cannot be, and which became worse than in an older run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from w4gen.errors import W4Error

LEAST = 0.01
"""Noise that is taken for granted: files from before spreads of floors were noted have none of those."""
QUESTION = ("k", "n", "m", "format", "dtype", "gradient")


def too_fast(row: Mapping[str, Any]) -> list[str]:
    """Why a row cannot be: each figure that beats its floor, the fastest way to only read the same bytes, by more than noise."""
    found = []
    figures = [("w4gen", row["us"], "floor_us", row["spread"]), ("cuBLAS", row["cublas_us"], "dense_floor_us", row["spread"])]
    figures += [(each["name"], each["us"], "floor_us", each["spread"]) for each in row.get("others", ()) if "us" in each]
    for name, us, kind, spread in figures:
        least, noise = row.get(kind), max(LEAST, spread + row.get("floor_spread", 0.0))
        if least and us < least * (1 - noise):
            beaten = f"beats its floor of {least:.2f} us by more than noise ({noise:.1%})"
            found.append(f"MEASURING ERROR: {name} in {us:.2f} us {beaten}")
    return found


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
    before, here = results(old), keyed(now)
    shared = [(key, row) for key, row in keyed(before).items() if key in here]
    if not shared:
        raise W4Error(f"{old} has no row of the layers, M, formats and types measured now: give a run of the same")
    changes = [Change(key, over_floor(row), over_floor(here[key]), noise(row) + noise(here[key])) for key, row in shared]
    return sorted(changes, key=lambda change: -change.more)


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
