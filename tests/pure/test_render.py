"""The program drives the text: each node printed once, every choice read, any change of the program a change of the text."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from w4gen import paths
from w4gen.codegen.render import Kernel, read, render
from w4gen.errors import TemplateError, W4Error
from w4gen.formats import named
from w4gen.ir.decode import decode
from w4gen.ir.layout import rows
from w4gen.ir.lower import lower
from w4gen.ir.problem import Problem
from w4gen.ir.program import Builder, rewrite
from w4gen.ir.tile import Block, Convert, Field, Reduce, Repeat, Slice, Split, Store
from w4gen.ir.types import BF16, F16, F32, Format
from w4gen.schedule.arch import ARCHES
from w4gen.schedule.rules import apply, pick
from w4gen.schedule.schedule import Schedule

PORTABLE = ARCHES["portable"]
TEMPLATES = sorted(paths.templates().glob("*.py.jinja"))


def rendered(problem: Problem, schedule: Schedule | None = None, folder: Path | None = None, **changes: object) -> Kernel:
    program = lower(problem)
    schedule = replace(schedule or pick(program, PORTABLE), **changes)
    return render(apply(program, schedule, PORTABLE), schedule, "portable", folder)


def asked(**changes: object) -> Problem:
    return Problem(**{"m": (1, 1), "n": 256, "k": 1536, "format": named("int4_g128"), **changes})


@pytest.fixture
def changed(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Write templates/gemv with one piece of its text replaced, and say where."""

    def write(old: str, new: str) -> Path:
        text = (paths.templates() / "gemv.py.jinja").read_text()
        assert old in text, f"{old!r} is no longer in the template: change this test with it"
        (tmp_path / "gemv.py.jinja").write_text(text.replace(old, new))
        return tmp_path

    return write


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_a_template_parses_as_python(path: Path) -> None:
    ast.parse(path.read_text())


def test_there_is_a_template() -> None:
    assert TEMPLATES


CALLS = {
    '{{ load("x") }}': "x.tile",
    '{{ decode("w") }}': "w.codes",
    "{{ dot() }}": "part",
    '{{ reduce("acc") }}': "acc",
    '{{ reduce("total") }}': "total",
    '{{ scale("acc") }}': "scaled",
    "{{ store() }}": "y",
}


@pytest.mark.parametrize("call", CALLS)
def test_a_dropped_call_is_an_error_that_names_the_node(call: str, changed) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(TemplateError) as caught:
        rendered(asked(), folder=changed(call, "pass"))
    message = str(caught.value)
    assert message.startswith("gemv.py.jinja prints ")
    assert message.endswith("0 times, not 1")
    node = message.split()[2]
    assert node == CALLS[call] or node.startswith(CALLS[call].split(".")[0])


@pytest.mark.parametrize("call", CALLS)
def test_a_repeated_call_is_an_error_that_names_the_node(call: str, changed) -> None:  # type: ignore[no-untyped-def]
    line = next(line for line in (paths.templates() / "gemv.py.jinja").read_text().splitlines() if line.strip() == call)
    with pytest.raises(TemplateError, match=r"gemv\.py\.jinja prints .* 2 times, not 1"):
        rendered(asked(), folder=changed(f"{line}\n", f"{line}\n{line}\n"))


def test_an_unchanged_copy_of_the_template_renders_the_same(changed) -> None:  # type: ignore[no-untyped-def]
    assert rendered(asked(), folder=changed("{{ store() }}", "{{ store() }}")).source == rendered(asked()).source


def test_an_unknown_name_in_a_template_is_an_error(changed) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(TemplateError, match=r"gemv\.py\.jinja: .*speed"):
        rendered(asked(), folder=changed("{{ store() }}", "{{ speed() }}"))


def test_a_kernel_takes_the_tiles_of_its_program(changed) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(TemplateError, match="gemv takes"):
        rendered(asked(), folder=changed("    scale_ptr,\n", ""))


def test_a_schedule_field_that_no_template_reads_is_an_error() -> None:
    with pytest.raises(TemplateError, match="never reads split_k of the schedule: leave it at 1"):
        rendered(asked(), split_k=2)


def test_a_template_that_is_not_there_is_an_error() -> None:
    with pytest.raises(TemplateError, match=r"M=17 has no kernel yet, there is no gemm\.py\.jinja"):
        rendered(asked(m=(17, 17)))


def test_a_tile_in_shared_memory_is_an_error_for_a_template_that_keeps_it_in_registers() -> None:
    with pytest.raises(TemplateError, match="w lives in shared memory"):
        rendered(asked(), Schedule(template="gemv", block_k=1024, convert_at="shared", scale_at="weight"))


CODEBOOK = tuple(float(value) for value in range(16))
MMA = {"unit": "mma", "block_m": 16, "block_k": 128, "zero_at": "weight"}
CHANGES: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "m": ({"m": (2, 16)}, {"unit": "mma", "block_m": 16, "block_k": 128, "zero_at": "weight"}),
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
    "float zero on matrix cores": ({"format": named("uint4_zf")}, MMA),
    "integer zero on matrix cores": ({"format": named("uint4_z")}, MMA),
    "minimum": ({"format": named("uint4_m")}, {}),
    "minimum, scale_at": ({"format": named("uint4_m")}, {"zero_at": "weight", "scale_at": "weight"}),
    "minimum with an origin": ({"format": named("int4_m")}, {}),
    "minimum on matrix cores": ({"format": named("uint4_m")}, MMA | {"zero_at": "accumulator"}),
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
    "unit": ({}, {"unit": "mma", "block_k": 128, "block_m": 16, "zero_at": "weight"}),
    "a large group, unit": ({"format": named("int4_row")}, {"unit": "mma", "block_k": 1024, "block_m": 16, "zero_at": "weight"}),
    "scale_at": ({}, {"scale_at": "weight", "zero_at": "weight"}),
    "zero_at": ({}, {"zero_at": "weight"}),
    "warps": ({}, {"warps": 8}),
    "stages": ({}, {"stages": 3}),
}


NOT_IN_BODY = {"warps", "stages", "scale type", "padded rows"}
"""Facts of the launch (the types of pointers are Triton's to find out), or of rows that are never read."""


def body(kernel: Kernel) -> str:
    """The text that runs: without the header and the facts, which name the problem and schedule anyway."""
    return kernel.source.split("import triton\n", 1)[1].split("\nPROBLEM =", 1)[0]


def every_kernel() -> dict[str, Kernel]:
    """The kernel of the default question, and one for each change."""
    base = Schedule(template="gemv", block_k=2048, zero_at="accumulator", warps=2)
    changed = {what: rendered(asked(**p), replace(base, **s) if s else None) for what, (p, s) in CHANGES.items()}
    return {"nothing": rendered(asked(), base), **changed}


def test_changing_any_one_thing_changes_the_text() -> None:
    seen: dict[str, str] = {}
    for what, kernel in every_kernel().items():
        assert seen.setdefault(kernel.source, what) == what


def test_changing_any_one_thing_changes_the_text_that_runs() -> None:
    seen: dict[str, str] = {}
    for what, kernel in every_kernel().items():
        if what not in NOT_IN_BODY:
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
    schedule = Schedule(template="gemv", block_k=2048, zero_at="accumulator", warps=2)
    program = apply(lower(asked()), schedule, PORTABLE)

    def emit(b: Builder, operands: dict[str, str]) -> str:
        return b.add(node, op or program.op(node), operands, element or program.tile(node).element, program.tile(node).space)

    try:
        after = render(rewrite(program, {node: emit}), schedule, "portable").source
    except W4Error:
        return
    assert after != render(program, schedule, "portable").source


def test_other_values_in_a_codebook_are_another_question() -> None:
    """Fixed tables are part of the format; the header must not claim a built-in name for another table."""
    mine = Format("nf4", codebook=CODEBOOK, group=64)
    assert rendered(asked(format=mine)).source != rendered(asked(format=named("nf4_g64"))).source
    assert f"--format '{mine}'" in rendered(asked(format=mine)).source.splitlines()[1]


@pytest.mark.parametrize("m", [(1, 1), (2, 16)], ids=str)
@pytest.mark.parametrize("name", ["int4_g128", "nf4_g64_bf16", "int4_row", "uint4_g64_z", "uint4_g32_m_bf16"])
def test_a_rendered_text_says_what_it_answers_and_reads_back(name: str, m: tuple[int, int]) -> None:
    kernel = rendered(asked(format=named(name), m=m, bias=True))
    again = read(kernel.source)
    assert (again.name, again.source, again.arguments, again.grid) == (
        kernel.name,
        kernel.source,
        kernel.arguments,
        kernel.grid,
    )
    assert replace(again.problem, layout=None) == kernel.problem
    assert again.schedule == kernel.schedule
    first, second = kernel.source.splitlines()[:2]
    assert name in first
    assert str(kernel.schedule) in first
    assert second.startswith(
        f"# made by: w4gen compile --m {m[1]} --n 256 --k 1536 --format {name} --dtype f16 --bias --arch portable"
    )


def test_text_of_other_origin_is_refused() -> None:
    with pytest.raises(TemplateError, match="not one that w4gen rendered"):
        read("x = 1\n")


def test_sizes_are_named_at_the_top() -> None:
    source = rendered(asked()).source
    assert "N = tl.constexpr(256)  # outputs" in source
    assert "K = tl.constexpr(1536)  # inputs" in source


@pytest.mark.parametrize("m", [(1, 1), (2, 16)], ids=str)
@pytest.mark.parametrize("name", ["int4_g128", "nf4_g64", "int4_g50", "uint4_g128_z", "uint4_g50_m", "int8_g128"])
@pytest.mark.parametrize("x", [F16, BF16], ids=str)
@pytest.mark.parametrize(("n", "k"), [(256, 1536), (37, 331), (1, 1)])
def test_rendered_text_is_python_without_holes(m: tuple[int, int], name: str, x: object, n: int, k: int) -> None:
    source = rendered(asked(m=m, n=n, k=k, format=named(name), x=x, y=x, bias=True)).source
    ast.parse(source)
    assert "{{" not in source
    assert "#{" not in source


def test_compiling_needs_no_torch() -> None:
    """Floors 0 to 4 work where torch cannot even be imported."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import w4gen\n"
        "kernel = w4gen.compile('1x1536x256', 'nf4_g64', arch='sm_90')\n"
        "import w4gen.ir.interpret, w4gen.ir.show, w4gen.toolchain\n"
        "assert 'def gemv' in kernel.source and sys.modules['torch'] is None\n"
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
