"""What the kernels of a replay are, told by their names, and how long they take, by their spans: data, without torch."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LINEAR = re.compile(r"(?!triton_(?!tem)).*(gem[mv]|nvjet|splitk|dequant|add_parts|_mm)", re.IGNORECASE)
"""Kernels of linear layers, ours and the vendor's, by their names; attention is not among them.

Inductor names what it fuses after all operations that are near, multiplications too: only its templates multiply.
"""

PLACES = re.compile(r"^void |at::native::|at::|\(anonymous namespace\)::")
"""What names of kernels begin with and say nothing by."""
REST = {
    "attention": re.compile(r"sdpa|fmha|flash|attention|softmax", re.IGNORECASE),
    "fused by Inductor": re.compile(r"^triton_"),
    "strided": re.compile(r"(^|[ :])elementwise_kernel<"),
    "reductions": re.compile(r"reduce_kernel"),
    "copies": re.compile(r"copy|Memcpy|CatArray|index|gather|scatter", re.IGNORECASE),
}
"""What other kernels are, by their names; `strided` is pointwise work on operands that do not lie in one run, copies among it."""


def sort_of(name: str) -> str:
    """What a kernel is that is of no linear layer."""
    return next((sort for sort, names in REST.items() if names.search(name)), "pointwise")


def sorts(us: Mapping[str, float]) -> dict[str, float]:
    """Microseconds of kernels by what they are, those of linear layers left out."""
    found = Counter[str]()
    for name, each in us.items():
        if not LINEAR.match(name):
            found[sort_of(name)] += each
    return {sort: round(each, 1) for sort, each in found.most_common()}


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of several spans of time lasts."""
    total, end = 0.0, -math.inf
    for low, high in sorted(spans):
        total += max(0.0, high - max(low, end))
        end = max(end, high)
    return total


def split(spans: Sequence[tuple[str, float, float]], turns: int) -> dict[str, Any]:
    """Microseconds of kernels (name, start, end) in one of so many turns: of linear layers, and of the rest.

    A kernel that starts early waits for the one in front while both are seen to run: such time counts once, and not as the
    linear layer's.
    """
    rest = [each for each in spans if not LINEAR.match(each[0])]
    whole, others = (busy(each[1:] for each in some) / turns for some in (spans, rest))
    longest = Counter[str]()
    for name, low, high in spans:
        longest[PLACES.sub("", name)[:120]] += (high - low) / turns
    return {
        "linears_us": round(whole - others, 2),
        "rest_us": round(others, 2),
        "kernels": round(len(spans) / turns),
        "sorts_us": sorts(longest),
        "longest_us": {name: round(us, 1) for name, us in longest.most_common(12)},
    }
