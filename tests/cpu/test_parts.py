"""The portable parts of an ablation are right: their text, under the interpreter, against the truth."""

from __future__ import annotations

import pytest

from w4gen.ahead import Ask
from w4gen.api import problem_of
from w4gen.bench.ablate import rungs
from w4gen.runtime.check import check
from w4gen.schedule.arch import ARCHES


@pytest.mark.parametrize("part", ["portable", "layout", "decode"])
@pytest.mark.parametrize(("form", "m"), [("int4_g128", 1), ("int4_g128", 16), ("uint4_g128_z", 4), ("e2m1_g64", 64)])
def test_a_part_is_right(form: str, m: int, part: str) -> None:
    asked = rungs(problem_of(m=m, n=64, k=256, format=form), ARCHES["sm_90"])[part]
    assert isinstance(asked, Ask), asked
    assert check(asked.kernel()).passed
