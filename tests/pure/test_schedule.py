"""Schedules, arches and buckets: values that read back, and refusals that name the way out."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from w4gen.api import problem_of
from w4gen.errors import ArchError, ScheduleError, ShapeError
from w4gen.formats import named
from w4gen.ir.layout import Layout, rows
from w4gen.ir.lower import lower
from w4gen.ir.problem import EVERY, Problem
from w4gen.ir.types import BF16, F16, F32, DType, Format
from w4gen.ir.verify import verify
from w4gen.pipeline import made
from w4gen.schedule.apply import FAST, apply
from w4gen.schedule.arch import ARCHES, M16K16, SM_80, arch, for_capability
from w4gen.schedule.cost import bytes_moved, floor_us
from w4gen.schedule.rewrite import padded_group
from w4gen.schedule.rules import BUCKETS, bucket, pick
from w4gen.schedule.schedule import Schedule
from w4gen.schedule.stored import fragment_order, layout_for

small = st.integers(1, 4096)


@given(
    st.builds(
        Schedule,
        template=st.sampled_from(["gemv", "gemm", "dequant", "gemv_mma", "gemv_half"]),
        block_m=small,
        block_n=small,
        block_k=small,
        unit=st.sampled_from(["lanes", "halves", "mma", "vendor"]),
        side=st.sampled_from(["left", "right"]),
        scale_at=st.sampled_from(["weight", "accumulator"]),
        zero_at=st.sampled_from(["weight", "accumulator"]),
        convert_at=st.sampled_from(["register", "global"]),
        x_at=st.sampled_from(["register", "shared"]),
        w_at=st.sampled_from(["register", "shared"]),
        split_k=small,
        sum_at=st.sampled_from(["shared", "global"]),
        warps=small,
        stages=small,
        maxnreg=st.integers(0, 255),
        vector=st.sampled_from([2, 4]),
        ring=small,
        overlap=st.integers(0, 1),
    )
)
def test_a_schedule_reads_what_it_writes(schedule: Schedule) -> None:
    assert Schedule.parse(str(schedule)) == schedule


def test_fields_left_out_take_their_defaults() -> None:
    assert Schedule.parse("template=gemv block_n=8") == Schedule(template="gemv", block_n=8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no template"),
        ("block_n=8", "names no template"),
        ("template=gemv colour=3", "cannot read 'colour=3'"),
        ("template=gemv block_n=-8", "cannot read 'block_n=-8'"),
        ("template=gemv block_n", "cannot read 'block_n'"),
        ("template=gemv block_n=0", "block_n=0 is not positive"),
        ("template=gemv unit=cores", "unit='cores': use one of lanes, halves, mma, vendor"),
        ("template=gemv side=top", "side='top': use one of left, right"),
        ("template=gemv split_k=0", "split_k=0 is not positive"),
        ("template=gemv maxnreg=-1", "cannot read 'maxnreg=-1'"),
        ("template=gemv sum_at=register", "sum_at='register': use one of shared, global"),
        ("template=gemv scale_at=x", "scale_at='x': use one of weight, accumulator"),
        ("template=gemv convert_at=shared", "convert_at='shared': use one of register, global"),
        ("template=gemv w_at=global", "w_at='global': use one of register, shared"),
    ],
)
def test_text_that_is_no_schedule_is_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule.parse(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "metal"}, "use cuda or hip"),
        ({"sms": 0}, "sms=0 is not positive"),
        ({"bandwidth_gbs": -1}, "bandwidth_gbs=-1 is not positive"),
        ({"shared_bytes": 0}, "shared_bytes=0 is not positive"),
        ({"registers": 0}, "registers=0 is not positive"),
        ({"warp": 48}, "not whole warps of 48"),
    ],
)
def test_inconsistent_hardware_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ArchError, match=message):
        replace(SM_80, **change)


def test_arches_of_the_issue_are_known() -> None:
    names = {"sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx1100", "portable"}
    assert names <= set(ARCHES)
    assert all(arch(name).name == name for name in names)


def test_an_unknown_arch_offers_the_nearest() -> None:
    with pytest.raises(ArchError, match="unknown arch 'sm_91': the nearest is sm_90"):
        arch("sm_91")


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((9, 0), "sm_90"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_87"),
        ((8, 8), "sm_86"),
        ((7, 5), "sm_75"),
        ((7, 0), "portable"),
        ((10, 3), "sm_103"),
    ],
)
def test_a_device_takes_its_arch_or_an_older_one_of_its_family(capability: tuple[int, int], name: str) -> None:
    assert for_capability(*capability).name == name


def test_relatives_have_a_target_of_their_own() -> None:
    """A binary for sm_120 does not run on sm_121."""
    assert (for_capability(12, 0).target, for_capability(12, 1).target) == (120, 121)
    assert arch("sm_121") == for_capability(12, 1)
    assert arch("sm_121").shared_bytes == arch("sm_120").shared_bytes


@pytest.mark.parametrize(
    ("m", "expected"),
    [
        *((1, (1, 1)), (2, (2, 8)), (8, (2, 8)), (9, (9, 16)), (16, (9, 16)), (17, (17, 32)), (32, (17, 32)), (33, (33, 64))),
        (64, (33, 64)),
        *((65, (65, 128)), (128, (65, 128)), (129, (129, 256)), (256, (129, 256)), (257, (257, 512)), (512, (257, 512))),
        *(
            (513, (513, 1024)),
            (1024, (513, 1024)),
            (1025, (1025, 2048)),
            (2048, (1025, 2048)),
            (2049, (2049, 2**31 - 1)),
            (2**20, (2049, 2**31 - 1)),
        ),
        (2**31, (2**31, 2**31)),
    ],
)
def test_bucket_edges(m: int, expected: tuple[int, int]) -> None:
    assert bucket(m) == expected


def test_buckets_leave_no_gap() -> None:
    assert BUCKETS[0][0] == 1
    assert all(low == before + 1 for (_, before), (low, _) in itertools.pairwise(BUCKETS))
    assert all(low <= high for low, high in BUCKETS)


MORE = ["uint4_g128_z", "uint4_g32_m", "uint4_g64_zf", "uint4_g50_m", "int8_g128", "int8_row_z", "e2m1_g32"]
OWN = {
    "int2_g128": Format("int2", bits=2, origin=-2.0, group=128),
    "evens_g256": Format("evens", bits=1, step=2.0, origin=-2.0, group=256),
    "evens_g64": Format("evens", bits=1, step=2.0, origin=-2.0, group=64),
    "signs_g64": Format("signs", bits=1, codebook=(-1.0, 1.0), group=64),
}
SHAPES = [(1, 1536, 256), (16, 1536, 256), (16, 8192, 28672), (1, 28672, 8192), (5, 37, 41), (1, 1, 1), (2, 7, 1)]
SHAPES += [(17, 4096, 4096), (32, 331, 37), (64, 8192, 28672), (64, 1, 1), (128, 28672, 8192), (100, 1536, 256), (512, 1536, 256)]
# m, k, n
LIKE = ("sm_75", "sm_120", "gfx942")
"""Archs that the rules treat as one of the others."""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["int4_g128", "nf4_g64", "int4_g50", "nf4_row", "int4_g16_f32", *MORE, *OWN])
@pytest.mark.parametrize("target", ["portable", "sm_80", "sm_90", *(pytest.param(each, marks=pytest.mark.slow) for each in LIKE)])
def test_what_the_rules_pick_is_legal(shape: tuple[int, int, int], name: str, target: str) -> None:
    m, k, n = shape
    for x in (F16, BF16):
        program = lower(Problem(m=bucket(m), n=n, k=k, format=OWN.get(name) or named(name), x=x, y=x))
        schedule = pick(program, ARCHES[target])
        verify(apply(program, schedule, ARCHES[target]), ARCHES[target], schedule.warps * schedule.teams, schedule.ring)


@pytest.mark.parametrize("target", ["portable", "sm_90"])
@pytest.mark.parametrize("m", [(1, 1), (2, 8), (17, 32), (200, 300)], ids=str)
@pytest.mark.parametrize("name", ["uint4_z", "uint4_zf", "uint2_m", "nf4_m", "int8", "mxfp4", "nvfp4", "nf4_dq", "q4_k", "q2_k"])
def test_what_the_rules_pick_for_blocks_is_legal_with_scales_of_any_type(name: str, m: tuple[int, int], target: str) -> None:
    """Where codes are in the order of fragments, though the arch has none: all that a weight is made of fits the registers."""
    for scale, zero, x in itertools.product((F16, F32), (F16, F32), (F16, BF16)):
        form = named(name)
        form = replace(form, scale=scale) if form.scale == F16 else form
        form = replace(form, zero=zero) if form.zero == F16 else form
        for n, k in ((64, 1024), (1, 3), (5000, 256)):
            layout = fragment_order(form, M16K16, n, k)
            program = lower(Problem(m=m, n=n, k=k, format=form, layout=layout, x=x, y=x))
            schedule = pick(program, ARCHES[target])
            verify(apply(program, schedule, ARCHES[target]), ARCHES[target], schedule.warps * schedule.teams)


WHOLE = {"n": 64, "k": 1024}
"""Whole blocks of fragments in every width."""
NAMED = [
    ("int4_g128", WHOLE, "fast"),
    ("int4_g64", WHOLE, "fast"),
    ("int4_row", WHOLE, "fast"),
    ("uint4_g128", WHOLE, "fast"),
    ("int8_g64", WHOLE, "fast"),
    ("int4_g128", {"n": 64, "k": 1000}, "fast"),
    ("int4_g16", WHOLE, "small groups"),
    ("uint4_g32", WHOLE, "small groups"),
    ("mxfp4", WHOLE, "small groups"),
    ("nvfp4", WHOLE, "small groups"),
    ("e2m1_g128", WHOLE, "small groups"),
    ("uint4_g32_z", WHOLE, "blocks"),
    ("nf4_dq", WHOLE, "blocks"),
    ("int4_g50", WHOLE, "blocks"),
    ("int4_g128", {"n": 64, "k": 1004}, "blocks"),
    ("e2m1_g32", WHOLE, "small groups"),
    ("uint4_g32_m", WHOLE, "blocks"),
    ("int4_g128", {"n": 64, "k": 600}, "rows"),
    ("nf4_g64", {"n": 40, "k": 1024}, "rows"),
]
"""How codes are stored where there is a fragment, and whether a fast template reads them: 5 % of padding at most, groups of
whole steps, rows of x that are whole pieces of 16 bytes."""


def expected(name: str, k: int, stored: str, high: int) -> str:
    """Which template answers, on an arch with a fragment and Gluon."""
    if high > 128 or (stored == "rows" and high > 16):
        return "dequant"
    if stored not in ("fast", "small groups") or high > 32:
        return "gemv" if stored == "rows" else "gemm"
    return "gemv_half" if high == 1 and stored == "fast" and "int8" not in name else "gemv_mma"


@pytest.mark.parametrize("high", [1, 8, 16, 32, 64, 128, 4096])
@pytest.mark.parametrize("target", ARCHES)
@pytest.mark.parametrize(("name", "sizes", "stored"), NAMED, ids=str)
def test_which_template_answers(name: str, sizes: dict[str, int], stored: str, target: str, high: int) -> None:
    """Fast ones for few rows of what they decode; gemm to M = 128 for all in blocks; on rows gemv to 16; else dequantize."""
    problem, arch = Problem(m=bucket(high), format=named(name), **sizes), ARCHES[target]
    chosen = pick(lower(problem), arch)
    if arch.fragment is None:
        assert chosen.template == ("gemv" if high == 1 else "dequant")
        return
    assert chosen.template == expected(name, sizes["k"], stored, high)
    slow = pick(lower(problem), replace(arch, features=arch.features - {"gluon"}))
    assert slow.template == (chosen.template if chosen.template not in FAST else "gemm"), "what another Triton runs"


def test_wide_codes_in_bf16_are_for_gemm() -> None:
    """They do not fit the mantissa that pairs are decoded in."""
    for m in ((1, 1), (2, 8), (17, 32)):
        problem = Problem(m=m, format=named("int8_g64"), x=BF16, y=BF16, **WHOLE)
        assert pick(lower(problem), SM_80).template == "gemm"


def test_one_row_of_bf16_goes_to_matrix_cores() -> None:
    """Chains of halves need f16."""
    problem = Problem(m=(1, 1), format=named("int4_g128"), x=BF16, y=BF16, **WHOLE)
    assert pick(lower(problem), SM_80).template == "gemv_mma"


@pytest.mark.parametrize(
    ("m", "k", "n", "template", "without"),
    [
        ((2, 8), 28672, 8192, "gemv_mma", "gemv_mma"),
        ((9, 16), 4096, 28672, "gemv_mma", "gemv_mma"),
        ((9, 16), 4224, 28672, "gemv_mma", "gemm"),
        ((17, 32), 2048, 2048, "gemv_mma", "gemv_mma"),
        ((17, 32), 2048, 2064, "gemm", "gemm"),
    ],
    ids=str,
)
def test_gemm_takes_over_where_every_program_would_read_too_much_of_x(
    m: tuple[int, int], k: int, n: int, template: str, without: str
) -> None:
    """Which comes later where teams share x."""
    for target, expected in (("sm_90", template), ("sm_80", without)):
        assert pick(lower(Problem(m=m, n=n, k=k, format=named("int4_g128"))), ARCHES[target]).template == expected


@pytest.mark.parametrize(
    ("form", "m", "k", "n", "expected"),
    [
        ("int4_g128", (9, 16), 28672, 8192, (2, 32, 4, 0)), ("int4_g128", (9, 16), 14336, 4096, (2, 32, 8, 0)),
        ("int4_g128", (9, 16), 4096, 4096, (1, 16, 8, 0)), ("int4_g128", (9, 16), 8960, 1536, (1, 16, 8, 0)),
        ("int4_g128", (2, 8), 8192, 28672, (1, 32, 4, 0)), ("mxfp4", (9, 16), 8192, 28672, (2, 64, 4, 128)),
        ("nf4_g64", (9, 16), 8192, 28672, (2, 64, 4, 128)), ("nf4_g64", (17, 32), 8192, 28672, (4, 64, 2, 0)),
        ("nf4_g64", (1, 1), 8192, 28672, (1, 32, 4, 128)), ("int8_g128", (9, 16), 8192, 28672, (2, 32, 4, 0)),
    ],
)  # fmt: skip
def test_teams_share_the_rows_of_x(form: str, m: tuple[int, int], k: int, n: int, expected: tuple[int, int, int, int]) -> None:
    """Where outputs are left for every SM; a warp has as many words in a step of 64 k as in one of 128."""
    chosen = pick(lower(Problem(m=m, n=n, k=k, format=named(form))), ARCHES["sm_90"])
    assert (chosen.teams, chosen.block_n, chosen.warps, chosen.maxnreg) == expected
    assert pick(lower(Problem(m=m, n=n, k=k, format=named(form))), ARCHES["sm_80"]).teams == 1


@pytest.mark.parametrize("m", [m for m in BUCKETS if m[1] <= 32], ids=str)
@pytest.mark.parametrize(("k", "n"), [(1536, 256), (4096, 4096), (8192, 28672), (28672, 8192), (11008, 4096)])
@pytest.mark.parametrize("name", ["int4_g32", "int4_g16", "mxfp4", "nvfp4", "mxfp8"])
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_120"])
def test_few_rows_of_small_groups_are_not_for_gemm(target: str, name: str, k: int, n: int, m: tuple[int, int]) -> None:
    """It scales them weight by weight, at several times the operations: no size of x is worth that. Pairs of weights are."""
    many = target == "sm_90" and m == (17, 32) and "int4" in name and n * k > 2**22
    chosen = pick(lower(Problem(m=m, n=n, k=k, format=named(name))), ARCHES[target])
    assert chosen.template in ("gemv_mma", *["gemm_wgmma"] * many)


@pytest.mark.parametrize("target", ["sm_75", "gfx942", "portable"])
@pytest.mark.parametrize("m", BUCKETS, ids=str)
@pytest.mark.parametrize("name", ["int4_g128", "nf4_g64"])
def test_fragments_are_dequantized_without_an_instruction_for_them(name: str, m: tuple[int, int], target: str) -> None:
    """One row too: gemm multiplies on matrix cores, whatever M is."""
    layout = fragment_order(named(name), M16K16, 64, 1024)
    problem = Problem(m=m, n=64, k=1024, format=named(name), layout=layout)
    assert pick(lower(problem), ARCHES[target]).template == "dequant"


@pytest.mark.parametrize("m", [m for m in BUCKETS if m[1] <= 128], ids=str)
@pytest.mark.parametrize("name", ["int4_g32", "int4_g50", "nf4_g64", "uint4_g128_z", "uint4_row_m", "int8_g16"])
@pytest.mark.parametrize(("k", "n"), [(1536, 256), (4096, 4096), (8192, 28672), (28672, 8192), (11008, 4096)])
@pytest.mark.parametrize("target", ["sm_86", "sm_90", "sm_100"])
def test_programs_of_a_gemm_share_whole_steps(target: str, k: int, n: int, name: str, m: tuple[int, int]) -> None:
    arch = replace(ARCHES[target], features=ARCHES[target].features - {"gluon"})
    chosen = pick(lower(Problem(m=m, n=n, k=k, format=named(name))), arch)
    steps = -(-k // chosen.block_k)
    assert chosen.template == "gemm"
    assert steps % chosen.split_k == 0
    assert chosen.block_n % (16 * chosen.warps * chosen.teams) == 0
    assert chosen.block_m in (16, 32, 64, 128)


FEW = ["int4_g128", "int4_g64", "int4_row", "uint4_g128", "int8_g128", "int2_g128", "evens_g256"]


@pytest.mark.parametrize("x", [F16, BF16], ids=str)
@pytest.mark.parametrize("m", [m for m in BUCKETS if m[1] <= 32], ids=str)
@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize(("k", "n"), [(1536, 256), (256, 16), (4096, 4096), (8192, 28672), (28672, 8192), (11008, 4096)])
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_120"])
def test_fast_schedules_keep_what_their_templates_need(
    target: str, k: int, n: int, name: str, m: tuple[int, int], x: DType
) -> None:
    """Whole quads and one scale a step; clusters that hardware has, of programs with steps; 48 KB that a text may declare."""
    form = OWN.get(name) or named(name)
    program = lower(Problem(m=m, n=n, k=k, format=form, x=x, y=x))
    chosen = pick(program, ARCHES[target])
    if chosen.template not in FAST:
        return
    group = padded_group(program.problem, layout_for(form, ARCHES[target], n, k))
    assert chosen.block_k in (64, 128)
    assert group % chosen.block_k == 0 or (chosen.template == "gemm_wgmma" and chosen.block_k <= 4 * group)
    assert chosen.overlap == int("dependent_launch" in ARCHES[target].features)
    steps = -(-k // chosen.block_k)
    if chosen.template == "gemv_half":
        assert (m, x, form.bits <= 4) == ((1, 1), F16, True)
        assert 1 <= chosen.split_k <= (8 if "cluster" in ARCHES[target].features else 1)
        assert (chosen.split_k > 1) == (chosen.sum_at == "shared")
        assert chosen.warps * (chosen.split_k - 1) < max(steps, 2), "the last program of a cluster has a step"
    elif chosen.template == "gemm_wgmma":
        assert (target, m[0] > 8, chosen.block_m) == ("sm_90", True, m[1])
    else:
        assert chosen.block_m in (8, 16, 32)
        assert chosen.block_m >= min(m[1], 32 if "wgmma" in ARCHES[target].features else 16), "four tiles spill elsewhere"
        assert chosen.ring >= 2
        assert chosen.ring * chosen.warps * chosen.block_m * 128 <= 48 * 1024


@pytest.mark.parametrize(("target", "warps", "split"), [("sm_80", 8, 1), ("sm_89", 8, 1), ("sm_90", 2, 8), ("sm_120", 2, 8)])
def test_few_outputs_spread_k_over_more_programs_where_these_form_clusters(target: str, warps: int, split: int) -> None:
    """Elsewhere a program has all of k, and the warps for it."""
    chosen = pick(lower(problem_of(m=1, n=512, k=8192, format="int4_g128")), ARCHES[target])
    assert (chosen.template, chosen.warps, chosen.split_k) == ("gemv_half", warps, split)


def scheduled(schedule: Schedule, n: int = 64, k: int = 1024, **problem: object) -> object:
    """A schedule applied to codes in rows, where the problem names no other layout."""
    form = problem.get("format", named("int4_g128"))
    asked = {"m": (1, 1), "n": n, "k": k, "format": form, "layout": rows(n, k, form.bits, 16), **problem}
    return apply(lower(Problem(**asked)), schedule, SM_80)


ROWS = {"m": (2, 16)}
LEFT = {"unit": "mma", "side": "left", "block_n": 64, "block_k": 128}
FRAGMENTS = {"layout": fragment_order(named("int4_g128"), M16K16, 64, 1024)}
THREE = Layout.parse("n8@96,k3@32,k8@4;4/32")


@pytest.mark.parametrize(
    ("schedule", "problem", "message"),
    [
        ({"block_k": 48}, {}, "block_k=48 is not a multiple of 32"),
        ({"block_k": 128}, {"format": named("int4_g50")}, "take scale_at=weight"),
        ({"block_k": 2048, "unit": "mma"}, ROWS, "mix scales: take scale_at=weight, or a block_k that divides the group"),
        ({"zero_at": "accumulator", "unit": "mma"}, ROWS, "zero_at=accumulator needs unit=lanes"),
        ({"zero_at": "accumulator", "scale_at": "weight"}, {}, "take zero_at=weight"),
        ({"zero_at": "accumulator"}, {"x": BF16}, "take zero_at=weight"),
        ({"convert_at": "global"}, {}, "convert_at=global with unit=lanes: weights are decoded to registers"),
        ({"convert_at": "global", "unit": "mma"}, ROWS, "convert_at=global with unit=mma: weights are decoded to registers"),
        ({"unit": "vendor", "convert_at": "global"}, {}, "unit=vendor multiplies scaled weights: take scale_at=weight"),
        ({"unit": "vendor", "scale_at": "weight"}, {}, "convert_at=register with unit=vendor"),
        ({}, FRAGMENTS, "block_n=1 is not a multiple of 16, what a block of the layout holds: use one"),
        ({"block_n": 16, "block_k": 32}, FRAGMENTS, "block_k=32 is not a multiple of 64, what a block of the layout holds"),
        (
            {"unit": "mma", "side": "left", "block_n": 16, "block_k": 256},
            FRAGMENTS,
            "block_k=256 does not divide group 128: take scale_at=weight, or a block_k that divides the group",
        ),
        ({"unit": "mma", "side": "left"}, ROWS, "is one of rows: w as the left operand is read in the order of its fragments"),
        ({}, {"n": 8, "k": 24, "layout": THREE}, "rows of layout n8@96,k3@32,k8@4;4/32 have 3: take unit=vendor"),
        ({}, ROWS, "unit=lanes multiplies one row of x, not 2…16: take unit=mma"),
        ({"unit": "mma"}, {}, "unit=mma multiplies several rows of x, not one: take unit=lanes or vendor"),
        ({"side": "left"}, {}, "side=left with unit=lanes: only a matrix instruction has sides"),
        ({"split_k": 2}, {}, "split_k=2 with unit=lanes and sum_at=global: mma programs share k through global memory"),
        ({"split_k": 2, "unit": "halves"}, FRAGMENTS, "with unit=halves and sum_at=global: mma programs share k through global"),
        (
            {"split_k": 2, "unit": "mma", "side": "left", "sum_at": "shared"},
            FRAGMENTS,
            "halves through the shared memory of a cluster",
        ),
        (
            {"split_k": 3, **LEFT},
            FRAGMENTS,
            "split_k=3 with 8 steps along k: each program needs one, and programs whose sums meet",
        ),
        ({"split_k": 16, **LEFT}, FRAGMENTS, "split_k=16 with 8 steps along k"),
        (
            {"split_k": 16, "unit": "halves", "block_n": 16, "sum_at": "shared"},
            FRAGMENTS,
            "split_k=16 with 8 steps along k: each program needs one",
        ),
        ({"unit": "halves"}, ROWS | FRAGMENTS, "unit=halves multiplies one row of x, not 2…16: take unit=mma"),
        ({"unit": "halves", "side": "left"}, FRAGMENTS, "side=left with unit=halves: only a matrix instruction has sides"),
        ({"zero_at": "accumulator", "block_k": 1024}, {"format": named("uint4_z")}, "q - z formed on the weight, exactly"),
        ({"block_k": 1024}, {"format": named("uint4_m")}, "subtracted after scaling, so take both alike"),
        ({"zero_at": "accumulator", "scale_at": "weight"}, {"format": named("uint4_m")}, "so take both alike"),
    ],
)
def test_choices_that_do_not_fit_the_problem_are_refused(schedule: dict, problem: dict, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        scheduled(Schedule(template="gemv", **schedule), **problem)
    assert message in str(caught.value)


ONE = "n64@32,k8@4;4/32"


@pytest.mark.parametrize(
    ("layout", "k", "m", "template"),
    [
        (ONE, 8, (1, 1), "dequant"),
        (ONE, 8, (2, 16), "gemv"),
        (ONE, 8, (17, 32), "dequant"),
        ("n64@96,k3@32,k8@4;4/32", 24, (1, 1), "dequant"),
        ("n64@160,k8@4,k5@32;4/32", 40, (1, 1), "dequant"),
        ("n64@128,k8@4,k4@32;4/32", 32, (1, 1), "gemv"),
        ("n2@4096,n32@128,k8@4,k4@32;4/32", 32, (1, 1), "dequant"),
        ("n2@4096,n32@128,k8@4,k4@32;4/32", 32, (2, 16), "dequant"),
    ],
)
def test_the_rules_answer_for_rows_of_any_number_of_words(layout: str, k: int, m: tuple[int, int], template: str) -> None:
    """One word a row, three, five; rows in another order. What no template of rows reads is dequantized."""
    problem = Problem(m=m, n=64, k=k, format=named("int4_g128"), layout=Layout.parse(layout))
    assert pick(lower(problem), SM_80).template == template
    assert apply(lower(problem), pick(lower(problem), SM_80), SM_80)


@pytest.mark.parametrize("packed", [(8, 1024, 4), (64, 512, 4), (64, 1024, 2)])
def test_a_layout_that_does_not_hold_the_weight_is_refused(packed: tuple[int, int, int]) -> None:
    with pytest.raises(ScheduleError, match=r"does not hold int4_g128 codes \[64, 1024\]: pack again"):
        scheduled(Schedule(template="gemv"), layout=rows(*packed))


@pytest.mark.parametrize(
    ("schedule", "arch", "message"),
    [
        ({"warps": 64}, SM_80, "warps=64 is 2048 threads; sm_80 runs powers of two up to 1024"),
        ({"warps": 3}, SM_80, "powers of two"),
        ({"block_n": 3}, SM_80, "block of 3 along n is not a power of two"),
        (
            {"block_n": 4096, "block_k": 4096, "warps": 1},
            SM_80,
            "registers a thread, sm_80 has 255: take smaller blocks or more warps",
        ),
    ],
)
def test_verify_names_the_limit(schedule: dict, arch: object, message: str) -> None:
    chosen = Schedule(template="gemv", **{"scale_at": "weight", **schedule})
    with pytest.raises(ScheduleError) as caught:
        verify(scheduled(chosen), arch, chosen.warps * chosen.teams)
    assert message in str(caught.value)


def test_verify_names_the_limit_of_shared_memory() -> None:
    """Of words too, which wait beside x: 128 rows of x and 128 outputs by 128 k are 40 KB."""
    chosen = Schedule(
        template="gemm_wgmma", block_m=128, block_n=128, unit="mma", side="left", scale_at="weight", x_at="shared",
        w_at="shared", teams=2, ring=5,
    )  # fmt: skip
    program = lower(replace(problem_of(m=128, n=256, k=512, format="int4_g128"), m=(65, 128)))
    made(program, chosen, ARCHES["sm_90"])
    with pytest.raises(ScheduleError, match=r"the tiles need 245760 bytes of shared memory, sm_90 has 232448"):
        made(program, replace(chosen, ring=6), ARCHES["sm_90"])


def test_a_call_moves_each_byte_once() -> None:
    """Codes half a byte, scales two bytes a group, x and y two bytes an element."""
    program = scheduled(Schedule(template="gemv", block_n=4, block_k=2048), n=256, k=1024)
    assert bytes_moved(program, 1) == {"codes.stored": 256 * 512, "scale.stored": 256 * 8 * 2, "x": 2048, "y": 512}
    assert floor_us(program, replace(SM_80, bandwidth_gbs=1000), 1) == pytest.approx((256 * 512 + 4096 + 2048 + 512) / 1e6)


@pytest.mark.parametrize("name", ["uint4_g128_z", "uint4_g128_m"])
def test_zeros_are_moved_once_too(name: str) -> None:
    zero_at = "accumulator" if named(name).zero_after_scale else "weight"
    program = scheduled(Schedule(template="gemv", block_n=4, block_k=2048, zero_at=zero_at), k=1024, format=named(name))
    moved = bytes_moved(program, 1)
    assert moved["zero.stored"] == moved["scale.stored"] == 64 * 8 * 2


@pytest.mark.parametrize("name", ["int4_g128", "nf4_g64"])
@pytest.mark.parametrize(("bucketed", "rows"), [((2, 16), 3), ((33, 64), 40), ((129, 2**31 - 1), 500)], ids=str)
def test_a_call_moves_the_rows_that_it_has(name: str, bucketed: tuple[int, int], rows: int) -> None:
    """Not the bucket's, nor what lives between the functions of a kernel: a floor is what no kernel can do without."""
    program = lower(Problem(m=bucketed, n=64, k=1024, format=named(name)))
    moved = bytes_moved(apply(program, pick(program, SM_80), SM_80), rows)
    assert (moved["x"], moved["y"]) == (rows * 1024 * 2, rows * 64 * 2)
    assert set(moved) == {"codes.stored", "scale.stored", "x", "y"} | ({"codebook"} if name == "nf4_g64" else set())


def test_scales_in_f32_count_four_bytes() -> None:
    program = scheduled(Schedule(template="gemv"), format=Format("int4", origin=-8.0, group=64, scale=F32))
    assert bytes_moved(program, 1)["scale.stored"] == 64 * 16 * 4


@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64", "uint4_g32_m", "int3_g64"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_every_m_is_answered_by_one_schedule_on_matrix_cores(arch: str, form: str) -> None:
    chosen = pick(lower(Problem(m=EVERY, n=4096, k=4096, format=named(form))), ARCHES[arch])
    assert (chosen.unit, chosen.split_k, chosen.template in FAST) == ("mma", 1, False)


@pytest.mark.parametrize("arch", ["portable", "sm_75", "gfx942"])
def test_every_m_is_refused_where_only_the_vendor_multiplies_many_rows(arch: str) -> None:
    problem = Problem(m=EVERY, n=64, k=256, format=named("int4_g128"))
    with pytest.raises(ScheduleError, match=r"no kernel for every M \(batch-invariant\)"):
        pick(lower(problem), ARCHES[arch])
    dense = pick(lower(replace(problem, m=(129, 2**31 - 1))), ARCHES[arch])
    with pytest.raises(ScheduleError, match="unit=vendor adds up in an order that depends on M: for every M take unit=mma"):
        apply(lower(problem), dense, ARCHES[arch])


def test_rows_too_far_for_offsets_of_32_bits_are_left_to_gemm() -> None:
    problem = Problem(m=(2, 8), n=256, k=2**28, format=named("uint4_g128_z"))
    assert pick(lower(problem), ARCHES["sm_90"]).template == "gemm"
    assert pick(lower(replace(problem, k=2**27)), ARCHES["sm_90"]).template == "gemv_mma"


def test_outputs_beyond_the_programs_of_a_grid_are_left_to_the_vendor() -> None:
    problem = Problem(m=(33, 64), n=64 * 65535, k=256, format=named("int4_g128"))
    assert pick(lower(problem), ARCHES["sm_80"]).template == "gemm"
    assert pick(lower(replace(problem, n=problem.n + 1)), ARCHES["sm_80"]).template == "dequant"


@pytest.mark.parametrize("options", [{"activation": "gelu"}, {"residual": True}, {"activation": "silu_mul"}])
@pytest.mark.parametrize("m", [(1, 1), (2, 8)])
def test_what_is_done_to_sums_is_done_by_fast_templates_too(m: tuple[int, int], options: dict[str, object]) -> None:
    """But for halves, which store sums as they are, and for a residual of many rows."""
    plain = Problem(m=m, n=4096, k=4096, format=named("int4_g128"))
    assert pick(lower(plain), ARCHES["sm_90"]).template in FAST
    assert pick(lower(replace(plain, **options)), ARCHES["sm_90"]).template == "gemv_mma"
    many = pick(lower(replace(plain, m=(257, 512), **options)), ARCHES["sm_90"]).template
    assert many == ("dequant" if "residual" in options else "gemm_wgmma")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"activation": "gelu", "residual": True}, " activation=gelu residual=1"),
        ({"activation": "silu_mul"}, " activation=silu_mul"),
        ({}, ""),
    ],
)
def test_a_problem_with_an_epilogue_reads_back(options: dict[str, object], text: str) -> None:
    problem = Problem(m=(1, 8), n=64, k=256, format=named("int4_g128"), bias=True, **options)
    assert str(problem).endswith(f"bias=1{text}")
    assert Problem.parse(str(problem)) == problem


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "tanh"}, "activation='tanh' is not known: use relu, gelu"),
        ({"activation": "silu_mul", "n": 63}, "silu_mul takes outputs in pairs and adds no residual: n=63"),
        ({"activation": "silu_mul", "residual": True}, "takes outputs in pairs and adds no residual: n=64, residual=1"),
    ],
)
def test_an_epilogue_that_is_none_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        Problem(**{"m": (1, 8), "n": 64, "k": 256, "format": named("int4_g128"), **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"template": "gemv_mma", "w_at": "register"}, "scale_at=weight: gemv_mma scales the other"),
        ({"w_at": "register"}, "w_at=register: words wait in shared memory for gemm_wgmma, and for no other template"),
        ({"template": "gemm"}, "w_at=shared: words wait in shared memory for gemm_wgmma, and for no other template"),
        ({"template": "dgrad_wgmma"}, "w_at=shared: words wait in shared memory for gemm_wgmma, and for no other template"),
        ({"template": "gemm_wgmma", "scale_at": "accumulator"}, "scale_at=accumulator: gemm_wgmma scales the other"),
        (
            {"template": "gemv", "side": "right"},
            "x_at=shared with side=right: x waits in shared memory where w is the left operand",
        ),
    ],
    ids=str,
)
def test_choices_that_contradict_a_template_are_refused(changes: dict[str, object], message: str) -> None:
    places = {"scale_at": "weight", "x_at": "shared", "w_at": "shared"}
    chosen = Schedule(template="gemm_wgmma", block_m=64, block_n=128, unit="mma", side="left", **places)
    problem = replace(problem_of(m=64, n=256, k=512, format="int4_g128"), m=(33, 64))
    with pytest.raises(ScheduleError, match=re.escape(message)):
        apply(lower(problem), replace(chosen, **changes), ARCHES["sm_90"])


@pytest.mark.parametrize(("form", "first"), [("int4_g128", 17), ("uint4_g128_z", 17), ("int2_g128", 17), ("int8_g128", 17)])
def test_many_rows_take_wgmma_where_it_is(form: str, first: int) -> None:
    """To 2048 rows, from where gemv_mma reads too much of x; on other archs, and beyond, what was there before."""
    for m in BUCKETS:
        problem = replace(problem_of(m=m[0], n=8192, k=8192, format=form), m=m)
        chosen = pick(lower(problem), ARCHES["sm_90"])
        assert (chosen.template == "gemm_wgmma") == (first <= m[0] <= 2048), m
        assert pick(lower(problem), SM_80).template != "gemm_wgmma"
        assert pick(lower(problem), replace(ARCHES["sm_90"], features=frozenset({"wgmma"}))).template != "gemm_wgmma"
        if chosen.template == "gemm_wgmma":
            made(lower(problem), chosen, ARCHES["sm_90"])
            assert chosen.split_k == 1 or -(-m[1] // chosen.block_m) * 8192 // chosen.block_n * chosen.split_k <= 2 * 132
            assert 2 <= chosen.ring <= 8
            programs = 2 if chosen.maxnreg else 1
            taken = chosen.ring * chosen.block_k * (2 * chosen.block_m + chosen.block_n * problem.format.bits // 8)
            assert programs * (taken + 10 * 1024) <= 227 * 1024, "barriers, and what Triton stores through, come on top"


@pytest.mark.parametrize(
    ("m", "n", "k", "template"),
    [
        ((33, 64), 14336, 4096, "gemm_wgmma"),  # a wave of programs
        ((33, 64), 1536, 1536, "gemm_wgmma"),  # few steps
        ((17, 32), 1536, 1536, "gemv_mma"),  # a small layer
        ((17, 32), 4096, 4096, "gemm"),
        ((17, 32), 8192, 8192, "gemm_wgmma"),
        ((33, 64), 4096, 4096, "gemm"),
        ((33, 64), 8192, 8192, "gemm_wgmma"),
        ((65, 128), 4096, 4096, "gemm_wgmma"),
        ((65, 128), 1536, 8960, "gemm"),
        ((65, 128), 8192, 28672, "gemm_wgmma"),
        ((33, 64), 28672, 8192, "gemm_wgmma"),  # a wave of wide tiles
        ((33, 64), 128, 128, "gemm_wgmma"),  # one step
        ((129, 256), 128, 64, "gemm_wgmma"),
        ((129, 256), 128 * 65535, 128, "gemm_wgmma"),
        ((129, 256), 128 * 65536, 128, "dequant"),  # more columns of tiles than a grid has
    ],
    ids=str,
)
def test_where_programs_would_share_k_gemm_has_more_of_them(m: tuple[int, int], n: int, k: int, template: str) -> None:
    problem = replace(problem_of(m=m[0], n=n, k=k, format="int4_g128"), m=m)
    assert pick(lower(problem), ARCHES["sm_90"]).template == template


@pytest.mark.parametrize(
    ("m", "n", "k", "teams", "rows"),
    [
        ((33, 64), 28672, 8192, 4, 64),
        ((65, 128), 28672, 8192, 4, 128),
        ((65, 128), 28672 + 128, 8192, 2, 128),  # not in tiles of 256
        ((17, 32), 8192, 28672, 4, 32),  # wide tiles that share k
        ((65, 128), 8192, 28672, 4, 128),
        ((65, 128), 8192, 8192, 2, 128),  # tiles that share k
        ((129, 256), 28672, 8192, 2, 256),
        ((65, 128), 14336, 4096, 2, 128),  # a wave of narrower tiles
    ],
    ids=str,
)
def test_four_teams_where_that_makes_one_wave(m: tuple[int, int], n: int, k: int, teams: int, rows: int) -> None:
    problem = replace(problem_of(m=m[0], n=n, k=k, format="int4_g128"), m=m)
    chosen = pick(lower(problem), ARCHES["sm_90"])
    assert (chosen.template, chosen.teams, chosen.block_n, chosen.block_m) == ("gemm_wgmma", teams, 64 * teams, rows)


@pytest.mark.parametrize("form", ["nf4_g64", "e2m1_g64", "mxfp4", "nvfp4", "uint4_g32_m", "int3_g128"])
def test_many_rows_of_other_formats_do_not(form: str) -> None:
    problem = replace(problem_of(m=129, n=4096, k=4096, format=form), m=(129, 256))
    assert pick(lower(problem), ARCHES["sm_90"]).template == "dequant"
