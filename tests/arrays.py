"""Covering arrays: of a product of axes, the cases that hold every value, or every pair of values; the others are slow."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest

Case = tuple[int, ...]
"""Of each axis the index of a value."""


def held(case: Case, strength: int) -> set[tuple[tuple[int, int], ...]]:
    """What a case is of: its values (strength 1), its pairs of them (2), each with its axis."""
    return set(itertools.combinations(enumerate(case), strength))


def covering(sizes: list[int], strength: int) -> list[Case]:
    """Cases of the product of axes of these sizes which together hold what all of them hold.

    Each adds as much as it can, and of those that do is one whose values were taken least.
    """
    every = {case: held(case, strength) for case in itertools.product(*map(range, sizes))}
    left = set().union(*every.values())
    chosen, taken = [], Counter()
    while left:
        gains = {case: len(left & of) for case, of in every.items()}
        most = max(gains.values())
        best = (case for case, gain in gains.items() if gain == most)
        chosen.append(min(best, key=lambda case: sum(map(taken.__getitem__, enumerate(case)))))
        left -= every[chosen[-1]]
        taken.update(enumerate(chosen[-1]))
    return chosen


def label(value: Any) -> str:
    """What a test of `value` is called."""
    if isinstance(value, tuple):
        return " ".join(map(label, value))
    return getattr(value, "label", str(value).removeprefix("torch."))


def cases(axes: tuple[Collection[Any], ...], chosen: Iterable[Case], slow: Callable[[Case], bool]) -> list[Any]:
    """Parameters of tests, named, and marked where they are slow."""
    found = [(case, [axis[i] for axis, i in zip(map(list, axes), case)]) for case in chosen]
    return [
        pytest.param(*values, id="-".join(map(label, values)), marks=[pytest.mark.slow] * slow(case)) for case, values in found
    ]


def covered(*axes: Collection[Any], strength: int = 2) -> list[Any]:
    """As few cases of the product as it takes to hold every pair of values, or of three of them."""
    return cases(axes, covering([len(axis) for axis in axes], strength), lambda case: False)


def thinned(*axes: Collection[Any], strength: int = 2) -> list[Any]:
    """The whole product; all cases but those of `covered` are marked slow."""
    sizes = [len(axis) for axis in axes]
    quick = set(covering(sizes, strength))
    return cases(axes, itertools.product(*map(range, sizes)), lambda case: case not in quick)
