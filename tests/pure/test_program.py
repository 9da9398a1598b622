"""Programs mean what the oracle says, before and after every schedule; the kept rule; where kernels are cut; `verify`."""

from __future__ import annotations

import ast
import itertools
from dataclasses import replace

import activations
import networkx as nx
import numpy as np
import oracle
import pytest
import weights
from arrays import thinned
from hypothesis import assume, given
from hypothesis import strategies as st

from w4gen.codegen.render import render
from w4gen.errors import FormatError, ScheduleError, ShapeError
from w4gen.formats import named
from w4gen.ir.interpret import interpret, offline
from w4gen.ir.layout import planes, rows, unpack
from w4gen.ir.lower import lower
from w4gen.ir.problem import Problem
from w4gen.ir.program import Builder, Program, rewrite
from w4gen.ir.rounding import roundings
from w4gen.ir.show import show
from w4gen.ir.tile import Const, Convert, Dot, Input, Pack, Pad, Reduce, Slice, Space, Unpack
from w4gen.ir.types import BF16, F16, F32, Format
from w4gen.ir.verify import verify
from w4gen.schedule.apply import apply
from w4gen.schedule.arch import ARCHES, M16K16, Arch
from w4gen.schedule.rewrite import padded_group
from w4gen.schedule.rules import pick
from w4gen.schedule.schedule import Schedule
from w4gen.schedule.stored import fragment_order, layout_for

PORTABLE, SM_80, SM_90 = ARCHES["portable"], ARCHES["sm_80"], ARCHES["sm_90"]
FAMILIES = [
    (named("int4"), oracle.INT4),
    (named("nf4"), oracle.NF4),
    (Format("uint2", bits=2), [0.0, 1.0, 2.0, 3.0]),
    (named("int8"), oracle.INT8),
    (named("e2m1"), oracle.E2M1),
    (named("uint4_z"), oracle.UINT4),
    (named("uint4_zf"), oracle.UINT4),
    (named("uint4_m"), oracle.UINT4),
    (named("int8_z"), oracle.INT8),
    (named("int4_m"), oracle.INT4),
    (Format("int3", bits=3, origin=-4.0), [code - 4.0 for code in range(8)]),
    (Format("uint7", bits=7), [float(code) for code in range(128)]),
    (Format("learned", bits=6, codebook=tuple(code**2 / 64 for code in range(64))), [code**2 / 64 for code in range(64)]),
    (Format("e2m3", bits=6, minifloat="e2m3"), oracle.small_float(2, 3)),
    (Format("e2m2", bits=5, minifloat="e2m2"), oracle.small_float(2, 2)),
    (named("nf4_m"), oracle.NF4),
]


MORE = ["uint4_g128_z", "uint4_g32_m", "uint4_g64_zf", "int8_g128", "int8_g64_z", "e2m1_g32", "nf4_g64_m", "uint4_row_m_f32"]


def program_of(**changes: object) -> Program:
    return lower(Problem(**{"m": (1, 1), "n": 32, "k": 256, "format": named("int4_g128"), **changes}))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Problem, list[float]]:
    """Small problems of every kind that can be asked: formats, groups, ragged sizes, buckets, dtypes, bias, stored layouts."""
    form, values = draw(st.sampled_from(FAMILIES))
    group = draw(st.sampled_from([16, 32, 50, 64, 128, -1]))
    form = replace(form, group=group, scale=draw(st.sampled_from([F16, BF16, F32])))
    form = form if form.zero is None else replace(form, zero=draw(st.sampled_from([F16, BF16, F32])))
    n, k = draw(st.integers(1, 20)), draw(st.integers(1, 400))
    run = draw(st.sampled_from([None, 1, 4, 8, 16]))
    x = draw(st.sampled_from([F16, BF16]))
    m = draw(st.sampled_from([(1, 1), (2, 5), (2, 16)]))
    way = draw(st.sampled_from([rows, planes]))
    layout = way(n, k, form.bits, run) if run else None
    return Problem(m=m, n=n, k=k, format=form, layout=layout, x=x, y=x, bias=draw(st.booleans())), values


@st.composite
def schedules(draw: st.DrawFn, problem: Problem) -> Schedule:
    """Any choice for gemv; some are not legal for the problem, and `apply` says so."""
    unit = "lanes" if problem.m == (1, 1) else "mma"
    layout = problem.layout or layout_for(problem.format, PORTABLE, problem.n, problem.k)
    granule = layout.narrowest.per_unit * (4 if unit == "lanes" else 1)
    return Schedule(
        template="gemv",
        unit=unit,
        block_m=1 if unit == "lanes" else 16,
        block_n=draw(st.sampled_from([1, 2, 8, 32])),
        block_k=granule * draw(st.sampled_from([1, 2, 4, 16])),
        scale_at=draw(st.sampled_from(["weight", "accumulator"])),
        zero_at=draw(st.sampled_from(["weight", "accumulator"])),
        convert_at=draw(st.sampled_from(["register", "register", "register", "global"])),
    )


AFFINE = [
    (named("int4"), oracle.INT4),
    (named("uint4"), oracle.UINT4),
    (named("int8"), oracle.INT8),
    (Format("uint2", bits=2), [0.0, 1.0, 2.0, 3.0]),
    (Format("halves", bits=2, step=0.5, origin=-1.0), [-1.0, -0.5, 0.0, 0.5]),
    (Format("evens", bits=1, step=2.0, origin=-2.0), [-2.0, 0.0]),
]


SMALL = [(named(name), oracle.VALUES[name]) for name in ("e2m1", "fp8_e4m3")]


def stored(draw: st.DrawFn, form: Format, m: tuple[int, int], x: object) -> Problem:
    """A problem whose codes are in the order of fragments, whole or ragged."""
    n, k = draw(st.integers(1, 150)), draw(st.integers(1, 600))
    layout = fragment_order(form, M16K16, n, k)
    return Problem(m=m, n=n, k=k, format=form, layout=layout, x=x, y=x, bias=draw(st.booleans()))


@st.composite
def gemms(draw: st.DrawFn) -> tuple[Problem, list[float], Schedule]:
    """Problems that the gemm template answers, of any format, with any tile and any number of programs that share k."""
    form, values = draw(st.sampled_from([each for each in FAMILIES + AFFINE if 32 % each[0].bits == 0]))
    form = replace(
        form, group=draw(st.sampled_from([16, 32, 48, 64, 128, 256, -1])), scale=draw(st.sampled_from([F16, BF16, F32]))
    )
    form = form if form.zero is None else replace(form, zero=draw(st.sampled_from([F16, BF16, F32])))
    m = draw(st.sampled_from([(1, 1), (2, 5), (2, 40)]))
    problem = stored(draw, form, m, draw(st.sampled_from([F16, BF16])))
    least = problem.layout.block["k"]
    block_k = least * draw(st.sampled_from([1, 2]))
    steps = -(-problem.k // block_k)
    warps = draw(st.sampled_from([4, 8]))
    on_sums = padded_group(problem, problem.layout) % block_k == 0 and draw(st.booleans())
    placed = "accumulator" if on_sums else "weight"
    schedule = Schedule(
        template="gemm",
        unit="mma",
        side="left",
        block_m=draw(st.sampled_from([16, 32, 64, 128])),
        block_n=128 if warps == 8 else draw(st.sampled_from([64, 128])),
        block_k=block_k,
        split_k=draw(st.sampled_from([share for share in range(1, steps + 1) if steps % share == 0])),
        scale_at=placed,
        zero_at=placed if form.zero_after_scale else "weight",
        warps=warps,
        stages=draw(st.sampled_from([1, 2, 3])),
        vector=draw(st.sampled_from([2, 4])),
        maxnreg=draw(st.sampled_from([0, 128])),
        overlap=draw(st.sampled_from([0, 1])),
    )
    return problem, values, schedule


@st.composite
def fast(draw: st.DrawFn) -> tuple[Problem, list[float], Schedule]:
    """Problems that the fast templates answer: one row in halves, with or without a cluster, or up to 32 rows on matrix cores."""
    template = draw(st.sampled_from(["gemv_mma", "gemv_half"]))
    halves = template == "gemv_half"
    form, values = draw(st.sampled_from([each for each in AFFINE if each[0].bits < 8] if halves else AFFINE + SMALL))
    groups = [64, 128, 256, 512, -1] if halves else [16, 32, 64, 128, 256, 512, -1]
    form = replace(form, group=draw(st.sampled_from(groups)), scale=draw(st.sampled_from([F16, BF16, F32])))
    m = (1, 1) if halves else draw(st.sampled_from([(1, 1), (2, 8), (9, 16), (17, 32)]))
    x = F16 if halves or (form.bits == 8 and form.affine) else draw(st.sampled_from([F16, BF16]))
    problem = stored(draw, form, m, x)
    group, least, held = padded_group(problem, problem.layout), problem.layout.block["k"], problem.layout.size("k")
    whole = [size for size in (64, 128, 256) if size % least == held % size == 0]
    sizes = [size for size in whole if group % size == 0 or (not halves and size % group == 0)]
    assume(sizes)
    block_k = draw(st.sampled_from(sizes))
    split = min(draw(st.sampled_from([1, 2, 3, 8])), -(-problem.k // block_k)) if halves else 1
    schedule = Schedule(
        template=template,
        unit="halves" if halves else "mma",
        side="right" if halves else "left",
        block_m=1 if halves else 8 * -(-m[1] // 8),
        block_n=32 if not halves and problem.layout.size("n") % 32 == 0 and draw(st.booleans()) else 16,
        block_k=block_k,
        split_k=split,
        sum_at="shared" if split > 1 else "global",
        warps=draw(st.sampled_from([1, 2, 4, 8])),
        stages=draw(st.sampled_from([1, 2, 3])),
        ring=2 if halves else draw(st.sampled_from([2, 3, 8])),
        overlap=draw(st.sampled_from([0, 1])),
    )
    return problem, values, schedule


@st.composite
def vendors(draw: st.DrawFn) -> tuple[Problem, list[float], Schedule]:
    """Problems in any layout, in which units hold both n and k, with any block of the weight."""
    form, values = draw(st.sampled_from(FAMILIES))
    form = replace(form, group=draw(st.sampled_from([3, 16, 50, 64, -1])), scale=draw(st.sampled_from([F16, BF16, F32])))
    form = form if form.zero is None else replace(form, zero=draw(st.sampled_from([F16, BF16, F32])))
    kind = draw(st.sampled_from(["any", "any", "rows", "fragments"]))
    if kind == "any" and 32 % form.bits == 0:
        layout = draw(weights.layouts((form.bits,)))
        n, k = (draw(st.integers(max(1, layout.size(axis) // 2), layout.size(axis))) for axis in "nk")
    else:
        n, k = draw(st.integers(1, 40)), draw(st.integers(1, 300))
        fragments = kind == "fragments" and 32 % form.bits == 0
        way = draw(st.sampled_from([rows, planes]))
        layout = fragment_order(form, M16K16, n, k) if fragments else way(n, k, form.bits, 16)
    x = draw(st.sampled_from([F16, BF16]))
    problem = Problem(m=(2, 5), n=n, k=k, format=form, layout=layout, x=x, y=x, bias=draw(st.booleans()))
    schedule = Schedule(
        template="dequant",
        unit="vendor",
        convert_at="global",
        scale_at="weight",
        zero_at="weight",
        block_n=draw(st.sampled_from([1, 4, 32])),
        block_k=draw(st.sampled_from([16, 128, 512])),
    )
    return problem, values, schedule


@given(st.data())
def test_a_logical_program_gives_the_truth(data: st.DataObject) -> None:
    problem, values = data.draw(problems())
    case = data.draw(weights.extremes(problem, values))
    y = interpret(lower(problem), case.data)
    assert y.shape == case.truth.shape
    assert not case.misses(y, 1)


@given(st.data())
def test_every_legal_schedule_keeps_the_meaning(data: st.DataObject) -> None:
    problem, values = data.draw(problems())
    schedule = data.draw(schedules(problem))
    try:
        program = verify(apply(lower(problem), schedule, PORTABLE), PORTABLE, schedule.warps * schedule.teams)
        assert ast.parse(render(program, schedule, "portable").source)
    except (ScheduleError, FormatError):
        assume(False)
    case = data.draw(weights.extremes(problem, values))
    assert not case.misses(interpret(program, case.data), roundings(program))


@given(st.data())
def test_every_gemm_and_every_dequantization_keeps_the_meaning(data: st.DataObject) -> None:
    """None is refused; the text of each is rendered, so that its ledger holds too."""
    problem, values, schedule = data.draw(gemms() | vendors() | fast())
    program = verify(apply(lower(problem), schedule, SM_90), replace(SM_90, registers=10**6), schedule.warps * schedule.teams)
    assert ast.parse(render(program, schedule, "sm_90").source)
    case = data.draw(weights.extremes(problem, values))
    assert not case.misses(interpret(program, case.data), roundings(program))


@given(st.data())
def test_the_rules_answer_for_any_layout(data: st.DataObject) -> None:
    """Rows of one word and of odd numbers of words among them, and words that hold several rows."""
    form, values = data.draw(st.sampled_from([each for each in FAMILIES if 32 % each[0].bits == 0]))
    form = replace(form, group=data.draw(st.sampled_from([3, 16, 64, -1])))
    layout = data.draw(weights.row_layouts(form.bits) | weights.layouts((form.bits,)))
    n, k = (data.draw(st.integers(max(1, layout.size(axis) - 5), layout.size(axis))) for axis in "nk")
    m = data.draw(st.sampled_from([(1, 1), (2, 5), (17, 18), (129, 130)]))
    program = lower(Problem(m=m, n=n, k=k, format=form, layout=layout, bias=data.draw(st.booleans())))
    schedule = pick(program, PORTABLE)
    scheduled = verify(apply(program, schedule, PORTABLE), PORTABLE, schedule.warps * schedule.teams)
    assert ast.parse(render(scheduled, schedule, "portable").source)
    case = weights.case(program.problem, values)
    assert not case.misses(interpret(scheduled, case.data), roundings(scheduled))


NAMES = ["int4_g128", "nf4_g64", "int4_g50", "nf4_row", "int4_g32_f32", "nf4_g16_bf16", *MORE]
ROWS = [(1, 1), (2, 8), (9, 16), (17, 32), (33, 64), (65, 128), (129, 140)]


@pytest.mark.parametrize(
    ("size", "name", "m", "x", "arch"),
    thinned([(64, 512), (47, 382), (37, 331)], NAMES, ROWS, [F16, BF16], ["portable", "sm_90"]),
)
def test_what_the_rules_pick_is_within_the_limit(
    size: tuple[int, int], name: str, m: tuple[int, int], x: object, arch: str
) -> None:
    (n, k), form = size, named(name)
    problem = Problem(m=m, n=n, k=k, format=form, x=x, y=x, bias=True)
    case = weights.case(problem, oracle.VALUES[form.name])
    program = lower(problem)
    schedule = pick(program, ARCHES[arch])
    program = apply(program, schedule, ARCHES[arch])
    assert case.error(interpret(program, case.data)) <= case.limit(roundings(program))


@pytest.mark.parametrize("arch", [PORTABLE, SM_90], ids=lambda arch: arch.name)
@pytest.mark.parametrize("m", [(1, 1), (2, 8), (17, 20), (129, 140)], ids=str)
@pytest.mark.parametrize("x", [F16, BF16], ids=str)
@pytest.mark.parametrize("name", ["uint4_g128_z", "uint4_g50_z", "int8_g64_z", "uint4_g64_zf"])
def test_codes_that_are_the_zero_give_exact_zeros(name: str, x: object, m: tuple[int, int], arch: Arch) -> None:
    """q - z is formed before scaling, whatever the scale and x are."""
    form = named(name)
    problem = Problem(m=m, n=16, k=256, format=form, x=x, y=x)
    case = weights.case(problem, oracle.VALUES[form.name])
    zero = np.rint(case.data["zero"])
    group = np.arange(256) // form.group
    data = case.data | {"zero": zero, "codes": (zero[:, group] - form.origin).astype(np.uint8)}
    program = lower(problem)
    assert not interpret(apply(program, pick(program, arch), arch), data).any()
    assert not interpret(program, data).any()


@pytest.mark.parametrize(("name", "nodes"), [("uint4_g128_z", {"w.centred", "zero.at"}), ("uint4_g128_m", {"shifted", "x.sum"})])
@pytest.mark.parametrize(("m", "arch"), [((1, 1), PORTABLE), ((1, 1), SM_90), ((2, 8), SM_90), ((65, 128), SM_90)], ids=str)
def test_a_zero_is_where_its_mode_lets_it_be(name: str, nodes: set[str], m: tuple[int, int], arch: Arch) -> None:
    """On the weight where q - z must be exact; on the sums, beside the scale, where it is subtracted after scaling."""
    program = program_of(format=named(name), m=m)
    scheduled = apply(program, pick(program, arch), arch)
    assert nodes <= set(scheduled)
    assert not {"w.centred", "shifted"} - nodes & set(scheduled)
    assert scheduled.kept == ["codes.stored", "scale.stored", "zero.stored"]


def ladder() -> tuple[Problem, Program]:
    """Ladder's own example: x f16[32, 63] times the transpose of w nf4[32, 63], stored as a matrix instruction takes it."""
    form = named("nf4_g64")
    problem = Problem(m=(32, 32), n=32, k=63, format=form)
    program = lower(problem)
    return problem, apply(program, pick(program, SM_80), SM_80)


def test_ladders_example_is_padded_sliced_converted_and_mapped() -> None:
    _, program = ladder()
    assert program.tile("codes.pad").sizes == {"n": 32, "k": 64}
    stored = program.op("codes.stored")
    assert isinstance(stored, Pack)
    assert stored.layout == fragment_order(named("nf4_g64"), M16K16, 32, 63)
    assert stored.layout.row_units() is None, "a word holds two rows"
    assert "codes.stored" in program.offline
    assert program.op("codes.view") == Unpack(stored.layout)
    per_call = [type(program.op(name)) for name in program.per_call]
    assert {Unpack, Slice, Convert, Dot} <= set(per_call)
    path = ["codes.view", "w.tile", "w.value", "part", "scaled", "acc", "y"]
    assert all(a in nx.ancestors(program.graph, b) for a, b in itertools.pairwise(path))
    assert program.tile("codes.view").sizes == {"n": 32, "k": 64}
    assert program.op("part") == Dot(("k",), "mma", "left")


def test_ladders_example_gives_the_truth() -> None:
    problem, program = ladder()
    case = weights.case(problem, oracle.NF4)
    assert case.error(interpret(program, case.data)) <= case.limit(2)
    assert case.error(interpret(lower(problem), case.data)) <= case.limit()


@pytest.mark.parametrize(
    "word",
    ["pad k=64", "slice n=n*64+64", "convert", "map to n8@512,n2@8", "map from", "offline, once per weight", "kernel 0", "kept"],
)
def test_ladders_example_is_shown(word: str) -> None:
    assert word in show(ladder()[1])


def test_every_node_is_shown_once() -> None:
    _, program = ladder()
    first = [line.split()[0] for line in show(program).splitlines() if line.startswith("  ")]
    assert sorted(first) == sorted(program)


def test_the_offline_part_is_the_packer() -> None:
    """Kept tiles and their ancestors hold the codes, padded and mapped, and nothing that is decoded."""
    _, program = ladder()
    assert program.kept == ["codes.stored", "codebook", "scale.stored"]
    assert {type(program.op(name)) for name in program.offline} == {Const, Pad, Pack}
    assert "w.value" in program.per_call


def test_without_the_kept_rule_the_model_would_be_dequantized_offline() -> None:
    _, program = ladder()

    def forgotten(name: str) -> object:
        def emit(b: Builder, operands: dict[str, str]) -> str:
            tile = program.tile(name)
            shape = None if operands else tile.sizes
            return b.add(name, program.op(name), operands, tile.element, tile.space, shape, tile.layout, kept=False)

        return emit

    free = rewrite(program, {name: forgotten(name) for name in program.kept})
    assert not free.kept
    assert "w.value" in free.offline
    assert free.tile("w.value").element == F16, "what codes mean, in x's type"
    assert "w" in lower(program.problem).offline


@pytest.mark.parametrize("run", [1, 16])
def test_running_the_offline_part_packs(run: int, rng: np.random.Generator) -> None:
    layout = rows(5, 200, 4, run)
    problem = Problem(m=(1, 1), n=5, k=200, format=named("nf4_g64"), layout=layout)
    case = weights.case(problem, oracle.NF4)
    program = lower(problem)
    stored = offline(apply(program, pick(program, PORTABLE), PORTABLE), case.data, np)
    assert list(stored) == ["codes.stored", "codebook", "scale.stored"]
    assert np.array_equal(stored["codes.stored"].view("u4"), oracle.pack_rows(case.data["codes"], 4, run))
    assert np.array_equal(unpack(layout, stored["codes.stored"].reshape(-1), np)[:, :200], case.data["codes"])
    assert np.array_equal(stored["scale.stored"][:, :4], case.data["scale"])


def test_a_weight_in_registers_gives_one_kernel() -> None:
    program = apply(program_of(), Schedule(template="gemv", block_k=256), PORTABLE)
    assert len(program.kernels) == 1
    assert program.kernels[0][-1] == "y"


VENDOR = Schedule(template="dequant", unit="vendor", block_n=4, block_k=512, scale_at="weight", convert_at="global")
SPLIT = Schedule(template="gemm", unit="mma", side="left", block_m=16, block_n=64, block_k=128, split_k=2)
CLUSTER = Schedule(template="gemv_half", unit="halves", block_n=16, block_k=128, split_k=2, sum_at="shared")


@pytest.mark.parametrize("name", ["int4_g128", "nf4_g64", "uint4_g64_z"])
def test_a_weight_in_global_memory_gives_two_kernels(name: str) -> None:
    """Dequantize, then multiply: ours ends in the dense weight, the vendor's reads it; together they are all of the call."""
    program = apply(program_of(format=named(name), m=(2, 16), bias=True), VENDOR, PORTABLE)
    first, second = program.kernels
    assert first[-1] == "w.dense"
    assert second == ["acc", "y"]
    assert program.ours == [first]
    assert program.op("acc") == Dot(("k",), "vendor")
    assert program.tile("w.dense").space is Space.GLOBAL
    assert program.operands("acc") == {"w": "w.dense", "x": "x"}
    assert not set(first) & set(second)
    assert set(first) | set(second) | set(program.of(Input)) == set(program.per_call)


@pytest.mark.parametrize("n", [2, 3])
def test_blocks_beyond_the_crop_of_a_store_write_nothing(n: int) -> None:
    """Rows of a layout that are all padding, in blocks of their own."""
    form = named("nf4_g64")
    problem = Problem(m=(17, 20), n=n, k=64, format=form, layout=fragment_order(form, M16K16, n, 64))
    program, case = lower(problem), weights.case(problem, oracle.NF4)
    for arch in (PORTABLE, SM_80):
        assert not case.misses(interpret(apply(program, pick(program, arch), arch), case.data), 2)


def test_partial_sums_in_global_memory_give_two_kernels() -> None:
    """Each program sums its share of the steps; a second kernel of ours adds the shares, then the bias."""
    program = apply(program_of(m=(2, 16), bias=True), SPLIT, SM_80)
    first, second = program.kernels
    assert (first[-1], second[-1]) == ("parts", "y")
    assert program.ours == [first, second]
    assert program.tile("parts").sizes == {"part": 2, "m": 16, "n": 64}
    assert program.tile("parts").space is Space.GLOBAL
    assert program.op("parts") == Reduce((), "step", 2)
    assert program.op("acc") == Reduce(("part",))
    assert {"bias.tile", "acc", "y"} <= set(second)


def test_partial_sums_in_shared_memory_give_one_kernel() -> None:
    """Those of a cluster: they meet before the kernel ends."""
    program = apply(program_of(bias=True), CLUSTER, SM_90)
    (only,) = program.kernels
    assert program.ours == [only]
    assert {"parts", "acc", "bias.tile", "y"} <= set(only)
    assert program.tile("parts").sizes == {"part": 2, "m": 1, "n": 16}
    assert program.tile("parts").space is Space.SHARED


@pytest.mark.parametrize("schedule", [SPLIT, CLUSTER], ids=lambda schedule: schedule.template)
def test_partial_sums_are_of_steps_in_rotation(schedule: Schedule) -> None:
    """Share i of two sums steps i, i + 2, …: with all other x zero, only one share is not zero, and so is y the same."""
    problem = program_of(m=(1, 1), k=512).problem
    program = apply(lower(problem), replace(schedule, split_k=4), SM_90)
    case = weights.case(problem, oracle.INT4)
    for step in range(4):
        x = np.zeros_like(case.data["x"])
        x[:, 128 * step : 128 * step + 128] = case.data["x"][:, 128 * step : 128 * step + 128]
        truth = oracle.linear(x, case.w)
        assert oracle.error(interpret(program, case.data | {"x": x}), truth) <= case.limit()


def test_offline_and_per_call_parts_are_all_of_a_program() -> None:
    _, program = ladder()
    assert set(program.offline) | set(program.per_call) == set(program)
    assert not set(program.offline) & set(program.per_call)


def test_operands_stand_before_what_uses_them() -> None:
    _, program = ladder()
    order = list(program)
    assert nx.is_directed_acyclic_graph(program.graph)
    assert all(order.index(a) < order.index(b) for a, b in program.graph.edges)


def test_a_program_is_frozen() -> None:
    with pytest.raises(nx.NetworkXError):
        program_of().graph.add_node("more")


def test_a_node_is_added_once() -> None:
    builder = Builder(program_of().problem)
    builder.add("codes", Const(), {}, F32, shape={"n": 1})
    with pytest.raises(ScheduleError, match="has a node 'codes' already"):
        builder.add("codes", Const(), {}, F32, shape={"n": 1})


def test_a_tile_has_positive_sizes() -> None:
    with pytest.raises(ShapeError, match="one positive size per axis"):
        Builder(program_of().problem).add("codes", Const(), {}, F32, shape={"n": 0})


def test_data_of_another_shape_is_refused() -> None:
    problem = program_of().problem
    case = weights.case(problem, oracle.INT4)
    with pytest.raises(ShapeError, match=r"x has shape \[1, 255\], the program needs \[1, 256\]"):
        interpret(lower(problem), case.data | {"x": case.data["x"][:, :255]})


def altered(name: str, operands: dict[str, str] | None = None, **changes: object) -> Program:
    """The default program with one node made differently."""
    program = apply(program_of(), Schedule(template="gemv", block_k=256), PORTABLE)

    def emit(b: Builder, had: dict[str, str]) -> str:
        tile = program.tile(name)
        given = {"element": tile.element, "space": tile.space, "layout": tile.layout, "kept": tile.kept, **changes}
        return b.add(name, program.op(name), had if operands is None else operands, shape=tile.sizes, **given)

    return rewrite(program, {name: emit})


def test_verify_refuses_operands_that_an_operation_cannot_take() -> None:
    with pytest.raises(ScheduleError, match=r"part \(dot over code on lanes\) has operands \['x'\]"):
        verify(altered("part", {"x": "x.value"}), PORTABLE, 4)


def test_verify_refuses_kept_tiles_outside_global_memory() -> None:
    with pytest.raises(ScheduleError, match=r"codes\.stored is kept in register memory: a weight's buffers are global"):
        verify(altered("codes.stored", space=Space.REGISTER), PORTABLE, 4)


def test_verify_returns_a_legal_program_itself() -> None:
    program = apply(program_of(), Schedule(template="gemv", block_k=256), PORTABLE)
    assert verify(program, PORTABLE, 4) is program


@pytest.mark.parametrize(("activation", "residual"), [("gelu", True), ("silu", False), (activations.PAIRED, False), ("", True)])
@pytest.mark.parametrize(
    ("m", "n", "k", "arch"), [((1, 1), 26, 200, "portable"), ((2, 5), 26, 200, "sm_80"), ((17, 20), 80, 1280, "sm_80")]
)
def test_an_epilogue_means_the_same_before_and_after_a_schedule(
    m: tuple[int, int], n: int, k: int, arch: str, activation: str, residual: bool
) -> None:
    problem = Problem(m=m, n=n, k=k, format=named("int4_g128"), bias=True)
    case = weights.case(problem, oracle.INT4)
    data, truth = dict(case.data), activations.activated(case.truth, activation)
    if residual:
        data["residual"] = np.float16(np.random.default_rng(5).standard_normal(truth.shape))
        truth = truth + data["residual"].astype(np.float64)
    program = lower(replace(problem, activation=activation, residual=residual))
    scheduled = apply(program, pick(program, replace(ARCHES[arch], features=frozenset())), ARCHES[arch])
    for each in (program, scheduled):
        y = interpret(each, data)
        assert y.shape == truth.shape
        assert oracle.error(y.astype(np.float64), truth) <= oracle.limit("f16", truth.size, 1, k)
    assert activation in show(program)
