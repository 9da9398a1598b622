"""Sums of digits: where they split, quotient and remainder are those of Python; elsewhere nothing is made of them in silence."""

from __future__ import annotations

from itertools import product

import pytest

from w4gen.codegen.index import Index, Term

RANGES = {"lane": 15, "code": 10}
WEIGHTS = [(1,), (5, 1), (10, 2), (8, 1), (16, 4), (12, 3), (40, 4)]
CUTS = (1, 2, 3, 4, 5, 8, 16, 20)


def sums() -> list[Index]:
    """Sums of a variable and of a digit of another, which fills the gap below it or leaves one."""
    found = []
    for weights, divide, modulo in product(WEIGHTS, (1, 2), (0, 2, 3, 4, 5)):
        digit = Term("code", divide=divide, modulo=modulo, weight=weights[-1])
        most = weights[-1] * (modulo or -(-RANGES["code"] // divide))
        if len(weights) == 1 or most <= weights[0]:
            found.append(Index((*([Term("lane", weight=weights[0])] if len(weights) > 1 else []), digit)))
    return found


@pytest.mark.parametrize("index", sums(), ids=str)
def test_quotients_and_remainders_are_those_of_python(index: Index) -> None:
    def numbers(each: Index) -> list[int]:
        text = each.render(())
        return [eval(text, {"lane": lane, "code": code}) for lane in range(RANGES["lane"]) for code in range(RANGES["code"])]

    whole = numbers(index)
    for cut in CUTS:
        assert numbers(index.quotient(cut)) == [number // cut for number in whole]
        if index.splits(cut):
            assert numbers(index.remainder(cut)) == [number % cut for number in whole]
            assert numbers(index.quotient(cut) + Index((Term("1"),))) == [number // cut + 1 for number in whole]
        elif index.quotient(cut).floor > 1:
            with pytest.raises(ValueError, match="cannot add"):
                index.quotient(cut) + index
            with pytest.raises(ValueError, match="a quotient has no digits"):
                index.quotient(cut).remainder(2)


def test_every_kind_of_sum_is_among_them() -> None:
    kinds = {(each.splits(cut), each.quotient(cut).floor > 1) for each in sums() for cut in CUTS}
    assert kinds == {(True, False), (False, True)}
