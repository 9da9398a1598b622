"""Programs mean what the oracle says, before and after every schedule; the kept rule; where kernels are cut; `verify`."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import numpy as np
import oracle
import pytest
import weights
from hypothesis import assume, given
from hypothesis import strategies as st

from w4gen.errors import FormatError, ScheduleError, ShapeError
from w4gen.formats import named
from w4gen.ir.interpret import interpret, offline
from w4gen.ir.layout import rows, unpack
from w4gen.ir.lower import lower
from w4gen.ir.problem import Problem
from w4gen.ir.program import Builder, Program, rewrite
from w4gen.ir.show import show
from w4gen.ir.tile import Const, Convert, Dot, Input, Pack, Pad, Slice, Space
from w4gen.ir.types import BF16, F16, F32, Format
from w4gen.ir.verify import verify
from w4gen.schedule.arch import ARCHES
from w4gen.schedule.rules import apply, layout_for, pick
from w4gen.schedule.schedule import Schedule

PORTABLE = ARCHES["portable"]
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
    layout = rows(n, k, form.bits, run) if run else None
    return Problem(m=m, n=n, k=k, format=form, layout=layout, x=x, y=x, bias=draw(st.booleans())), values


@st.composite
def schedules(draw: st.DrawFn, problem: Problem) -> Schedule:
    """Any choice for gemv; some are not legal for the problem, and `apply` says so."""
    unit = draw(st.sampled_from(["lanes", "mma"]))
    granule = 32 // problem.format.bits * (4 if unit == "lanes" else 1)
    return Schedule(
        template="gemv",
        unit=unit,
        block_m=1 if problem.m == (1, 1) and unit == "lanes" else 16,
        block_n=draw(st.sampled_from([1, 2, 8, 32])),
        block_k=granule * draw(st.sampled_from([1, 2, 4, 16])),
        scale_at=draw(st.sampled_from(["weight", "accumulator"])),
        zero_at=draw(st.sampled_from(["weight", "accumulator"])),
        convert_at=draw(st.sampled_from(["register", "register", "shared", "global"])),
    )


@given(problems())
def test_a_logical_program_gives_the_truth(asked: tuple[Problem, list[float]]) -> None:
    problem, values = asked
    case = weights.case(problem, values)
    y = interpret(lower(problem), case.data)
    assert y.shape == case.truth.shape
    assert case.error(y) <= oracle.HALF_UNIT[problem.y.name]


@given(st.data())
def test_every_legal_schedule_keeps_the_meaning(data: st.DataObject) -> None:
    problem, values = data.draw(problems())
    schedule = data.draw(schedules(problem))
    try:
        program = verify(apply(lower(problem), schedule, PORTABLE), PORTABLE, schedule.warps)
    except (ScheduleError, FormatError):
        assume(False)
    case = weights.case(problem, values)
    y, plain = interpret(program, case.data), interpret(lower(problem), case.data)
    # with one output and one input nothing averages out: y is rounded once, and so is a weight multiplied in x's type
    half = oracle.HALF_UNIT[problem.y.name]
    assert case.error(y) <= 2.01 * half
    assert oracle.error(y, plain.astype(np.float64), case.typical) <= 3.01 * half


@pytest.mark.parametrize("x", [F16, BF16], ids=str)
@pytest.mark.parametrize("m", [(1, 1), (2, 16)], ids=str)
@pytest.mark.parametrize("name", ["int4_g128", "nf4_g64", "int4_g50", "nf4_row", "int4_g32_f32", "nf4_g16_bf16", *MORE])
@pytest.mark.parametrize(("n", "k"), [(64, 512), (37, 331)])
def test_what_the_rules_pick_is_within_the_limit(name: str, m: tuple[int, int], x: object, n: int, k: int) -> None:
    form = named(name)
    problem = Problem(m=m, n=n, k=k, format=form, x=x, y=x, bias=True)
    case = weights.case(problem, oracle.VALUES[form.name])
    program = lower(problem)
    y = interpret(apply(program, pick(program, PORTABLE), PORTABLE), case.data)
    assert oracle.error(y, case.truth) <= oracle.LIMIT[x.name]


@pytest.mark.parametrize("m", [(1, 1), (2, 16)], ids=str)
@pytest.mark.parametrize("x", [F16, BF16], ids=str)
@pytest.mark.parametrize("name", ["uint4_g128_z", "uint4_g50_z", "int8_g64_z", "uint4_g64_zf"])
def test_codes_that_are_the_zero_give_exact_zeros(name: str, x: object, m: tuple[int, int]) -> None:
    """q - z is formed before scaling, whatever the scale and x are."""
    form = named(name)
    problem = Problem(m=m, n=8, k=256, format=form, x=x, y=x)
    case = weights.case(problem, oracle.VALUES[form.name])
    zero = np.rint(case.data["zero"])
    group = np.arange(256) // form.group
    data = case.data | {"zero": zero, "codes": (zero[:, group] - form.origin).astype(np.uint8)}
    program = lower(problem)
    assert not interpret(apply(program, pick(program, PORTABLE), PORTABLE), data).any()
    assert not interpret(program, data).any()


@pytest.mark.parametrize(("name", "nodes"), [("uint4_g128_z", {"w.centred", "zero.at"}), ("uint4_g128_m", {"shifted", "x.sums"})])
@pytest.mark.parametrize("m", [(1, 1), (2, 16)], ids=str)
def test_a_zero_is_where_its_mode_lets_it_be(name: str, nodes: set[str], m: tuple[int, int]) -> None:
    """On the weight where q - z must be exact; on the sums, beside the scale, where it is subtracted after scaling."""
    program = program_of(format=named(name), m=m)
    scheduled = apply(program, pick(program, PORTABLE), PORTABLE)
    assert nodes <= set(scheduled)
    assert not {"w.centred", "shifted"} - nodes & set(scheduled)
    assert scheduled.kept == ["codes.stored", "scale.stored", "zero.stored"]


def ladder() -> tuple[Problem, Program]:
    """Ladder's own example: x f16[32, 63] times the transpose of w nf4[32, 63]."""
    problem = Problem(m=(32, 32), n=32, k=63, format=named("nf4_g64"))
    program = lower(problem)
    return problem, apply(program, pick(program, PORTABLE), PORTABLE)


def test_ladders_example_is_padded_sliced_converted_and_mapped() -> None:
    problem, program = ladder()
    assert program.tile("codes.pad").sizes == {"n": 32, "k": 64}
    stored = program.op("codes.stored")
    assert isinstance(stored, Pack)
    assert stored.layout == layout_for(problem.format, PORTABLE, 32, 63, "gemm") != rows(32, 63, 4)
    assert "codes.stored" in program.offline
    per_call = [type(program.op(name)) for name in program.per_call]
    assert {Slice, Convert, Dot} <= set(per_call)
    assert all(program.tile(name).sizes["k"] == 64 for name in ("x.pad", "w.tile", "x.tile"))


def test_ladders_example_gives_the_truth() -> None:
    problem, program = ladder()
    case = weights.case(problem, oracle.NF4)
    assert oracle.error(interpret(program, case.data), case.truth) <= oracle.LIMIT["f16"]
    assert oracle.error(interpret(lower(problem), case.data), case.truth) <= oracle.LIMIT["f16"]


@pytest.mark.parametrize(
    "word", ["pad k=64", "slice n=n*16+16", "convert", "map to", "offline, once per weight", "kernel 0", "kept"]
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
    assert "w" in program.per_call


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
    assert "w" in free.offline
    assert free.tile("w").element == F16, "the weight itself, in x's type"
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


@pytest.mark.parametrize("name", ["int4_g128", "nf4_g64"])
def test_a_weight_in_global_memory_gives_two_kernels(name: str) -> None:
    """Dequantize, then multiply: the first ends in `w`, the second reads it; together they are all of the per-call part."""
    program = apply(program_of(format=named(name)), Schedule(template="gemv", convert_at="global"), PORTABLE)
    first, second = program.kernels
    assert (first[-1], second[-1]) == ("w", "y")
    assert program.tile("w").space is Space.GLOBAL
    assert not set(first) & set(second)
    inputs = program.of(Input)
    assert set(first) | set(second) | set(inputs) == set(program.per_call)


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
