"""The tuner's search, with made-up times, checks and clocks."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from w4gen.errors import ScheduleError
from w4gen.schedule.search import Found, order, search, shares


class Clock:
    """A clock that goes on by a second for each trial."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run(
    us: dict[int, float], seconds: float = 1e9, right: Callable[[int], bool] = lambda each: True, noise: float = 0.0
) -> Found:
    """A search over candidates of these times; one of NaN does not run."""
    clock, chance = Clock(), random.Random(0)

    def time(each: int) -> float:
        clock.now += 1
        if us[each] != us[each]:
            raise ScheduleError(f"{each} does not run")
        return us[each] * (1 + noise * chance.uniform(-1, 1))

    return search(list(us), time, right, seconds, clock)


def test_the_fastest_wins_and_ties_go_to_the_lowest_id() -> None:
    assert run({0: 5.0, 1: 3.0, 2: 4.0}) == Found(1, 3.0, 3, first_us=5.0)
    assert run({0: 5.0, 1: 3.08, 2: 3.0, 3: 3.01}).winner == 1
    assert run({0: 5.0, 1: 3.1, 2: 3.0}).winner == 2
    assert run({0: 3.08, 1: 3.0}).winner == 0, "the rules' choice stays unless another is faster by more than noise"
    assert order({3: 1.0, 1: 1.02, 2: 1.06}) == [1, 3, 2]


def test_two_noisy_searches_agree_on_candidates_that_are_alike() -> None:
    times = {each: 10.0 if each < 5 else 12.0 for each in range(10)}
    assert run(times, noise=0.004).winner == 0


def test_what_the_first_takes_is_a_median_too_however_far_behind_it_is() -> None:
    """It is what rows tell of the rules' choice."""
    us, taken = {each: 9.0 - each for each in range(6)}, iter([30.0, 9.0, 9.5])
    found = search(list(us), lambda each: us[each] if each else next(taken), lambda each: True, 1e9, Clock())
    assert (found.winner, found.first_us) == (5, 9.5)


def test_what_fails_is_skipped_and_told() -> None:
    found = run({0: float("nan"), 1: 4.0, 2: float("nan"), 3: 5.0})
    assert (found.winner, found.trials) == (1, 2)
    assert found.skipped == ((0, "0 does not run"), (2, "2 does not run"))
    assert run({0: float("nan")}) == Found(None, 0.0, 0, ((0, "0 does not run"),))


def test_a_winner_that_is_wrong_gives_way_to_the_next() -> None:
    found = run({0: 5.0, 1: 3.0, 2: 4.0}, right=lambda each: each != 1)
    assert found.winner == 2
    assert found.skipped == ((1, "its result is not the reference's, or not the same each time"),)
    assert run({0: 5.0, 1: 3.0}, right=lambda each: False).winner is None


def test_a_winner_whose_check_fails_gives_way_too() -> None:
    def right(each: int) -> bool:
        if each == 1:
            raise ScheduleError("no room")
        return True

    found = run({0: 5.0, 1: 3.0}, right=right)
    assert (found.winner, found.skipped) == (0, ((1, "no room"),))


def test_the_seconds_end_a_search_but_never_before_one_was_timed() -> None:
    times = {each: 100.0 * 0.9**each for each in range(50)}
    assert run(times, seconds=0).trials == 1
    assert run(times, seconds=0).winner == 0
    found = run(times, seconds=20)
    assert found.trials == 14, "seven tenths of the time are for new ones"
    assert found.winner == 13
    assert run({0: float("nan"), 1: 1.0}, seconds=0).winner == 1


def test_a_time_below_the_floor_is_no_time() -> None:
    """It would be a kernel that did nothing, or a clock that is wrong; a little below is noise."""

    def found(us: dict[int, float]) -> Found:
        return search(list(us), us.__getitem__, lambda each: True, 1e9, Clock(), floor_us=1.0)

    one = found({0: 2.0, 1: 0.1})
    assert (one.winner, one.us, one.trials) == (0, 2.0, 1)
    assert one.skipped == ((1, "0.10 us beat the floor of 1.00 us: it did not do its work, or was timed wrongly"),)
    assert found({0: 2.0, 1: 0.98}).winner == 1
    assert found({0: 0.1, 1: 0.2}).winner is None


def test_near_the_floor_a_search_ends() -> None:
    us = {0: 5.0, 1: 3.1, 2: 2.0}
    assert [search(list(us), us.__getitem__, bool_of, 1e9, Clock(), floor_us=floor).trials for floor in (1.0, 3.0, 4.9)] == [
        3,
        2,
        1,
    ]


def test_a_search_ends_where_no_candidate_left_can_win_by_a_model_that_trials_set_right() -> None:
    """The model says a third of what is measured: the factor is no reason to end, the differences are."""
    us, predicted = {0: 9.0, 1: 8.4, 2: 9.5, 3: 2.0, 4: 1.0}, [3.0, 2.9, 3.2, 3.5, 5.0]
    found = search(list(us), us.__getitem__, bool_of, 1e9, Clock(), predicted)
    assert (found.winner, found.trials) == (4, 5), "after one of 2 us at a predicted 3.5, one at 5 may take 1"
    found = search(list(us), (us | {3: 9.1}).__getitem__, bool_of, 1e9, Clock(), predicted)
    assert (found.winner, found.trials) == (1, 4), "5 times the least ratio, 2.6, times the doubt is more than 8.4"


def bool_of(each: int) -> bool:
    return True


@pytest.mark.parametrize("stop", [KeyboardInterrupt, MemoryError])
def test_what_is_no_error_of_a_candidate_ends_the_search(stop: type[BaseException]) -> None:
    def time(each: int) -> float:
        raise stop

    with pytest.raises(stop):
        search([0, 1], time, bool, 1.0, Clock())


def test_shares_add_up_and_go_by_value_with_something_for_everybody() -> None:
    found = shares([1.0, 3.0, 0.0], 60)
    assert sum(found) == pytest.approx(60)

    assert found[1] > found[0] > found[2] >= 10
