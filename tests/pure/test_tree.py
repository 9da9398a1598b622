"""Trees of scales: programs give what the oracle's loops give, before and after every rewrite; names, shapes and bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import oracle
import pytest

from w4gen.errors import FormatError, ShapeError
from w4gen.formats import FAMILIES, named
from w4gen.ir.groups import bytes_of_rows
from w4gen.ir.interpret import interpret, offline
from w4gen.ir.layout import unpack
from w4gen.ir.lower import lower
from w4gen.ir.problem import Problem
from w4gen.ir.types import BF16, E8M0, F16, F32, PER_TENSOR, Format
from w4gen.ir.verify import verify
from w4gen.schedule.apply import apply
from w4gen.schedule.arch import ARCHES, M16K16
from w4gen.schedule.cost import bytes_moved
from w4gen.schedule.rewrite import pack
from w4gen.schedule.rules import pick
from w4gen.schedule.stored import fragment_order, layout_for

PORTABLE = ARCHES["portable"]
KINDS = {"f16": F16, "bf16": BF16}


@pytest.mark.parametrize("name", oracle.TREES)
def test_the_parts_of_a_tree_are_named_and_shaped_as_the_oracle_has_them(name: str) -> None:
    form = named(name)
    parts = oracle.random_parts(np.random.default_rng(0), oracle.TREES[name], 6, 512)
    own = {name: shape for name, (_, shape) in form.parts(6, 512).items() if name not in form.tables()}
    assert own == {name: array.shape for name, array in parts.items()}
    assert Format.parse(str(form)) == form


@pytest.mark.parametrize("m", [(1, 1), (2, 5), (17, 20)], ids=str)
@pytest.mark.parametrize(("n", "k"), [(6, 512), (3, 192), (17, 320)])
@pytest.mark.parametrize("name", oracle.TREES)
def test_programs_of_trees_give_the_truth(name: str, n: int, k: int, m: tuple[int, int]) -> None:
    form, rng = named(name), np.random.default_rng(1)
    parts = oracle.random_parts(rng, oracle.TREES[name], n, k)
    w = oracle.weight(parts, oracle.TREES[name])
    x = rng.standard_normal((m[1], k)).astype(np.float16)
    tables = {name: np.array(table, np.float32) for name, table in form.tables().items()}
    problem = Problem(m=m, n=n, k=k, format=form)
    program, truth = lower(problem), oracle.linear(x, w)
    data = parts | tables | {"x": x}
    schedule = pick(program, PORTABLE)
    scheduled = verify(apply(program, schedule, PORTABLE), PORTABLE, schedule.warps * schedule.teams)
    half, least = oracle.HALF_UNIT["f16"], oracle.typical(x, w)
    assert oracle.error(interpret(program, data), truth, least) <= 1.01 * half
    assert oracle.error(interpret(scheduled, data), truth, least) <= 2.01 * half


def above(minifloat: str, group: int) -> str:
    """int4 under 8-bit scales, which are under f32 ones."""
    return f"tree(bits=4,origin=-8,group=32,scale=codes(bits=8,minifloat={minifloat},group={group},scale=f32))"


E4M3 = oracle.small_float(4, 3)
ABOVE = {
    above("e4m3", -1): {"values": E4M3, "group": "row", "scale": "f32"},
    above("e4m3", 2): {"values": E4M3, "group": 2, "scale": "f32"},
    above("e7m0", -1): {"values": oracle.small_float(7, 0), "group": "row", "scale": "f32"},
}
UNDER = oracle.TREES | {name: {"values": oracle.INT4, "group": 32, "scale": scale} for name, scale in ABOVE.items()}


@pytest.mark.parametrize(("name", "hoisted"), [("nvfp4", True), ("mxfp4_g32_e8m0", False), *zip(ABOVE, (True, False, False))])
def test_a_scale_for_all_k_leaves_the_loop(name: str, hoisted: bool) -> None:
    """Unless sums of what it scales could overflow."""
    program = lower(Problem(m=(2, 8), n=64, k=192, format=named(name)))
    schedule = pick(program, ARCHES["sm_90"])
    assert schedule.template == "gemv_mma"
    assert ("rescaled" in apply(program, schedule, ARCHES["sm_90"]).graph) == hoisted


@pytest.mark.parametrize("target", ["portable", "sm_80", "sm_90"])
@pytest.mark.parametrize("name", ["nf4_dq", "nvfp4", "q4_k", "mxfp4_g32_e8m0", *ABOVE])
def test_a_tree_under_fragments_gives_the_truth(name: str, target: str) -> None:
    """Rows and columns of padding, of which scales that run over rows have none."""
    form, rng, n, k = named(name), np.random.default_rng(2), 21, 192
    parts = oracle.random_parts(rng, UNDER[name], n, k)
    x = rng.standard_normal((3, k)).astype(np.float16)
    data = parts | {name: np.array(table, np.float32) for name, table in form.tables().items()} | {"x": x}
    problem = Problem(m=(2, 3), n=n, k=k, format=form, layout=fragment_order(form, M16K16, n, k))
    program = lower(problem)
    y = interpret(apply(program, pick(program, ARCHES[target]), ARCHES[target]), data)
    w = oracle.weight(parts, UNDER[name])
    assert oracle.error(y, oracle.linear(x, w), oracle.typical(x, w)) <= 2.01 * oracle.HALF_UNIT["f16"]


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("g", [2, 7, 8, 64])
def test_codes_of_scales_are_rows_of_bytes(bits: int, g: int) -> None:
    layout, rng = bytes_of_rows(3, g, bits), np.random.default_rng(0)
    codes = rng.integers(0, 2**bits, (3, layout.size("g"))).astype(np.uint8)
    assert layout.size("g") - g < 8
    assert layout.length * 8 == 3 * layout.size("g") * bits
    form = Format("mine", group=1, scale=Format("s", bits=bits, scale=None))
    problem = Problem(m=(1, 1), n=3, k=g, format=form)
    order = layout_for(form, PORTABLE, 3, g)
    data = {"codes": np.zeros((3, g), np.uint8), "scale": codes[:, :g]}
    stored = offline(pack(lower(problem), order), data, np)["scale.stored"]
    assert stored.dtype == np.uint8
    assert np.array_equal(unpack(bytes_of_rows(3, order.size("k"), bits), stored.reshape(-1), np)[:, :g], codes[:, :g])


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("n", "k"), [(64, 4096), (128, 1536), (64, 11008), (64, 1280), (64, 768)])
def test_what_is_stored_is_what_the_format_states(name: str, n: int, k: int) -> None:
    """Bytes of all buffers, within 2 %, where nothing needs padding."""
    form = FAMILIES[name]
    program = pack(lower(Problem(m=(1, 1), n=n, k=k, format=form)), layout_for(form, PORTABLE, n, k))
    stored = sum(size for name, size in bytes_moved(program, 1).items() if name in program.kept)
    stated = form.stated_bits(n, k) * n * k / 8
    assert stated * (1 - 1e-9) <= stored <= 1.02 * stated


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("mxfp4", 4.25), ("mxfp8", 8.25), ("nvfp4", 4.5), ("nf4_dq", 4 + 8 / 64 + 64 / (64 * 256)), ("q2_k", 84 * 8 / 256),
        ("q3_k", 110 * 8 / 256), ("q4_k", 144 * 8 / 256), ("q5_k", 176 * 8 / 256), ("q6_k", 210 * 8 / 256), ("iq4_nl", 4.5),
    ],
)  # fmt: skip
def test_bits_of_a_weight_are_those_of_its_checkpoints(name: str, bits: float) -> None:
    assert named(name).stated_bits(4096, 4096) == pytest.approx(bits, abs=2e-3)


@pytest.mark.parametrize(
    ("form", "k", "message"),
    [
        (Format("mine", scale=None), 64, "weights need a scale"),
        (Format("mine", group=48, flat=True), 64, r"K=64 is not a multiple of the flat group 48 \(mine_flat48\)"),
    ],
    ids=str,
)
def test_weights_that_no_program_is_for_are_refused(form: Format, k: int, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        lower(Problem(m=(1, 1), n=4, k=k, format=form))


def test_a_learned_codebook_is_not_part_of_the_format() -> None:
    """So that a thousand layers with a table each share one kernel."""
    form = Format("learned", bits=4, codebook=PER_TENSOR, group=64)
    assert "codebook=tensor" in str(form)
    assert "codebook" in form.parts(8, 64)
    with pytest.raises(FormatError, match="learned: its values are per tensor"):
        _ = form.values
    with pytest.raises(FormatError, match=r"codebook='mine': give 2\*\*bits values, or 'tensor'"):
        replace(form, codebook="mine")


def test_scales_may_be_small_floats() -> None:
    assert named("int4_g32_e8m0").scale == E8M0
    assert named("mxfp4").label == "mxfp4_g32_e8m0"
    assert named("fp8_e4m3_tensor").grid(7, 33) == (1, 1)
    assert named("fp8_e4m3").scale == F32
