"""Covering arrays: of a product of axes, the cases that hold every value, or every pair of values; the others are slow."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import pytest

Case = tuple[int, ...]
"""Of each axis the index of a value."""


def held(case: Case, strength: int) -> set[tuple[tuple[int, int], ...]]:
    """What a case is of: its values (strength 1), its pairs of them (2), each with its axis."""
    return set(itertools.combinations(enumerate(case), strength))


def covering(sizes: list[int], strength: int) -> list[Case]:
    """Cases of the product of axes of these sizes which together hold what all of them hold; each adds as much as it can."""
    every = list(itertools.product(*map(range, sizes)))
    left = set().union(*(held(case, strength) for case in every))
    chosen = []
    while left:
        chosen.append(max(every, key=lambda case: len(left & held(case, strength))))
        left -= held(chosen[-1], strength)
    return chosen


def pairwise(*axes: Collection[Any]) -> list[tuple[Any, ...]]:
    """As few cases of the product as it takes to hold every pair of values."""
    values = [list(axis) for axis in axes]
    return [tuple(axis[i] for axis, i in zip(values, case)) for case in covering([len(axis) for axis in values], 2)]


def thinned(*axes: Collection[Any], strength: int = 1) -> list[Any]:
    """The whole product: the cases which hold every value (strength 1) or pair of values (2), and marked slow the others."""
    values = [list(axis) for axis in axes]
    quick = set(covering([len(axis) for axis in values], strength))
    return [
        pytest.param(*(axis[i] for axis, i in zip(values, case)), marks=[] if case in quick else pytest.mark.slow)
        for case in itertools.product(*(range(len(axis)) for axis in values))
    ]
