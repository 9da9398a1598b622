"""The program drives the text: each node printed once, every choice read, any change of the program a change of the text."""

from __future__ import annotations

import ast
import itertools
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from arrays import thinned

from w4gen import paths
from w4gen.codegen.render import PRINTERS, Kernel, read, render
from w4gen.errors import TemplateError, W4Error
from w4gen.formats import named
from w4gen.ir.decode import decode
from w4gen.ir.groups import beside
from w4gen.ir.layout import Layout, rows
from w4gen.ir.lower import lower
from w4gen.ir.problem import Problem
from w4gen.ir.program import Builder, rewrite
from w4gen.ir.tile import Block, Convert, Dot, Field, Reduce, Repeat, Slice, Space, Split, Store, Unpack
from w4gen.ir.types import BF16, F16, F32, Format
from w4gen.pipeline import made
from w4gen.schedule.apply import FAST, apply
from w4gen.schedule.arch import ARCHES, M16K16, SM_80, Arch
from w4gen.schedule.rules import BUCKETS, bucket, pick
from w4gen.schedule.schedule import Schedule
from w4gen.schedule.stored import fragment_order

PORTABLE, SM_90 = ARCHES["portable"], ARCHES["sm_90"]
PLAIN = replace(SM_80, features=SM_80.features - {"gluon"})
"""What Triton is asked for where the fast templates are not made for it."""
OF_BLOCKS = ("gemm", *FAST)
"""Templates that read codes in the order of fragments, which archs from sm_80 on have."""
TEMPLATES = sorted(paths.templates().glob("*.py.jinja"))


def rendered(
    problem: Problem,
    schedule: Schedule | None = None,
    folder: Path | None = None,
    arch: Arch | None = None,
    **changes: object,
) -> Kernel:
    """The kernel of a schedule, on the arch given, else where its template belongs: sm_80, or `portable` and codes in rows."""
    program, arch = lower(problem), arch or home(schedule)
    schedule = replace(schedule or pick(program, arch), **changes)
    return render(apply(program, schedule, arch), schedule, arch.name, folder)


def home(schedule: Schedule | None) -> Arch:
    return SM_80 if schedule is not None and schedule.template in OF_BLOCKS else PORTABLE


def asked(**changes: object) -> Problem:
    return Problem(**{"m": (1, 1), "n": 256, "k": 1536, "format": named("int4_g128"), **changes})


def holding(template: str, text: str) -> Path:
    """The file of a template, or of the steps that it includes, which a text stands in."""
    steps = {"gemv_mma": ["turn.jinja"], "gemm_wgmma": ["ring.jinja"], "dgrad_wgmma": ["ring.jinja", "turned.jinja"]}
    own = [paths.templates() / name for name in (f"{template}.py.jinja", *steps.get(template, []))]
    found = [path for path in own if text in path.read_text()]
    assert found, f"{text!r} is no longer in the template: change this test with it"
    return found[0]


@pytest.fixture
def changed(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Write a template (gemv) with one piece of its text replaced, and say where."""

    def write(old: str, new: str, template: str = "gemv") -> Path:
        for part in paths.templates().glob("*.jinja"):
            shutil.copy(part, tmp_path)
        holder = tmp_path / holding(template, old).name
        holder.write_text(holder.read_text().replace(old, new))
        return tmp_path

    return write


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_a_template_parses_as_python(path: Path) -> None:
    ast.parse(path.read_text())


def test_there_is_a_template() -> None:
    assert TEMPLATES


GEMM = {"m": (17, 32), "n": 250}
"""A question for gemm: one part, or more with the schedule's split_k."""
ONE = Schedule(template="gemm", block_m=32, block_n=64, block_k=128, unit="mma", side="left", stages=3)
SPLIT = replace(ONE, split_k=4)
NESTED = named("int4(origin=-8,group=32,scale=u6(bits=6,group=8))")
FAST_MMA = Schedule(template="gemv_mma", block_m=8, block_n=16, block_k=128, unit="mma", side="left", stages=3, overlap=1)
FAST_HALF = Schedule(
    template="gemv_half", block_n=16, block_k=128, unit="halves", split_k=3, sum_at="shared", stages=3, overlap=1
)
MANY = Schedule(
    template="gemm_wgmma",
    block_m=128,
    block_n=128,
    block_k=128,
    unit="mma",
    side="left",
    scale_at="weight",
    x_at="shared",
    w_at="shared",
    teams=2,
    stages=2,
    ring=5,
    overlap=1,
)
DY = {"m": (129, 256), "gradient": True}
DENSE = {"m": (129, 2**31 - 1), "n": 250, "format": named("uint4_g64_m")}
QUESTIONS: dict[str, tuple[str, dict[str, object], Schedule | None]] = {
    "gemv": ("gemv", {}, None),
    "gemm": ("gemm", GEMM | {"bias": True}, ONE),
    "gemm in parts": ("gemm", GEMM | {"bias": True}, SPLIT),
    "dequant": ("dequant", DENSE, None),
    "mma": ("gemv_mma", {"m": (2, 8), "bias": True}, FAST_MMA),
    "mma, scales apart": (
        "gemv_mma",
        {"m": (2, 8), "format": named("int4(origin=-8,group=32,scale=u6(bits=6,group=8))")},
        FAST_MMA,
    ),
    "half": ("gemv_half", {"bias": True}, FAST_HALF),
    "half, no cluster": ("gemv_half", {}, replace(FAST_HALF, split_k=1, sum_at="global")),
    "many": ("gemm_wgmma", {"m": (65, 128), "bias": True}, MANY),
    "many in parts": ("gemm_wgmma", {"m": (65, 128), "bias": True}, replace(MANY, split_k=2)),
    "turned": ("dgrad_wgmma", DY | {"format": named("uint4_g128_z")}, replace(MANY, template="dgrad_wgmma", w_at="register")),
}
CALLS = {
    ("gemv", '{{ load("x") }}'): "x.tile",
    ("gemv", '{{ decode("w") }}'): "w.codes",
    ("gemv", "{{ dot() }}"): "part",
    ("gemv", '{{ reduce("acc") }}'): "acc",
    ("gemv", '{{ reduce("total") }}'): "total",
    ("gemv", '{{ scale("acc") }}'): "scaled",
    ("gemv", "{{ store() }}"): "y",
    ("gemm", '{{ load("scale") }}'): "scale.tile",
    ("gemm", '{{ load("x") }}'): "x.tile",
    ("gemm", '{{ decode("w") }}'): "w.value",
    ("gemm", "{{ dot() }}"): "part",
    ("gemm", '{{ scale("acc") }}'): "scaled",
    ("gemm", '{{ reduce("parts" if has("parts") else "acc") }}'): "acc",
    ("gemm", "{{ store() }}"): "bias.tile",
    ("gemm in parts", """{{ load("w", 'eviction_policy="evict_first"') }}"""): "codes.view",
    ("gemm in parts", '{{ load("x") }}'): "x.tile",
    ("gemm in parts", '{{ decode("w") }}'): "w.value",
    ("gemm in parts", "{{ dot() }}"): "part",
    ("gemm in parts", '{{ reduce("parts" if has("parts") else "acc") }}'): "parts",
    ("gemm in parts", "{{ store() }}"): "parts",
    ("dequant", '{{ load("w") }}'): "codes.view",
    ("dequant", '{{ load("scale") }}'): "scale.tile",
    ("dequant", '{{ decode("w") }}'): "w.value",
    ("dequant", '{{ scale("w") }}'): "zero.k",
    ("dequant", "{{ store() }}"): "w.dense",
    ("mma", '{{ load("x") }}'): "x.tile",
    ("mma", "{{ dot() }}"): "part",
    ("mma", '{{ scale("acc") }}'): "scaled",
    ("mma", '{{ reduce("acc") }}'): "acc",
    ("mma", "{{ store() }}"): "bias.tile",
    ("mma, scales apart", "{{ dot() }}"): "part",
    ("mma, scales apart", '{{ scale("acc") }}'): "scaled",
    ("half", '{{ load("x") }}'): "x.tile",
    ("half", "{{ dot() }}"): "part",
    ("half", '{{ scale("acc") }}'): "scaled",
    ("half", '{{ reduce("acc") }}'): "parts",
    ("half", "{{ store() }}"): "bias.tile",
    ("half, no cluster", '{{ reduce("acc") }}'): "acc",
    ("half, no cluster", "{{ store() }}"): "y",
    ("many", '{{ load("x") }}'): "x.tile",
    ("many", "{{ dot() }}"): "part",
    ("many", '{{ reduce("parts" if has("parts") else "acc") }}'): "acc",
    ("many", "{{ store() }}"): "bias.tile",
    ("many in parts", '{{ reduce("parts" if has("parts") else "acc") }}'): "parts",
    ("turned", '{{ load("w") }}'): "codes.view",
    ("turned", '{{ load("x") }}'): "x.tile",
    ("turned", '{{ load("scale") }}'): "scale.view",
    ("turned", '{{ load("zero") }}'): "zero.view",
    ("turned", '{{ decode("w") }}'): "w.value",
    ("turned", '{{ scale("w") }}'): "w",
    ("turned", "{{ dot() }}"): "part",
    ("turned", '{{ reduce("parts" if has("parts") else "acc") }}'): "acc",
    ("turned", "{{ store() }}"): "y",
}
SHARED_CALLS = {'{{ load("w") }}': "codes.view", '{{ load("scale") }}': "scale.view", '{{ decode("w") }}': "w.value"}
"""Calls that the fast templates make in what they include."""
INCLUDED = [(call, node, each) for call, node in SHARED_CALLS.items() for each in ("mma", "mma, scales apart", "half", "many")]
INCLUDED += [
    ('{{ scale("w") }}', "w", "many"),
    ("{{ finish() }}", "acc", "gemm in parts"),
    ("{{ finish() }}", "acc", "many in parts"),
]
PARTS = ("fragments.jinja", "scales.jinja", "left.jinja", "parts.jinja")


def calls() -> list[object]:
    """Every call, by name."""
    return [pytest.param(*each, id=" ".join(each)) for each in CALLS]


@pytest.mark.parametrize(("question", "call"), calls())
def test_a_dropped_call_is_an_error_that_names_the_node(question: str, call: str, changed) -> None:  # type: ignore[no-untyped-def]
    template, problem, schedule = QUESTIONS[question]
    with pytest.raises(TemplateError) as caught:
        rendered(asked(**problem), schedule, changed(call, "pass", template))
    message = str(caught.value)
    assert message.startswith(f"{template}.py.jinja prints ")
    assert message.endswith("0 times, not 1")
    node, expected = message.split()[2], CALLS[question, call]
    assert node == expected or node.startswith(expected.split(".")[0])


@pytest.mark.parametrize(("question", "call"), calls())
def test_a_repeated_call_is_an_error_that_names_the_node(question: str, call: str, changed) -> None:  # type: ignore[no-untyped-def]
    template, problem, schedule = QUESTIONS[question]
    line = next(line for line in holding(template, call).read_text().splitlines() if line.strip() == call)
    with pytest.raises(TemplateError, match=rf"{template}\.py\.jinja prints .* 2 times, not 1"):
        rendered(asked(**problem), schedule, changed(f"{line}\n", f"{line}\n{line}\n", template))


@pytest.mark.parametrize(("call", "node", "question"), INCLUDED)
@pytest.mark.parametrize("times", [0, 2])
def test_a_dropped_or_repeated_call_of_an_included_part_is_an_error(
    times: int, call: str, node: str, question: str, tmp_path: Path
) -> None:
    template, problem, schedule = QUESTIONS[question]
    for part in paths.templates().glob("*.jinja"):
        shutil.copy(part, tmp_path)
    for part in map(tmp_path.joinpath, PARTS):
        lines = part.read_text().splitlines()
        part.write_text(
            "\n".join(line for each in lines for line in ([each] if each.strip() != call else [each] * times or ["    pass"]))
        )
    assert any(call in (paths.templates() / part).read_text() for part in PARTS), (
        f"{call!r} is in none of {PARTS}: change this test"
    )
    with pytest.raises(TemplateError, match=rf"{template}\.py\.jinja prints {node} .* {times} times, not 1"):
        rendered(asked(**problem), schedule, tmp_path)


def test_a_part_that_is_not_there_is_named(tmp_path: Path) -> None:
    shutil.copy(paths.templates() / "gemv_half.py.jinja", tmp_path)
    with pytest.raises(TemplateError, match=r"there is no template fragments\.jinja in "):
        rendered(asked(), FAST_HALF, tmp_path)


def test_an_unchanged_copy_of_the_template_renders_the_same(changed) -> None:  # type: ignore[no-untyped-def]
    assert rendered(asked(), folder=changed("{{ store() }}", "{{ store() }}")).source == rendered(asked()).source


def test_a_template_that_is_edited_is_read_again(changed) -> None:  # type: ignore[no-untyped-def]
    """And so is one that it includes, in the same process."""
    folder = changed("{{ store() }}", "{{ store() }}")
    for name, schedule in (("gemv.py", None), ("gemv_half.py", FAST_HALF), ("thread", FAST_HALF)):
        edited, before = folder / f"{name}.jinja", rendered(asked(), schedule, folder).source
        assert rendered(asked(), schedule, folder).source == before
        edited.write_text(re.sub(r"(?m)^(@\w+\.jit\(|@gluon\.jit\ndef each_of)", r"# edited\n\1", edited.read_text()))
        assert rendered(asked(), schedule, folder).source.count("# edited") == before.count("# edited") + 1, name


def test_an_unknown_name_in_a_template_is_an_error(changed) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(TemplateError, match=r"gemv\.py\.jinja: .*speed"):
        rendered(asked(), folder=changed("{{ store() }}", "{{ speed() }}"))


def test_a_kernel_takes_the_tiles_of_its_program(changed) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(TemplateError, match="gemv takes"):
        rendered(asked(), folder=changed("    #{{ weights() }}\n", "    codes_ptr,\n"))


def test_a_schedule_field_that_no_template_reads_is_an_error() -> None:
    with pytest.raises(TemplateError, match="never reads vector of the schedule: leave it at 2"):
        rendered(asked(), vector=4)


def test_a_template_without_parts_refuses_a_schedule_with_them() -> None:
    problem = asked(m=(9, 16), format=named("nf4_g64"), layout=rows(256, 1536, 4, 16))
    assert pick(lower(problem), SM_80).template == "gemv"
    with pytest.raises(TemplateError, match="acc sums over part, the template starts it anew for each turn around step"):
        rendered(problem, split_k=2, arch=SM_80)


def test_a_template_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match=r"gemm\.py\.jinja"):
        rendered(asked(m=(17, 17)), ONE, folder=tmp_path)


def test_a_schedule_without_a_printer_is_an_error() -> None:
    with pytest.raises(
        TemplateError, match="no printer for a template gemw: there are gemv, gemm, dequant, gemv_mma, gemv_half, gemm_wgmma"
    ):
        rendered(asked(), template="gemw")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"warps": 2, "block_n": 16}, "gives each of 2 warps 16 outputs"),
        ({"warps": 8}, "gives each of 8 warps 16 outputs"),
        ({"side": "right"}, "template=gemm is made for unit=mma side=left, not for unit=mma side=right: take that, or another"),
    ],
)
def test_tiles_that_gemm_cannot_print_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        rendered(asked(m=(17, 32), format=named("int4_row")), replace(ONE, **change))


@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64", "uint4_g50_z"])
@pytest.mark.parametrize("m", [(1, 1), (2, 8), (17, 32), (129, 200)], ids=str)
@pytest.mark.parametrize("template", ["gemv", "gemm", "dequant"])
def test_a_template_prints_what_it_is_made_for_and_refuses_the_rest(template: str, m: tuple[int, int], form: str) -> None:
    """Every unit and side with every template: a kernel or a `W4Error`, never another exception."""
    problem, kernels = asked(m=m, format=named(form)), 0
    picked = pick(lower(problem), PORTABLE)
    for unit, side, scale_at in itertools.product(("lanes", "mma", "vendor"), ("left", "right"), ("weight", "accumulator")):
        convert_at = "global" if unit == "vendor" else "register"
        for change in ({}, {"block_m": 16, "block_n": 64, "block_k": 128}):
            changed = {"unit": unit, "side": side, "scale_at": scale_at, "zero_at": "weight", "convert_at": convert_at}
            try:
                made(lower(problem), replace(picked, template=template, **changed, **change), PORTABLE)
            except W4Error:
                continue
            kernels += 1
            assert (unit, side) in PRINTERS[template].UNITS
    assert kernels or template != picked.template


@pytest.mark.parametrize("schedule", [ONE, SPLIT, FAST_MMA], ids=lambda schedule: schedule.template)
@pytest.mark.parametrize("run", [1, 4, 8, 16])
def test_what_takes_w_on_the_left_refuses_rows(run: int, schedule: Schedule) -> None:
    layout = rows(256, 1536, 4, run)
    with pytest.raises(W4Error, match="is one of rows: w as the left operand is read in the order of its fragments"):
        rendered(asked(m=(2, 8), layout=layout, format=named("int4_row")), schedule)


NEIGHBOURS = fragment_order(named("nf4_g64"), M16K16, 256, 1536)
"""Codes of a pair next to each other, as codebooks have them."""
OTHERS = {
    "pairs next to each other": NEIGHBOURS,
    "k + 8 before n + 8": Layout.parse("n8@512,n2@8,n16@98304,k2@16,k4@128,k2@4,k2@32,k2@64,k24@4096;4/32"),
    "fragments the other way round": Layout.parse("n8@512,n2@4,n16@98304,k2@16,k4@128,k2@8,k2@64,k2@32,k24@4096;4/32"),
    "lanes the other way round": Layout.parse("n8@128,n2@4,n16@98304,k2@16,k4@1024,k2@8,k2@32,k2@64,k24@4096;4/32"),
    "k first": Layout.parse("n8@512,n2@4,n16@4096,k2@16,k4@128,k2@8,k2@32,k2@64,k24@65536;4/32"),
}


@pytest.mark.parametrize("schedule", [FAST_MMA, FAST_HALF], ids=lambda schedule: schedule.template)
@pytest.mark.parametrize("layout", OTHERS.values(), ids=OTHERS)
def test_fast_templates_refuse_fragments_in_another_order(layout: Layout, schedule: Schedule) -> None:
    """Their printers take the pairs of a word as they come; the rules dequantize what is in another order."""
    problem = asked(m=(1, 1) if schedule is FAST_HALF else (2, 8), layout=layout)
    with pytest.raises(
        W4Error, match=rf"{schedule.template} reads codes in the order of m16k16, not |what a block of the layout"
    ):
        rendered(problem, schedule)
    assert pick(lower(problem), SM_90).template == "dequant"


@pytest.mark.parametrize("m", [(1, 1), (2, 8), (9, 16)], ids=str)
@pytest.mark.parametrize("name", ["int4_g128", "int4_g64", "int8_g128", "nf4_g64", "uint4_g128_z"])
@pytest.mark.parametrize("k", [192, 576, 1000, 1536])
def test_fast_templates_read_no_words_beyond_those_stored(k: int, name: str, m: tuple[int, int]) -> None:
    """They ask for whole steps without a mask: a step must not run over the end of the inputs that are stored."""
    problem = asked(m=m, n=8192, k=k, format=named(name))
    kernel = made(lower(problem), pick(lower(problem), SM_90), SM_90)
    assert kernel.name in ("gemv_half", "gemv_mma")
    stored = kernel.program.tile("codes.stored").layout
    assert stored is not None
    assert kernel.program.tile(kernel.program.source("w.tile")).sizes["k"] == stored.size("k")


@pytest.mark.parametrize("schedule", [FAST_MMA, replace(FAST_HALF, split_k=1, sum_at="global")], ids=lambda each: each.template)
def test_fast_templates_refuse_steps_that_run_over_the_end(schedule: Schedule) -> None:
    problem = asked(m=(1, 1) if schedule.template == "gemv_half" else (2, 8), k=192, format=named("int4_g128"))
    with pytest.raises(TemplateError, match="block_k=128 does not divide the 192 inputs stored: take 64"):
        rendered(problem, schedule)


def test_a_ring_of_one_piece_is_refused() -> None:
    """It would wait for all but -1 of the copies, which assembles."""
    with pytest.raises(TemplateError, match="ring=1, take 2 or more"):
        rendered(asked(m=(2, 8)), replace(FAST_MMA, ring=1))


@pytest.mark.parametrize(("name", "power"), [("e2m1_g128", 14), ("fp8_e4m3", 8), ("fp8_e5m2", 0)])
def test_sums_make_up_for_the_power_that_decoding_left_out(name: str, power: int) -> None:
    """No rule gives these kernels; a schedule of one's own may. Chains of halves cannot make up for it, and are refused."""
    source = rendered(asked(m=(2, 8), format=named(name)), FAST_MMA).source
    assert re.findall(r"\btotal \*= 2\.0\*\*(\d+)", source) == ([str(power)] if power else [])
    assert "scaled = (part[0] * a, part[1] * a, part[2] * b, part[3] * b)" in source
    with pytest.raises(TemplateError, match="take gemv_mma"):
        rendered(asked(m=(1, 1), format=named(name)), FAST_HALF)


@pytest.mark.parametrize("options", [{"activation": "silu_mul"}, {"activation": "relu"}, {"residual": True}], ids=str)
def test_halves_store_sums_as_they_are(options: dict[str, object]) -> None:
    with pytest.raises(TemplateError, match="take gemv_mma for an activation or a residual"):
        rendered(asked(m=(1, 1), format=named("int4_g128"), **options), FAST_HALF)


def test_wgmma_adds_a_residual_only_where_programs_share_k() -> None:
    problem = asked(m=(129, 256), n=256, k=4096, format=named("int4_g128"))
    schedule = pick(lower(problem), ARCHES["sm_90"])
    assert (schedule.template, schedule.split_k > 1) == ("gemm_wgmma", True)
    assert "residual_ptr" in rendered(replace(problem, residual=True), schedule).source
    with pytest.raises(TemplateError, match="gemm_wgmma adds no residual, unless programs share k: take gemm"):
        rendered(replace(problem, residual=True), replace(schedule, split_k=1))


def test_gemm_refuses_rows_of_blocks_that_are_not_neighbours() -> None:
    layout = Layout.parse("n8@512,n2@4,n2@98304,n8@196608,k2@16,k4@128,k2@8,k2@32,k2@64,k24@4096;4/32")
    with pytest.raises(TemplateError, match="its blocks of rows are no single run"):
        rendered(asked(m=(17, 32), layout=layout), ONE)


def test_a_tile_in_shared_memory_is_an_error_for_a_template_that_keeps_it_in_registers() -> None:
    """No schedule asks for one; a program that has one is refused all the same."""
    schedule = Schedule(template="gemv", block_k=1024, scale_at="weight")
    program = apply(lower(asked()), schedule, PORTABLE)

    def shared(b: Builder, operands: dict[str, str]) -> str:
        return b.add("w", program.op("w"), operands, F32, Space.SHARED)

    with pytest.raises(TemplateError, match="w lives in shared memory"):
        render(rewrite(program, {"w": shared}), schedule, "portable")


CODEBOOK = tuple(float(value) for value in range(16))
SEVERAL = {"m": (2, 16)}
MMA = {"unit": "mma", "block_m": 16, "block_k": 128, "zero_at": "weight"}
CHANGES: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "m": (SEVERAL, MMA),
    "n": ({"n": 257}, {}),
    "n, by one row": ({"n": 255}, {}),
    "k": ({"k": 1535}, {}),
    "format": ({"format": named("nf4_g128")}, {}),
    "origin": ({"format": Format("int4", origin=-7.0)}, {}),
    "step": ({"format": Format("int4", origin=-8.0, step=2.0)}, {}),
    "bits": ({"format": Format("int4", bits=2, origin=-8.0)}, {"block_k": 4096}),
    "group": ({"format": named("int4_g64")}, {}),
    "whole row": ({"format": named("int4_row")}, {}),
    "unsigned": ({"format": named("uint4")}, {}),
    "integer zero": ({"format": named("uint4_z")}, {"zero_at": "weight"}),
    "integer zero, scale_at": ({"format": named("uint4_z")}, {"zero_at": "weight", "scale_at": "weight"}),
    "float zero on matrix cores": (SEVERAL | {"format": named("uint4_zf")}, MMA),
    "integer zero on matrix cores": (SEVERAL | {"format": named("uint4_z")}, MMA),
    "minimum": ({"format": named("uint4_m")}, {}),
    "minimum, scale_at": ({"format": named("uint4_m")}, {"zero_at": "weight", "scale_at": "weight"}),
    "minimum with an origin": ({"format": named("int4_m")}, {}),
    "minimum on matrix cores": (SEVERAL | {"format": named("uint4_m")}, MMA | {"zero_at": "accumulator"}),
    "scale type": ({"format": named("int4_g128_bf16")}, {}),
    "layout run": ({"layout": rows(256, 1536, 4, 8)}, {}),
    "plain rows": ({"layout": rows(256, 1536, 4)}, {}),
    "padded rows": ({"layout": rows(264, 1536, 4, 16)}, {}),
    "x": ({"x": BF16, "y": BF16}, {"zero_at": "weight"}),
    "y": ({"y": F32}, {}),
    "bias": ({"bias": True}, {}),
    "block_n": ({}, {"block_n": 8}),
    "block_k": ({}, {"block_k": 1024}),
    "block_m": ({"m": (2, 16)}, {"unit": "mma", "block_m": 32, "block_k": 128, "zero_at": "weight"}),
    "several rows, scale_at": (SEVERAL, MMA | {"scale_at": "weight"}),
    "several rows and a large group": (SEVERAL | {"format": named("int4_row")}, MMA | {"block_k": 1024}),
    "scale_at": ({}, {"scale_at": "weight", "zero_at": "weight"}),
    "zero_at": ({}, {"zero_at": "weight"}),
    "warps": ({}, {"warps": 8}),
    "stages": ({}, {"stages": 3}),
}


GEMM_CHANGES: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "m": ({"m": (33, 64)}, {}),
    "n": ({"n": 192}, {}),
    "n, by one row": ({"n": 255}, {}),
    "k": ({"k": 1535}, {}),
    "k, by a step": ({"k": 2048}, {}),
    "origin": ({"format": Format("int4", origin=-7.0)}, {}),
    "step": ({"format": Format("int4", origin=-8.0, step=2.0)}, {}),
    "bits": ({"format": Format("int4", bits=8, origin=-8.0)}, {}),
    "fewer bits": ({"format": Format("int4", bits=2, origin=-2.0, group=256)}, {"block_k": 256, "split_k": 2}),
    "group": ({"format": named("int4_g64")}, {"block_k": 64}),
    "small group": ({"format": named("int4_g16")}, {"scale_at": "weight"}),
    "whole row": ({"format": named("int4_row")}, {}),
    "scale type": ({"format": named("int4_g128_bf16")}, {}),
    "pairs next to each other": ({"layout": NEIGHBOURS}, {}),
    "codebook": ({"format": named("nf4_g128")}, {}),
    "integer zero": ({"format": named("uint4_z")}, {}),
    "float zero": ({"format": named("uint4_zf")}, {}),
    "minimum": ({"format": named("uint4_m")}, {"zero_at": "accumulator"}),
    "one row": ({"m": (1, 1)}, {"block_m": 16}),
    "scale_at": ({}, {"scale_at": "weight"}),
    "block_k": ({}, {"block_k": 64}),
    "overlap": ({}, {"overlap": 1}),
    "x": ({"x": BF16, "y": BF16}, {}),
    "y": ({"y": F32}, {}),
    "bias": ({"bias": True}, {}),
    "block_m": ({}, {"block_m": 64}),
    "block_n": ({}, {"block_n": 128}),
    "block_n and warps": ({}, {"block_n": 128, "warps": 8, "split_k": 2}),
    "warps": ({}, {"block_n": 128, "warps": 8}),
    "split_k": ({}, {"split_k": 6}),
    "no split": ({}, {"split_k": 1}),
    "no split, bias": ({"bias": True}, {"split_k": 1}),
    "vector": ({}, {"vector": 4}),
    "maxnreg": ({}, {"maxnreg": 128}),
    "stages": ({}, {"stages": 2}),
}
DENSE_CHANGES: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "n": ({"n": 257}, {}),
    "k": ({"k": 1535}, {}),
    "origin": ({"format": Format("int4", origin=-7.0)}, {}),
    "step": ({"format": Format("int4", origin=-8.0, step=2.0)}, {}),
    "bits": ({"format": Format("int4", bits=2, origin=-8.0)}, {}),
    "format": ({"format": named("nf4_g128")}, {}),
    "group": ({"format": named("int4_g64")}, {}),
    "zero": ({"format": named("int4_z")}, {}),
    "minimum": ({"format": named("int4_m")}, {}),
    "layout run": ({"layout": rows(256, 1536, 4, 8)}, {}),
    "fragments": ({"layout": fragment_order(named("int4"), M16K16, 256, 1536)}, {}),
    "x": ({"x": BF16, "y": BF16}, {}),
    "block_n": ({}, {"block_n": 8}),
    "block_k": ({}, {"block_k": 256}),
    "m": ({"m": (2, 16)}, {}),
    "bias": ({"bias": True}, {}),
    "scale type": ({"format": named("int4_g128_bf16")}, {}),
    "warps": ({}, {"warps": 8}),
}


MMA_CHANGES: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "m": ({"m": (9, 16)}, {"block_m": 16}),
    "n": ({"n": 240}, {}),
    "n, by one row": ({"n": 255}, {}),
    "k": ({"k": 1528}, {}),
    "k, by a step": ({"k": 2048}, {}),
    "origin": ({"format": Format("int4", origin=-7.0)}, {}),
    "step": ({"format": Format("int4", origin=-8.0, step=2.0)}, {}),
    "bits": ({"format": Format("int4", bits=8, origin=-8.0)}, {}),
    "fewer bits": ({"format": Format("int4", bits=2, origin=-2.0)}, {}),
    "whole row": ({"format": named("int4_row")}, {}),
    "group": ({"format": named("int4_g64")}, {"block_k": 64}),
    "x": ({"x": BF16, "y": BF16}, {}),
    "y": ({"y": F32}, {}),
    "bias": ({"bias": True}, {}),
    "block_n": ({}, {"block_n": 32}),
    "block_k": ({}, {"block_k": 64}),
    "warps": ({}, {"warps": 8}),
    "stages": ({}, {"stages": 2}),
    "ring": ({}, {"ring": 3}),
    "overlap": ({}, {"overlap": 0}),
    "maxnreg": ({}, {"maxnreg": 128}),
    "scale type": ({"format": named("int4_g128_bf16")}, {}),
}
HALF_CHANGES = {
    what: each for what, each in MMA_CHANGES.items() if what not in ("m", "x", "bits", "block_n", "ring", "stages")
} | {
    "split_k": ({}, {"split_k": 2}),
    "no cluster": ({}, {"split_k": 1, "sum_at": "global"}),
    "stages": ({}, {"stages": 1, "split_k": 1, "sum_at": "global"}),
}

MANY_CHANGES: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "n": ({"n": 384}, {}),
    "k": ({"k": 2048}, {}),
    "m": ({"m": (66, 128)}, {}),
    "bits": ({"format": named("int2_g128")}, {}),
    "group": ({"format": named("int4_g64")}, {}),
    "zeros": ({"format": named("uint4_g128_z")}, {}),
    "x": ({"x": BF16, "y": BF16}, {}),
    "scale type": ({"x": BF16, "y": BF16, "format": replace(named("int4_g128"), scale=BF16)}, {}),
    "bias": ({"bias": True}, {}),
    "block_m": ({}, {"block_m": 64}),
    "block_n": ({}, {"block_n": 64, "teams": 1}),
    "block_k": ({}, {"block_k": 64}),
    "split_k": ({}, {"split_k": 1}),
    "stages": ({}, {"stages": 1}),
    "ring": ({}, {"ring": 4}),
    "maxnreg": ({}, {"maxnreg": 80}),
    "overlap": ({}, {"overlap": 0}),
}


NOT_IN_BODY = {"gemv": {"warps", "stages", "scale type", "padded rows"}}
NOT_IN_BODY["gemm"] = {"m", "stages", "maxnreg", "scale type", "warps"}
NOT_IN_BODY["dequant"] = {"m", "bias", "warps", "scale type"}
NOT_IN_BODY["gemv_mma"] = NOT_IN_BODY["gemv_half"] = {"maxnreg", "scale type"}
NOT_IN_BODY["gemm_wgmma"] = {"m"}
"""Facts of the launch (the types of pointers are Triton's to find out), or of rows that are never read."""


def body(kernel: Kernel) -> str:
    """The text that runs: without the header and the facts, which name the problem and schedule anyway."""
    return kernel.source.split("import triton\n", 1)[1].split("\nPROBLEM =", 1)[0]


def every_kernel(template: str) -> dict[str, Kernel]:
    """The kernel of a template's own question, and one for each change."""
    if template == "gemv":
        base = Schedule(template="gemv", block_k=2048, zero_at="accumulator", warps=2)
        changed = {what: rendered(asked(**p), replace(base, **s) if s else None) for what, (p, s) in CHANGES.items()}
        return {"nothing": rendered(asked(), base), **changed}
    m, base, changes = {
        "gemm": ((17, 32), SPLIT, GEMM_CHANGES),
        "gemv_mma": ((2, 8), FAST_MMA, MMA_CHANGES),
        "gemv_half": ((1, 1), FAST_HALF, HALF_CHANGES),
        "gemm_wgmma": ((65, 128), replace(MANY, split_k=2), MANY_CHANGES),
        "dequant": ((129, 2**31 - 1), pick(lower(asked(m=(129, 2**31 - 1))), PORTABLE), DENSE_CHANGES),
    }[template]
    changed = {what: rendered(asked(**{"m": m, **p}), replace(base, **s)) for what, (p, s) in changes.items()}
    return {"nothing": rendered(asked(m=m), base), **changed}


@pytest.mark.parametrize("template", NOT_IN_BODY)
def test_changing_any_one_thing_changes_the_text(template: str) -> None:
    seen: dict[str, str] = {}
    for what, kernel in every_kernel(template).items():
        assert seen.setdefault(kernel.source, what) == what


@pytest.mark.parametrize("template", NOT_IN_BODY)
def test_changing_any_one_thing_changes_the_text_that_runs(template: str) -> None:
    seen: dict[str, str] = {}
    for what, kernel in every_kernel(template).items():
        if what not in NOT_IN_BODY[template]:
            assert seen.setdefault(body(kernel), what) == what


NODES: dict[str, tuple[str, object, object]] = {
    "rows of a block of w": ("w.tile", Slice((Block("n", 2, "n"), Block("lane", 64, "step"))), None),
    "codes of a word": ("w.codes", Field(rows(256, 1536, 4, 16), 2), None),
    "how codes are decoded": ("w.value", Convert(decode(named("int4"), F32, 8)), None),
    "weights under a scale": ("scale.k", Repeat(64, 1536), None),
    "order of x": ("x.order", Split(rows(256, 1536, 4, 8), 1), None),
    "type of the sums": ("part", None, F16),
    "origin": ("scaled", Convert(origin=-7.0), None),
    "axis of a sum": ("total", Reduce(("n",)), None),
    "loop of a sum": ("acc", Reduce(("span",)), None),
    "type of y": ("y", None, F32),
    "size of y": ("y", Store((("m", 1), ("n", 255))), None),
    "activation": ("y", Store((("m", 1), ("n", 256)), "relu"), None),
}


@pytest.mark.parametrize("name", ["uint4_g128_z", "uint4_g128_m", "uint4_g50_z", "uint4_g50_m"])
@pytest.mark.parametrize("m", [(1, 1), (2, 16)], ids=str)
def test_a_template_that_loads_no_zero_gets_it_where_it_is_used(name: str, m: tuple[int, int], changed) -> None:  # type: ignore[no-untyped-def]
    """Once, whatever the mode: a template only has to take zero_ptr."""
    source = rendered(asked(format=named(name), m=m), folder=changed('{{ load("zero") }}', "pass")).source
    assert source.count("tl.load(zero_ptr") == 1


@pytest.mark.parametrize("what", NODES)
def test_changing_any_one_node_changes_the_text_or_is_refused(what: str) -> None:
    """Design section 5: the IR drives the text; what a template or the problem says beside it must not win over the program."""
    node, op, element = NODES[what]
    change_one(asked(), Schedule(template="gemv", block_k=2048, zero_at="accumulator", warps=2), node, op, element)


LEFT_NODES: dict[str, tuple[str, object, object]] = {
    "rows of a block of w": ("w.tile", Slice((Block("n", 128, "n"), Block("k", 128, "step"))), None),
    "k of a block of w": ("w.tile", Slice((Block("n", 64, "n"), Block("k", 64, "step"))), None),
    "rows of a block of x": ("x.tile", Slice((Block("m", 64, "m"), Block("k", 128, "step"))), None),
    "the map from memory": ("codes.view", Unpack(NEIGHBOURS), None),
    "how codes are decoded": ("w.value", Convert(decode(named("int4"), F32, 8)), None),
    "the values of codes": ("w.value", Convert(decode(Format("int4", origin=-7.0), F16, 4)), None),
    "the type of values": ("w.value", Convert(decode(named("int4"), BF16, 4)), BF16),
    "the map of scales": ("scale.view", Unpack(beside(rows(256, 1536, 4), 12, 16)), None),
    "weights under a scale": ("scale.k", Repeat(64, 1536), None),
    "the scale of a step": ("scale.at", Slice((Block("k", 1, "step", drop=True),)), None),
    "type of the products": ("part", None, F16),
    "unit of the products": ("part", Dot(("k",), "lanes", "left"), None),
    "side of the products": ("part", Dot(("k",), "mma", "right"), None),
    "type of the scaled sums": ("scaled", None, F16),
    "an origin that is made up for": ("scaled", Convert(origin=-7.0), None),
    "parts": ("parts", Reduce((), "step", 2), None),
    "type of the parts": ("parts", None, F16),
    "loop of a sum": ("parts", Reduce((), "lane", 4), None),
    "axis of the last sum": ("acc", Reduce(("n",)), None),
    "type of the last sum": ("acc", None, F16),
    "type of y": ("y", None, F32),
    "size of y": ("y", Store((("m", 32), ("n", 255))), None),
    "activation": ("y", Store((("m", 32), ("n", 256)), "relu"), None),
}


@pytest.mark.parametrize("what", LEFT_NODES)
@pytest.mark.parametrize("question", ["gemm in parts", "mma", "half"])
def test_changing_any_one_node_of_blocks_changes_the_text_or_is_refused(question: str, what: str) -> None:
    _, problem, schedule = QUESTIONS[question]
    node, op, element = LEFT_NODES[what]
    if node == "parts" and question == "mma":
        node = "acc"
    if node in apply(lower(asked(**problem)), schedule, SM_80):
        change_one(asked(**problem), schedule, node, op, element)


DENSE_NODES: dict[str, tuple[str, object, object]] = {
    "rows of a block": ("w.tile", Slice((Block("n", 8, "n"), Block("k", 512, "k"))), None),
    "the map from memory": ("codes.view", Unpack(rows(256, 1536, 4, 8)), None),
    "how codes are decoded": ("w.value", Convert(decode(Format("int4", origin=-7.0), F32, 8, in_place=False)), None),
    "weights under a scale": ("scale.k", Repeat(64, 1536), None),
    "type of the weight": ("w", None, BF16),
    "type of the dense weight": ("w.dense", None, BF16),
    "size of the dense weight": ("w.dense", Store((("n", 255), ("k", 1536))), None),
}


@pytest.mark.parametrize("what", DENSE_NODES)
def test_changing_any_one_node_of_a_dequantization_changes_the_text_or_is_refused(what: str) -> None:
    problem = asked(m=(129, 2**31 - 1))
    change_one(problem, pick(lower(problem), PORTABLE), *DENSE_NODES[what])


def change_one(problem: Problem, schedule: Schedule, node: str, op: object, element: object) -> None:
    """Render a program with one node made differently: another text, or none."""
    program = apply(lower(problem), schedule, home(schedule))

    def emit(b: Builder, operands: dict[str, str]) -> str:
        return b.add(node, op or program.op(node), operands, element or program.tile(node).element, program.tile(node).space)

    try:
        after = render(rewrite(program, {node: emit}), schedule, "portable").source
    except (W4Error, LookupError):  # the second is made a `TemplateError` by `pipeline.made`
        return
    assert after != render(program, schedule, "portable").source


def test_other_values_in_a_codebook_are_another_question() -> None:
    """Fixed tables are part of the format; the header must not claim a built-in name for another table."""
    mine = Format("nf4", codebook=CODEBOOK, group=64)
    assert rendered(asked(format=mine)).source != rendered(asked(format=named("nf4_g64"))).source
    assert f"--format '{mine}'" in rendered(asked(format=mine)).source.splitlines()[1]


@pytest.mark.parametrize("m", BUCKETS, ids=str)
@pytest.mark.parametrize("name", ["int4_g128", "nf4_g64_bf16", "int4_row", "uint4_g64_z", "uint4_g32_m_bf16"])
@pytest.mark.parametrize("arch", [PORTABLE, SM_90], ids=lambda arch: arch.name)
def test_a_rendered_text_says_what_it_answers_and_reads_back(arch: Arch, name: str, m: tuple[int, int]) -> None:
    kernel = rendered(asked(format=named(name), m=m, bias=True), arch=arch)
    again = read(kernel.source)
    assert (again.name, again.source, again.pieces) == (kernel.name, kernel.source, kernel.pieces)
    assert replace(again.problem, layout=None) == kernel.problem
    assert again.schedule == kernel.schedule
    first, second = kernel.source.splitlines()[:2]
    assert name in first
    assert str(kernel.schedule) in first
    assert second.startswith(
        f"# made by: w4gen compile --m {m[1]} --n 256 --k 1536 --format {name} --dtype f16 --bias --arch {arch.name}"
    )


def test_text_of_other_origin_is_refused() -> None:
    with pytest.raises(TemplateError, match="not one that w4gen rendered"):
        read("x = 1\n")


def test_sizes_are_named_at_the_top() -> None:
    source = rendered(asked()).source
    assert "N = tl.constexpr(256)  # outputs" in source
    assert "K = tl.constexpr(1536)  # inputs" in source


@pytest.mark.parametrize("m", BUCKETS, ids=str)
@pytest.mark.parametrize("name", ["int4_g128", "nf4_g64", "int4_g50", "int4_g32", "uint4_g128_z", "uint4_g50_m", "int8_g128"])
@pytest.mark.parametrize("x", [F16, BF16], ids=str)
@pytest.mark.parametrize(("n", "k"), [(256, 1536), (37, 331), (1, 1)])
def test_rendered_text_is_python_without_holes(m: tuple[int, int], name: str, x: object, n: int, k: int) -> None:
    for arch in (PORTABLE, SM_90):
        source = rendered(asked(m=m, n=n, k=k, format=named(name), x=x, y=x, bias=True), arch=arch).source
        ast.parse(source)
        assert not re.search(r"\{\{ |#\{[%#]|%\}", source)


BLOCKS = ["int4_g128", "int4_g32", "int4_g16", "int4_row", "uint4_g64", "int8_g64"]


@pytest.mark.parametrize(("target", "name", "x"), thinned(["sm_80", "sm_90"], BLOCKS, [F16, BF16]))
def test_no_sum_is_carried_through_a_dot_with_w_on_the_left(target: str, name: str, x: object) -> None:
    """The hazard of docs/kernels.md: the next decoding would overwrite registers that an instruction still reads."""
    arch = replace(ARCHES[target], features=ARCHES[target].features - {"gluon"})
    for m, (n, k) in itertools.product([each for each in BUCKETS if each[1] <= 128], [(256, 1536), (47, 2100), (28672, 8192)]):
        kernel = rendered(asked(m=m, n=n, k=k, format=named(name), x=x, y=x), arch=arch)
        assert kernel.name == "gemm"
        tree = ast.parse(kernel.source)
        function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "gemm")
        check_dots(function)
        if target == "sm_90":
            check_factors(function)


def check_factors(function: ast.FunctionDef) -> None:
    """What a `tl.dot` made is multiplied before anything else: what is only added would be folded into the instruction."""
    (name,) = {ast.unparse(each.targets[0]) for each in ast.walk(function) if isinstance(each, ast.Assign) and is_dot(each.value)}
    used = [node for node in ast.walk(function) if name in {ast.unparse(each) for each in ast.iter_child_nodes(node)}]
    factors = [node for node in used if isinstance(node, ast.AugAssign | ast.BinOp) and isinstance(node.op, ast.Mult)]
    made = [node for node in used if isinstance(node, ast.Assign) and is_dot(node.value)]
    assert factors
    assert all(isinstance(each, ast.AugAssign) for each in factors) or len(used) == len(factors) + len(made)


def is_dot(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.dot"


def check_dots(function: ast.FunctionDef) -> None:
    """Every `tl.dot` makes a new name from two operands that are not that name; it is bound nowhere else, but for a factor 1."""
    dots = [node for node in ast.walk(function) if is_dot(node)]
    made = [node for node in ast.walk(function) if isinstance(node, ast.Assign) and node.value in dots]
    assert dots
    assert len(made) == len(dots), "a dot is the whole of what is assigned"
    for assign in made:
        (name,) = (ast.unparse(target) for target in assign.targets)
        assert len(assign.value.args) == 2
        assert not assign.value.keywords
        names = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == name]
        ones = [node for node in ast.walk(function) if isinstance(node, ast.AugAssign) and ast.unparse(node) == f"{name} *= one"]
        assert sum(isinstance(node.ctx, ast.Store) for node in names) == 1 + len(ones)
        assert not [node for node in ast.walk(assign.value) if isinstance(node, ast.Name) and node.id == name]


@pytest.mark.parametrize(
    "line",
    [
        "part = tl.dot(w_value, tl.trans(x_tile), part)",
        "part = tl.dot(w_value, tl.trans(x_tile), acc=parts)",
        "parts += tl.dot(w_value, tl.trans(x_tile))",
        "part = parts\n        part = tl.dot(w_value, tl.trans(x_tile))",
    ],
)
def test_a_carried_sum_is_noticed(line: str) -> None:
    source = rendered(asked(**GEMM), SPLIT).source
    assert "part = tl.dot(w_value, tl.trans(x_tile))" in source
    tree = ast.parse(source.replace("part = tl.dot(w_value, tl.trans(x_tile))", line))
    with pytest.raises(AssertionError):
        check_dots(next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "gemm"))


PIECES = {
    ("gemv", (1, 1)): [("gemv", (("n", 1), ("m", 1)))],
    ("gemm", (17, 32)): [("gemm", (("m", 32), ("n", 64), ("part", 1))), ("add_parts", (("y", 1024),))],
    ("dequant", (129, 2**31 - 1)): [("dequant", (("k", 512), ("n", 4)))],
    ("gemv_mma", (2, 8)): [("gemv_mma", (("n", 16), ("m", 8)))],
    ("gemv_half", (1, 1)): [("gemv_half", (("n", 16),))],
    ("gemm_wgmma", (65, 128)): [("gemm_wgmma", (("m", 32), ("n", 128), ("part", 1))), ("add_parts", (("y", 1024),))],
}
HOME = {"gemv": PORTABLE, "gemm": PLAIN, "dequant": PORTABLE, "gemv_mma": SM_90, "gemv_half": SM_90, "gemm_wgmma": SM_90}


@pytest.mark.parametrize(("template", "m"), PIECES, ids=str)
def test_a_kernel_says_its_functions_and_their_grids(template: str, m: tuple[int, int]) -> None:
    kernel = rendered(asked(m=m, n=250, bias=True), arch=HOME[template])
    assert [(piece.name, piece.grid) for piece in kernel.pieces] == PIECES[template, m]
    took = [{argument.removesuffix("_ptr") for argument in piece.arguments} for piece in kernel.pieces]
    assert (
        took
        == {
            "gemv": [{"y", "x", "codes", "scale", "bias", "m_count"}],
            "gemm": [{"parts", "x", "codes", "scale", "m_count"}, {"y", "parts", "bias", "m_count"}],
            "dequant": [{"dense", "codes", "scale"}],
            "gemv_mma": [{"y", "x", "codes", "scale", "bias", "m_count"}],
            "gemv_half": [{"y", "x", "codes", "scale", "bias", "m_count"}],
            "gemm_wgmma": [{"parts", "x", "codes", "scale", "m_count"}, {"y", "parts", "bias", "m_count"}],
        }[template]
    )


def test_programs_cover_every_row_and_output() -> None:
    kernel = rendered(asked(m=(65, 128), n=250), arch=PLAIN)
    gemm, add = kernel.pieces
    assert kernel.schedule.split_k > 1
    for m in (65, 127, 128):
        columns = -(-250 // kernel.schedule.block_n)
        assert kernel.programs(gemm, m) == (-(-m // kernel.schedule.block_m), columns, kernel.schedule.split_k)
        assert kernel.programs(add, m) == (-(-m * 250 // 1024), 1, 1)
    (dense,) = rendered(asked(m=(129, 2**31 - 1), n=250)).pieces
    assert rendered(asked(m=(129, 2**31 - 1), n=250)).programs(dense, 4096) == (3, 63, 1)


@pytest.mark.parametrize(("n", "wide"), [(2**18 - 1, False), (2**18, True)])
def test_a_dense_weight_beyond_32_bits_is_addressed_with_64(n: int, wide: bool) -> None:
    assert ("n = n.to(tl.int64)" in rendered(asked(m=(129, 200), n=n, k=2**13)).source) == wide


@pytest.mark.parametrize(
    ("m", "arch"), [((1, 1), PORTABLE), ((1, 1), SM_90), ((2, 8), SM_90), ((2, 8), PLAIN), ((33, 64), SM_90)], ids=str
)
def test_what_32_bits_do_not_reach_is_refused_by_other_templates(m: tuple[int, int], arch: Arch) -> None:
    with pytest.raises(TemplateError, match=r"codes\.stored has more elements than indices of 32 bits reach: take unit=vendor"):
        rendered(asked(m=m, n=2**20, k=2**14), arch=arch)


@pytest.mark.parametrize("m", BUCKETS, ids=str)
@pytest.mark.parametrize("name", ["int4_g128", "nf4_g64"])
def test_a_large_vocabulary_fits_the_grid(name: str, m: tuple[int, int]) -> None:
    """CUDA takes 2**31 - 1 programs along the first axis of a grid and 65 535 along the others."""
    for arch in (PORTABLE, PLAIN, SM_90):
        kernel = rendered(asked(m=m, n=262208, k=5376, format=named(name)), arch=arch)
        for piece in kernel.pieces:
            first, *others = kernel.programs(piece, m[0])
            assert first * kernel.schedule.split_k < 2**31
            assert all(count <= 65535 for count in others)


def test_compiling_needs_no_torch() -> None:
    """Floors 0 to 4 work where torch cannot even be imported."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import w4gen\n"
        "kernel = w4gen.compile('1x1536x256', 'nf4_g64', arch='sm_90')\n"
        "import w4gen.ir.interpret, w4gen.ir.show, w4gen.toolchain\n"
        "assert f'def {kernel.name}(' in kernel.source and sys.modules['torch'] is None\n"
        "assert not [name for name in sys.modules if name.startswith('torch.')]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_w4gen_loads_neither_torch_nor_triton() -> None:
    code = "import w4gen, sys; assert not {'torch', 'triton', 'jinja2', 'numpy'} & set(sys.modules), sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_test_of_this_folder_imports_torch() -> None:
    for path in Path(__file__).parent.glob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        names = [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
        assert not [name for name in names if name.split(".")[0] in ("torch", "triton")], path


def test_ruff_is_there_for_the_goldens() -> None:
    assert shutil.which("ruff") or (Path(sys.executable).parent / "ruff").exists()


@pytest.mark.parametrize(
    ("problem", "changes", "message"),
    [
        ({"format": named("nf4_g64")}, {}, "gemm_wgmma multiplies pairs of weights by pairs of scales in f16"),
        ({"format": named("e2m1_g64")}, {}, "gemm_wgmma multiplies pairs of weights by pairs of scales in f16"),
        ({"format": replace(named("int4_g128"), scale=F32)}, {}, "which do not hold those of"),
        ({}, {"warps": 8}, "gemm_wgmma has teams of 4 warps for 64 outputs, not warps=8 teams=2 block_n=128"),
        ({}, {"teams": 1}, "gemm_wgmma has teams of 4 warps for 64 outputs, not warps=4 teams=1 block_n=128"),
        ({}, {"x_at": "register"}, "gemm_wgmma keeps x in shared memory: take x_at=shared"),
        ({"format": named("uint4_g64_z")}, {}, "gemm_wgmma takes one zero in a step of 128 k, not for 64: shorten the step"),
        ({"format": named("int4_g128"), "k": 1500}, {"block_k": 64}, ""),
        ({"format": replace(named("int4_g128"), group=192)}, {}, "group 192 and block_k=128: take a block_k that divides it"),
    ],
    ids=str,
)
def test_what_many_rows_on_wgmma_refuses(problem: dict[str, object], changes: dict[str, object], message: str) -> None:
    question = asked(**({"m": (65, 128)} | problem))
    if not message:
        assert rendered(question, MANY, **changes).name == "gemm_wgmma"
        return
    with pytest.raises(TemplateError, match=re.escape(message)):
        rendered(question, MANY, **changes)


SHARES = [
    ("int4_g128", 1536, (128,), "gemv_half"),
    ("int4_g128", 1536, (64, 128), "gemv_mma"),
    ("int4_row_f32", 1536, (128,), "gemv_mma"),
    ("int4_g32", 1536, (64, 128), "gemv_mma"),
    ("int4_g16_bf16", 1536, (64, 128), "gemv_mma"),
    ("int4_g32_f32", 1600, (64,), "gemv_mma"),
    ("mxfp4", 1536, (64, 128), "gemv_mma"),
    ("mxfp4", 1600, (64,), "gemv_mma"),
    ("nvfp4", 1536, (64, 128), "gemv_mma"),
    ("nvfp4", 1600, (64,), "gemv_mma"),
    ("mxfp8", 1536, (64, 128), "gemv_mma"),
    ("int2_g16_e4m3", 1536, (128,), "gemv_mma"),
]
"""Formats whose scales a lane loads as words, at each length of a step."""


@pytest.mark.parametrize(("name", "k", "block_k", "template"), [(n, k, b, t) for n, k, bs, t in SHARES for b in bs], ids=str)
def test_a_lane_loads_the_scales_of_its_own_outputs(name: str, k: int, block_k: int, template: str) -> None:
    """The printed addresses, worked out in NumPy, against the layout by which scales are packed."""
    form, n = named(name), 64
    schedule = FAST_MMA if template == "gemv_mma" else FAST_HALF
    kernel = rendered(
        asked(m=(2, 8) if template == "gemv_mma" else (1, 1), n=n, k=k, format=form), replace(schedule, block_k=block_k, warps=2)
    )
    layout = kernel.program.op("scale.view").layout
    body = re.search(r"def scales_at\(.*?\"\"\"\n(.*?)\n    return scales", kernel.source, re.DOTALL)[1]
    text = textwrap.dedent(body).replace("scale_ptr.to(gl.pointer_type(gl.int32))", "0")
    sizes = {m[1]: int(m[2]) for m in re.finditer(r"^(\w+) = gl\.constexpr\((\d+)\)", kernel.source, re.MULTILINE)}
    groups, unit = sizes.get("GROUPS", 1), 32 // layout.bits
    own = form.group_in(k)
    gl = SimpleNamespace(arange=lambda low, high, _: np.arange(low, high), SliceLayout=lambda *_: None)
    seen = set()
    for first, lane, worker, turn in itertools.product(range(n // 16), range(32), range(sizes["WORKERS"]), range(sizes["STEPS"])):
        step = turn * sizes["WORKERS"] + worker
        if step * block_k >= k:
            continue
        for part in range(groups // sizes["NEAR"]):
            given = sizes | {"first": first, "lane": lane, "worker": worker, "turn": turn, "part": part, "gl": gl, "SCALES": None}
            exec(text, given | {"each_of": lambda value, _: np.array(value).reshape(1, 1)}, given)
            places = (np.asarray(given["scales"]).reshape(-1, 1) * unit + np.arange(unit)).reshape(-1) * layout.bits
            for at, place in enumerate(places):
                group = (step * block_k + (part * sizes["NEAR"] + at // 2) * block_k // groups) // own
                row = first * 16 + lane // 4 + at % 2 * 8
                assert place == layout.address(n=row, g=group), (first, lane, worker, turn, part, at)
                seen.add(place)
    assert len(seen) == n * -(-k // own), "every scale is read"


LONG = [
    ("nvfp4", 8, 28672, 8192), ("mxfp4", 16, 28672, 8192), ("mxfp8", 8, 8192, 28672), ("mxfp4", 32, 28672, 8192),
    ("e2m1_g64", 8, 28672, 8192), ("nf4_g64", 16, 28672, 8192), ("uint4_g128_z", 16, 28672, 8192), ("int4_row", 8, 2**17, 64),
    ("int4_g256_f32", 8, 2**17, 64),
]  # fmt: skip


@pytest.mark.parametrize(("name", "m", "k", "n"), LONG, ids=str)
def test_a_loop_comes_round_to_where_the_text_of_its_steps_is(name: str, m: int, k: int, n: int) -> None:
    """A turn of it moves codes, scales, zeros and x by whole pieces; what may be missing, at the end, is asked for behind it."""
    problem = Problem(m=bucket(m), n=n, k=k, format=named(name))
    kernel = made(lower(problem), pick(lower(problem), ARCHES["sm_90"]), ARCHES["sm_90"])
    at = {each[1]: int(each[2]) for each in re.finditer(r"(?m)^(\w+) = gl\.constexpr\((\d+)\)", kernel.source)}
    assert kernel.name == "gemv_mma"
    assert at["LAPS"] > 1
    assert at["LAP"] * at["PIECES"] % at["RING"] == 0, "the ring is where it was"
    ahead = max(at["AHEAD"], -(-(at["RING"] - 1) // at["PIECES"]))
    assert at["LAPS"] * at["LAP"] + ahead < at["STEPS"], "the last step is not asked for in the loop"
    step = at["LAP"] * at["WORKERS"] * at["BLOCK_K"]
    assert at["LAP_K"] == step
    codes = kernel.program.tile("codes.stored").layout
    for first in range(0, k - step, step):
        for row in (0, n - 1):
            moved = codes.address(n=row, k=first + step) - codes.address(n=row, k=first)
            assert moved == at["LAP_WORDS"] * 32
            for leaf in ("scale", "zero") if "zero" in kernel.program.graph else ("scale",):
                layout, group = kernel.program.op(f"{leaf}.view").layout, problem.format.group_in(k)
                moved = layout.address(n=row, g=(first + step) // group) - layout.address(n=row, g=first // group)
                assert moved == at[f"LAP_{leaf.upper()}S"] * layout.bits


SHORT = [("int4_g128", 8, 28672, 8192), ("nf4_g64", 8, 28672, 8192), ("nvfp4", 1, 8192, 28672)]


@pytest.mark.parametrize(("name", "m", "k", "n"), SHORT, ids=str)
def test_steps_that_the_instruction_cache_holds_stand_one_after_another(name: str, m: int, k: int, n: int) -> None:
    problem = Problem(m=bucket(m), n=n, k=k, format=named(name), x=BF16, y=BF16)
    assert "LAPS" not in made(lower(problem), pick(lower(problem), ARCHES["sm_90"]), ARCHES["sm_90"]).source
