"""The search of a tuner as a function of what it may call: a time for a candidate, a check of a winner, a clock."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from w4gen.errors import ScheduleError, W4Error

TIE = 0.03
"""Times that differ by a smaller share are equal, and the lowest id wins: so that two processes agree, noise or not."""

FINALISTS, TURNS = 4, 3
"""Candidates that are timed again, and how often; the first is, too, as what it takes is told."""

FIRST = 0.7
"""The share of the seconds after which no new candidate is begun."""

NEAR = 1.05
"""How many times the floor a time may be that is not worth improving."""

DOUBT = 0.7
"""How much faster a candidate may be than a model says that was set right by the trials so far."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to: the winner's id (None where none was accepted), its time, how many were timed, who was skipped.

    first_us: the time of the first candidate, 0 where it has none.
    """

    winner: int | None
    us: float
    trials: int
    skipped: tuple[tuple[int, str], ...] = ()
    first_us: float = 0.0


def search(
    ids: Sequence[int],
    time: Callable[[int], float],
    accept: Callable[[int], bool],
    seconds: float,
    clock: Callable[[], float],
    predicted: Sequence[float] = (),
    floor_us: float = 0.0,
) -> Found:
    """Time candidates in the order given while seconds last (the first always), the best again; accept the first that is right.

    It ends early near `floor_us`, below which no time is, and where none of those left can win by the times `predicted`, one for
    each id. A candidate whose `time` or `accept` raises `W4Error` is skipped with its message, and one that beats the floor by
    more than noise, as it cannot have read what it multiplied; anything else ends the search.
    """
    start, times, skipped = clock(), dict[int, list[float]](), list[tuple[int, str]]()

    def timed(each: int) -> None:
        try:
            us = time(each)
            if us < floor_us * (1 - TIE):
                raise ScheduleError(
                    f"{us:.2f} us beat the floor of {floor_us:.2f} us: it did not do its work, or was timed wrongly"
                )
            times.setdefault(each, []).append(us)
        except W4Error as error:
            times.pop(each, None)
            skipped.append((each, str(error)))

    first, left = ids[0], list(ids)
    while left and not (times and (clock() - start >= FIRST * seconds or settled(medians(times), left, predicted, floor_us))):
        timed(left.pop(0))
    for _ in range(TURNS - 1):
        for each in dict.fromkeys([*order(medians(times))[:FINALISTS], *({first} & times.keys())]):
            if clock() - start < seconds:
                timed(each)
    final = medians(times)
    for each in order(final):
        try:
            if accept(each):
                return Found(each, final[each], len(times), tuple(skipped), final.get(first, 0.0))
            skipped.append((each, "its result is not the reference's, or not the same each time"))
        except W4Error as error:
            skipped.append((each, str(error)))
    return Found(None, 0.0, len(times), tuple(skipped), final.get(first, 0.0))


def settled(times: dict[int, float], left: Sequence[int], predicted: Sequence[float], floor_us: float) -> bool:
    """Whether no candidate left is worth a trial: the best is near the floor, or the model, doubted, has all of them slower."""
    best = min(times.values())
    if not predicted:
        return best <= NEAR * floor_us
    right = min(us / predicted[each] for each, us in times.items())
    return best <= NEAR * floor_us or min(predicted[each] for each in left) * right * DOUBT > best


def medians(times: dict[int, list[float]]) -> dict[int, float]:
    """One time for each candidate."""
    return {each: statistics.median(taken) for each, taken in times.items() if taken}


def order(times: dict[int, float]) -> list[int]:
    """Candidates from the fastest on; of those that tie with the fastest left, the lowest id."""
    left, found = dict(times), list[int]()
    while left:
        least = min(left.values())
        found.append(min(each for each, us in left.items() if us <= least * (1 + TIE)))
        del left[found[-1]]
    return found


def shares(values: Sequence[float], seconds: float) -> list[float]:
    """The seconds of each question: half of them alike, half by value."""
    total = sum(values) or 1.0
    return [seconds * (0.5 / len(values) + 0.5 * value / total) for value in values]
