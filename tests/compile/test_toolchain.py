"""Kernels compile for every arch with no GPU present; what the binaries say of themselves; nothing compiles twice."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache as once
from pathlib import Path

import pytest
import triton
import triton.language as tl
from arrays import covered, label, thinned
from sass import hazards
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import cache as named_by_triton

import w4gen
from w4gen import Format, api, binaries, cache, pipeline, toolchain
from w4gen.codegen.render import Kernel
from w4gen.errors import ForbiddenError, ToolchainError, W4Error
from w4gen.formats import FAMILIES, named
from w4gen.ir.layout import rows
from w4gen.ir.problem import EVERY, Problem
from w4gen.ir.types import BF16
from w4gen.schedule.arch import ARCHES

SHAPES = {
    "one row": "1x4096x4096",
    "eight rows": "8x4096x4096",
    "sixteen rows": "16x2048x4096",
    "gemm 16": "16x8192x4096",
    "gemm 64": "64x4096x4096",
    "gemm large": "64x28672x8192",
    "many rows": "512x4096x4096",
    "dequant": "4096x4096x4096",
}
SHORT = [name for name in SHAPES if name != "gemm 16"]
"""16 rows of so long a k take longest of all to compile where gemv_mma answers, and not gemm: the slow tests have them."""

ATOMIC = re.compile(rb"(?m)^\s*(@!?%\w+\s+)?(atom|red)\.|\b(global|flat|buffer)_atomic|\bds_(add|cmpst)")


def built(shape: str, form: str | Format, arch: str, **options: object) -> dict[str, toolchain.Binary]:
    return toolchain.build(w4gen.compile(shape, form, arch=arch, **options), ARCHES[arch])


def only(binaries: dict[str, toolchain.Binary]) -> toolchain.Binary:
    (binary,) = binaries.values()
    return binary


def check(binaries: dict[str, toolchain.Binary], arch: str) -> None:
    """No spill, no more of anything than the arch has, and no atomic: sums that meet in any order differ from call to call."""
    kind, text = ("cubin", "ptx") if ARCHES[arch].backend == "cuda" else ("hsaco", "amdgcn")
    for name, binary in binaries.items():
        assert binary.spills == 0, name
        assert 0 < binary.registers <= ARCHES[arch].registers, name
        assert 0 <= binary.shared_bytes <= ARCHES[arch].shared_bytes, name
        assert binary.files[kind].startswith(b"\x7fELF")
        assert not ATOMIC.search(binary.files[text]), name


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_an_atomic_is_noticed(arch: str) -> None:
    @triton.jit
    def adds(y_ptr):  # type: ignore[no-untyped-def]
        tl.atomic_add(y_ptr, 1.0)

    target = GPUTarget(ARCHES[arch].backend, ARCHES[arch].target, ARCHES[arch].warp)
    made = triton.compile(ASTSource(adds, {"y_ptr": "*fp32"}), target=target).asm
    assert ATOMIC.search(made["ptx" if arch == "sm_90" else "amdgcn"].encode())


DECODED = {"exponent trick": "int4_g128", "look-up": "nf4_g64", "exponent shift": "e2m1_g32"}
"""A format for each way to decode."""


def test_there_is_no_other_way_to_decode() -> None:
    assert {family.decoding for family in FAMILIES.values()} == set(DECODED)


@pytest.mark.parametrize(("arch", "shape", "form"), thinned(ARCHES, SHORT, DECODED.values()))
def test_every_template_compiles_for_every_arch(arch: str, shape: str, form: str) -> None:
    check(built(SHAPES[shape], form, arch), arch)


@pytest.mark.parametrize("arch", [name for name, arch in ARCHES.items() if arch.fragment])
def test_several_rows_of_what_gemm_does_not_read_compile_for_every_arch(arch: str) -> None:
    """gemv with x on the left: codes in rows, as blocks of fragments would pad them too much."""
    kernel = w4gen.compile("16x600x4096", "int4_g128", arch=arch)
    assert (kernel.name, kernel.schedule.unit) == ("gemv", "mma")
    check(toolchain.build(kernel, ARCHES[arch]), arch)


@pytest.mark.parametrize(
    ("form", "template", "arch"), [("int4_g128", "gemm", "sm_90"), ("nf4_g64", "gemm", "sm_80"), ("int3_g64", "gemv", "sm_90")]
)
def test_the_kernel_of_every_m_compiles(form: str, template: str, arch: str) -> None:
    """Its offsets of rows have 64 bits."""
    kernel = pipeline.compile(Problem(m=EVERY, n=4096, k=4096, format=named(form)), ARCHES[arch])
    assert kernel.name == template
    check(toolchain.build(kernel, ARCHES[arch]), arch)


@pytest.mark.parametrize("options", [{"activation": "gelu", "residual": True}, {"activation": "silu_mul"}], ids=str)
@pytest.mark.parametrize(("m", "arch"), [((1, 1), "sm_75"), ((9, 16), "sm_90")], ids=str)
def test_an_epilogue_compiles(m: tuple[int, int], arch: str, options: dict[str, object]) -> None:
    kernel = pipeline.compile(Problem(m=m, n=4096, k=4096, format=named("int4_g128"), bias=True, **options), ARCHES[arch])
    check(toolchain.build(kernel, ARCHES[arch]), arch)


FUSED = {
    "one row": ((1, 1), 17920, 1536, "int4_g128", "gemv_mma"),
    "looked up": ((9, 16), 17920, 1536, "nf4_g64", "gemv_mma"),
    "nested": ((1, 1), 17920, 1536, "nvfp4", "gemv_mma"),
    "tiles of 64": ((49, 64), 17920, 1536, "int4_g128", "gemm_wgmma"),
    "tiles of 256": ((257, 512), 17920, 1536, "int4_g128", "gemm_wgmma"),
    "zeros": ((257, 512), 17920, 1536, "uint4_g128_z", "gemm_wgmma"),
    "shared k": ((129, 256), 512, 4096, "int4_g128", "gemm_wgmma"),
}
"""M, N, K, a format, and the fast template that ends its sums: by itself, or where programs share k, in a second function."""
QUICK = [("one row", "silu_mul", False), ("tiles of 256", "silu_mul", False)]
SLOW = [(how, *end) for how in FUSED for end in (("gelu_tanh", False), ("silu_mul", False), ("silu", True))]


@pytest.mark.parametrize(
    ("how", "activation", "residual"),
    [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW if each not in QUICK)],
)
def test_an_epilogue_of_a_fast_template_compiles_without_spills(how: str, activation: str, residual: bool) -> None:
    m, n, k, form, template = FUSED[how]
    ends = {"bias": True, "activation": activation, "residual": residual}
    kernel = pipeline.compile(Problem(m=m, n=n, k=k, format=named(form), x=BF16, y=BF16, **ends), ARCHES["sm_90"])
    if residual and template == "gemm_wgmma":
        assert kernel.name != template  # it has no room for one
        return
    assert kernel.name == template
    assert ("add_parts" in kernel.source) == (how == "shared k")
    assert not any(binary.spills for binary in toolchain.build(kernel, ARCHES["sm_90"]).values())


LANES = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
IN_LANES = gl.constexpr([[0, 2], [0, 4], LANES])
PLACES = gl.constexpr(gl.DistributedLinearLayout([[0, 1], [8, 0], [0, 8]], IN_LANES.value, [[16, 0], [32, 0]], [], [64, 16]))


@gluon.jit
def lanes(y_ptr):
    moved = gl.convert_layout(gl.zeros([64, 16], gl.float32, PRODUCT), PLACES, assert_trivial=True)
    at = gl.arange(0, 64, gl.SliceLayout(1, PLACES))[:, None] * 16 + gl.arange(0, 16, gl.SliceLayout(0, PLACES))[None, :]
    gl.store(y_ptr + at, moved)
"""


@pytest.mark.parametrize(("lanes", "right"), [("[1, 0], [2, 0], [4, 0]", True), ("[2, 0], [1, 0], [4, 0]", False)])
def test_rows_of_a_pair_are_in_lanes_four_apart(lanes: str, right: bool, tmp_path: Path) -> None:
    """What gemm_wgmma's exchange between lanes takes for granted: the third bit of a lane is the lowest of a row."""
    (tmp_path / "lanes.py").write_text(LANES.replace("LANES]", f"{lanes}]"))
    code = (
        "import triton, lanes; from triton.backends.compiler import GPUTarget; "
        "from triton.experimental.gluon._runtime import GluonASTSource; "
        "triton.compile(GluonASTSource(lanes.lanes, {'y_ptr': '*fp32'}, {}), target=GPUTarget('cuda', 90, 32))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode == 0) == right, done.stderr
    assert right or "trivial" in done.stderr


OTHERS = ["uint4_g128_z", "uint4_g32_m", "int8_g128", "e2m1_g32"]


@pytest.mark.parametrize(
    ("arch", "shape", "form"), thinned(["sm_80", "sm_90", "gfx942"], ["one row", "gemm 64", "dequant"], OTHERS)
)
def test_other_formats_compile_for_an_arch_of_each_kind(arch: str, shape: str, form: str) -> None:
    assert not any(binary.spills for binary in built(SHAPES[shape], form, arch).values())


NARROW = [Format("bit", bits=1, group=32), Format("bit", bits=1, group=-1), Format("uint2", bits=2, group=128)]
FORMS = ["int4_g32", "int4_row", "uint4_g128_z", "uint4_g32_m", "int8_g128", "e2m1_g32", "nf4_g64", *NARROW]


KINDS = ["int3_g128", "int1_g128", "fp8_e4m3", "mxfp4", "nvfp4", "nf4_dq", "q5_k"]


@pytest.mark.parametrize(("arch", "shape", "form"), thinned(["sm_90", "gfx942"], ["one row", "sixteen rows"], KINDS))
def test_a_format_of_each_kind_compiles_without_spills(arch: str, shape: str, form: str) -> None:
    check(built(SHAPES[shape], form, arch), arch)


SMALL = ["mxfp4", "nvfp4", "mxfp8", "fp8_e4m3", "int4_g32", "int2_g16", "nf4_g32"]


@pytest.mark.parametrize(("arch", "dtype", "form"), thinned(["sm_80", "sm_90"], ["float16", "bfloat16"], SMALL))
def test_small_floats_and_small_groups_compile_for_few_rows(arch: str, dtype: str, form: str) -> None:
    assert w4gen.compile("8x1536x1024", form, arch=arch, dtype=dtype).name == "gemv_mma"
    check(built("8x1536x1024", form, arch, dtype=dtype), arch)


LONG_TABLES = [
    *((arch, "16x12416x7240", "nf4_g64", "float16") for arch in ("sm_89", "sm_100", "sm_120")),
    ("sm_80", "16x18944x3584", "nf4_g64", "bfloat16"),
    ("sm_120", "16x12416x7240", "fp4", "bfloat16"),
    ("sm_86", "16x18944x3584", "nf4_g64", "float16"),
    ("sm_120", "8x18944x18944", "nf4_g64", "bfloat16"),
    ("sm_86", "16x14336x4096", "nf4_g128", "bfloat16"),
    ("sm_86", "16x25600x5120", "nf4_g128", "bfloat16"),
    ("sm_120", "16x8192x20000", "nf4_g64", "bfloat16"),
    ("sm_120", "16x26624x5120", "nf4_row", "bfloat16"),
    ("sm_120", "8x28672x20000", "nf4_g64", "bfloat16"),
]
"""Layers whose look-ups stand one after another along a long k, or in a loop along a longer one."""


@pytest.mark.parametrize(
    ("arch", "shape", "form", "dtype"),
    [
        ("sm_86", "32x7912x30008", "nf4_g64", "float16"),
        ("sm_90", "32x7912x17000", "nf4_g64", "float16"),
        ("sm_120", "32x4840x11224", "int2_g64", "bfloat16"),
        ("sm_80", "1x4096x14336", "int3_g128", "float16"),
        ("sm_86", "1x4096x14336", "uint7_g128_z", "bfloat16"),
        ("gfx1100", "1x4096x8192", "uint7_g128_z", "float16"),
        ("sm_80", "16x12416x7240", "nf4_g64", "float16"),
        ("sm_86", "16x6144x3584", "nf4_g128", "bfloat16"),
        ("sm_80", "100x1552x800", "q4_k", "float16"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in LONG_TABLES),
    ],
)
def test_what_leaves_few_registers_does_not_spill(arch: str, shape: str, form: str, dtype: str) -> None:
    check(built(shape, form, arch, dtype=dtype), arch)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "shape", "form"), covered(ARCHES, ["one row", "gemm 16", "dequant"], FAMILIES))
def test_every_format_compiles_for_every_arch_without_spills(arch: str, shape: str, form: str) -> None:
    check(built(SHAPES[shape], form, arch), arch)


@pytest.mark.parametrize("form", NARROW, ids=lambda form: form.label)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_long_steps_of_narrow_codes_do_not_spill(arch: str, form: Format) -> None:
    check(built(SHAPES["gemm 64"], form, arch), arch)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "shape", "form", "dtype"), covered(ARCHES, SHAPES, FORMS, ["float16", "bfloat16"]))
def test_every_pair_compiles(arch: str, shape: str, form: str | Format, dtype: str) -> None:
    """What `make compile-all` adds."""
    check(built(SHAPES[shape], form, arch, dtype=dtype), arch)


@pytest.mark.parametrize(
    ("shape", "form", "options"),
    [
        ("1x331x37", "int4_g128", {"bias": True}),
        ("16x331x37", "nf4_g64", {"bias": True}),
        ("1x1536x256", "int4_g128", {"dtype": "bfloat16"}),
        ("16x1536x256", "int4_g128", {"dtype": "bfloat16"}),
        ("16x600x40", "int4_g50", {}),
        ("16x600x40", "uint4_g50_m", {}),
        ("16x1536x256", "uint4_g64_zf", {"dtype": "bfloat16"}),
        ("16x1536x256", "int8_g128", {"dtype": "bfloat16"}),
        ("1x1536x256", "uint4_g32_m", {"dtype": "bfloat16"}),
        ("1x28672x8192", "int4_g128", {}),
        ("100x1536x250", "int4_g32", {"bias": True, "dtype": "bfloat16"}),
        ("1x1000x47", "int4_g128", {"bias": True}),
        ("1x64x16", "int4_row", {}),
        ("7x1000x47", "int4_g64", {"bias": True, "dtype": "bfloat16"}),
        ("13x248x1021", "uint4_g128", {"bias": True}),
        ("1x1004x47", "int4_g128", {"bias": True}),
        ("300x331x37", "uint4_g32_z", {"bias": True}),
        ("200x8192x262144", "int4_g128", {}),
    ],
)
def test_odd_kernels_compile_for_sm_90(shape: str, form: str, options: dict[str, object]) -> None:
    assert not any(binary.spills for binary in built(shape, form, "sm_90", **options).values())


@once
def instructions(cubin: bytes) -> list[str]:
    """The lines of SASS of a binary; to disassemble takes as long as to compile."""
    return binaries.disassemble(cubin).splitlines()


def sass(kernel: Kernel, arch: str = "sm_90") -> list[str]:
    """The instructions of a kernel's first function."""
    return instructions(next(iter(toolchain.build(kernel, ARCHES[arch]).values())).files["cubin"])


def count(lines: list[str], instruction: str) -> int:
    return sum(bool(re.search(rf"\b{instruction}", line)) for line in lines)


def in_rows(shape: str, form: str) -> Kernel:
    """The kernel of codes that were packed in rows."""
    m, k, n = api.parse_shape(shape)
    problem = api.problem_of(m=m, n=n, k=k, format=form)
    return pipeline.compile(replace(problem, layout=rows(n, k, problem.format.bits, 16)), ARCHES["sm_90"])


def test_one_row_reads_sixteen_bytes_of_codes_at_once_and_converts_no_integer() -> None:
    kernel = in_rows(SHAPES["one row"], "int4_g128")
    assert kernel.name == "gemv"
    lines = sass(kernel)
    assert count(lines, r"LDG\.\S*\.128\b")
    assert not count(lines, "I2F")


CARDS = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
INT2 = Format("int2", bits=2, origin=-2.0, group=128)
FEW = ["int4_g128", "int4_g64", "int8_g128", "uint4_g128", INT2]
HALVES = [form for form in FEW if form != "int8_g128"]
ON_CORES = [(form, "float16", shape) for form in FEW for shape in ("8x1536x256", "16x1536x256")]
ON_CORES += [(form, "bfloat16", "8x1536x256") for form in FEW if form != "int8_g128"]


def fast(template: str, shape: str, form: str | Format, dtype: str, arch: str) -> tuple[Kernel, list[str]]:
    """A kernel of a fast template and its instructions, with what holds for both: no spill, wide loads, shared memory."""
    kernel = w4gen.compile(shape, form, dtype=dtype, arch=arch)
    assert kernel.name == template
    (binary,) = toolchain.build(kernel, ARCHES[arch]).values()
    assert binary.spills == 0
    assert 0 < binary.registers <= 255
    declared = sum(map(int, re.findall(r"\.shared \.align \d+ \.b8 \w+\[(\d+)\]", kernel.source)))
    assert 0 < declared <= 48 * 1024
    assert declared + json.loads(binary.files["json"])["shared"] <= min(ARCHES[arch].shared_bytes, 99 * 1024)
    lines = instructions(binary.files["cubin"])
    (steps,) = map(int, re.findall(r"STEPS = gl\.constexpr\((\d+)\)", kernel.source))
    (quads,) = map(int, re.findall(r"QUADS = gl\.constexpr\((\d+)\)", kernel.source))
    blocks = kernel.schedule.block_n // 16
    x_loads = int(found[1]) if (found := re.search(r"(?m)^LOADS = gl\.constexpr\((\d+)\)", kernel.source)) else 0
    assert count(lines, r"LDG\.\S*\.128\b") == steps * quads * blocks + x_loads, "a quad of words is one load"
    assert not count(lines, r"LDL|STL|I2F")
    return kernel, lines


@pytest.mark.parametrize(("arch", "form"), thinned(CARDS, HALVES, strength=1))
def test_one_row_in_halves(arch: str, form: str | Format) -> None:
    """Decoded values stay in the lane that they are loaded to; only the sums of a lane's four columns of k meet, at the end."""
    _, lines = fast("gemv_half", "1x1536x256", form, "float16", arch)
    last = max(index for index, line in enumerate(lines) if re.search(r"\bHFMA2", line))
    assert not count(lines[:last], "SHFL")
    assert not count(lines, "HMMA|HGMMA")


@pytest.mark.parametrize(("arch", "case"), thinned(CARDS, ON_CORES, strength=1))
def test_few_rows_on_matrix_cores(arch: str, case: tuple[str | Format, str, str]) -> None:
    """One instruction for each 16 outputs, 16 k and 8 rows of x; decoded values stay in the lane that they are loaded to."""
    form, dtype, shape = case
    kernel, lines = fast("gemv_mma", shape, form, dtype, arch)
    (steps,) = map(int, re.findall(r"STEPS = gl\.constexpr\((\d+)\)", kernel.source))
    schedule = kernel.schedule
    expected = steps * schedule.block_k // 16 * (schedule.block_n // 16) * (schedule.block_m // 8)
    assert count(lines, r"HMMA\.16816") == expected
    last = max(index for index, line in enumerate(lines) if re.search(r"\bHMMA", line))
    assert not count(lines[:last], "SHFL")
    assert count(lines[:last], "LDSM") == steps * schedule.block_k // 32 * (schedule.block_m // 8), "x comes by ldmatrix"


@pytest.mark.parametrize(("form", "words"), [("int4_g32", 128), ("mxfp4", 64), ("nvfp4", 128)])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_scales_of_small_groups_are_one_load_a_step(arch: str, form: str, words: int) -> None:
    """Two quads of codes and all scales, for each 16 outputs and 128 k; e4m3 is converted by the machine where it can."""
    kernel = w4gen.compile("8x1536x256", form, arch=arch)
    (binary,) = toolchain.build(kernel, ARCHES[arch]).values()
    (steps,) = map(int, re.findall(r"STEPS = gl\.constexpr\((\d+)\)", kernel.source))
    assert (kernel.name, kernel.schedule.block_k, binary.spills) == ("gemv_mma", 128, 0)
    lines = instructions(binary.files["cubin"])
    above = int(form == "nvfp4")  # one f32 for the whole weight
    assert count(lines, r"LDG\b") == steps * 3 * kernel.schedule.block_n // 16 + above
    assert count(lines, rf"LDG\.\S*\.{words}\b") == steps * (3 if words == 128 else 1) * kernel.schedule.block_n // 16
    assert (count(lines, r"F2FP\S*E4M3") > 0) == (form == "nvfp4" and arch == "sm_90")


@pytest.mark.parametrize(("shape", "form"), [("8x28672x8192", "nvfp4"), ("16x28672x8192", "nf4_g64"), ("32x8192x28672", "mxfp4")])
def test_long_layers_stay_in_the_instruction_cache(shape: str, form: str) -> None:
    """128 KB; their steps would be two to six times that, one after another."""
    kernel = w4gen.compile(shape, form, arch="sm_90")
    (binary,) = toolchain.build(kernel, ARCHES["sm_90"]).values()
    assert (kernel.name, binary.spills) == ("gemv_mma", 0)
    assert "LAPS" in kernel.source
    assert len(re.findall(r"(?m)^\s+/\*[0-9a-f]{4,}\*/", binary.text("sass"))) < 8192


@pytest.mark.parametrize(("shape", "template"), [("1x28672x8192", "gemv_half"), ("1x8192x28672", "gemv_half")])
def test_large_layers_of_one_row_on_sm_90(shape: str, template: str) -> None:
    fast(template, shape, "int4_g128", "float16", "sm_90")


BETWEEN = [pytest.param(shape, marks=pytest.mark.slow) for shape in ("8x8192x28672", "16x4096x28672")]


@pytest.mark.parametrize("shape", ["8x28672x8192", "32x2048x2048", *BETWEEN])
def test_large_layers_of_few_rows_on_sm_90(shape: str) -> None:
    fast("gemv_mma", shape, "int4_g128", "float16", "sm_90")


@pytest.mark.parametrize("shape", ["64x4096x4096", "128x8960x1536"])
def test_more_rows_use_the_matrix_cores_with_w_in_registers(shape: str) -> None:
    """Weights come in wide loads and go to the instruction without a shuffle."""
    kernel = w4gen.compile(shape, "int4_g128", arch="sm_90")
    assert kernel.name == "gemm"
    lines = sass(kernel)
    assert [line for line in lines if re.search(r"\bHGMMA\b", line)]
    assert [line for line in lines if re.search(r"\bLDG\S*\.(64|128)\b", line)]
    assert not [line for line in lines if re.search(r"\bSHFL\b", line)]
    last = max(index for index, line in enumerate(lines) if re.search(r"\bHGMMA\b", line))
    assert not [line for line in lines[:last] if re.search(r"\bSTSM?\b", line)], (
        "x comes by LDGSTS; weights never leave registers"
    )


MANY = [
    ("128x28672x8192", "int4_g128", "float16"),
    ("128x8192x8192", "uint4_g128_z", "bfloat16"),
    ("256x28672x8192", "int4_g128", "bfloat16"),
    ("256x8192x28672", "int4_g32", "float16"),
    ("512x1536x1536", "int8_g128", "float16"),
    ("64x4096x14336", "int2_g128", "float16"),
    ("64x8192x28672", "int4_g32", "float16"),
    ("32x8192x28672", "uint4_g128_z", "float16"),
    ("64x17920x1536", "uint4_g128_z", "bfloat16"),
    ("128x8192x28672", "uint4_g128_z", "bfloat16"),
    ("64x128x128", "int4_g128", "float16"),  # one step
    ("256x64x128", "int4_g64", "float16"),
]


@pytest.mark.parametrize(("shape", "form", "dtype"), MANY, ids=label)
def test_many_rows_on_warps_that_multiply_apart(shape: str, form: str, dtype: str) -> None:
    """Words and x are copied, 16 bytes a thread; weights go to the instruction in the registers they are decoded in."""
    kernel = w4gen.compile(shape, form, dtype=dtype, arch="sm_90")
    assert kernel.name == "gemm_wgmma"
    binary = toolchain.build(kernel, ARCHES["sm_90"])["gemm_wgmma"]
    assert (binary.spills, binary.shared_bytes <= ARCHES["sm_90"].shared_bytes) == (0, True)
    lines = instructions(binary.files["cubin"])
    schedule, format = kernel.schedule, kernel.problem.format
    sizes = {name: int(size) for name, size in re.findall(r"(\w+) = gl\.constexpr\((\d+)\)", kernel.source)}
    rest = sizes["STEPS"] % sizes["AHEAD"]
    assert count(lines, "HGMMA") == schedule.teams * schedule.block_k // 16 * (sizes["AHEAD"] + rest)
    quads = schedule.block_k * format.bits // 256
    scales = schedule.teams * sizes["SCALE_LOADS"] * (sizes["SCALE_WORDS"] == 4)
    assert count(lines, r"LDG\.\S*\.128\b") == scales * 2 * sizes["AHEAD"], "asked for ahead, and again in the loop"
    last = max(index for index, line in enumerate(lines) if re.search(r"\bHGMMA", line))
    assert not count(lines[:last], "SHFL|STL|LDL|I2F")
    x = schedule.block_m * schedule.block_k // 1024
    words = min(2, sizes["STEPS"]) * quads * schedule.teams  # those of the first step go before x
    assert count(lines, r"LDGSTS\.") in (x + words, 2 * x + words), "16 bytes a thread; the compiler may part the first step"
    check_that_nothing_writes_what_wgmma_reads(lines)


def check_that_nothing_writes_what_wgmma_reads(lines: list[str]) -> None:
    """The hazard of docs/kernels.md: from an instruction on, until all are waited for, nothing writes a register it reads."""
    assert hazards(lines) == []
    assert any("HGMMA" in line for line in lines)


def test_a_second_build_finds_the_first(fresh_cache: Path) -> None:
    kernel = w4gen.compile("1x256x64", arch="sm_90")
    first, second = (only(toolchain.build(kernel, ARCHES["sm_90"])) for _ in range(2))
    assert (first.cached, second.cached) == (False, True)
    assert replace(second, cached=False) == first
    assert not [path for path in fresh_cache.rglob("*") if path.name.startswith(".new")]


def test_a_damaged_binary_is_built_again(fresh_cache: Path) -> None:
    kernel = w4gen.compile("1x256x64", arch="sm_90")
    whole = only(toolchain.build(kernel, ARCHES["sm_90"])).files["cubin"]
    (path,) = fresh_cache.rglob("kernel.cubin")
    path.write_bytes(whole[:100])
    again = only(toolchain.build(kernel, ARCHES["sm_90"]))
    assert not again.cached
    assert again.files["cubin"] == whole == path.read_bytes()


def test_another_text_target_or_option_is_another_binary(fresh_cache: Path) -> None:
    kernel = w4gen.compile("1x256x64", arch="sm_80")
    changed = replace(kernel, source=kernel.source.replace("power + 127", "power + 128"))
    assert changed.source != kernel.source
    options = replace(kernel, schedule=replace(kernel.schedule, maxnreg=64))
    builds = [
        only(toolchain.build(kernel, ARCHES["sm_80"])),
        only(toolchain.build(changed, ARCHES["sm_80"])),
        only(toolchain.build(options, ARCHES["sm_80"])),
        only(toolchain.build(kernel, ARCHES["sm_90"])),
    ]
    assert not any(binary.cached for binary in builds)
    assert len(list(fresh_cache.rglob("kernel.cubin"))) == 4
    assert len({path.parent.parent for path in fresh_cache.rglob("kernel.cubin")}) == 2, "kernels are addressed by their text"


def test_another_compiler_is_another_binary(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = w4gen.compile("1x256x64", arch="sm_90")
    toolchain.build(kernel, ARCHES["sm_90"])
    monkeypatch.setattr(toolchain, "version", lambda: "99.0")
    assert not only(toolchain.build(kernel, ARCHES["sm_90"])).cached


def test_a_closed_cache_still_gives_a_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("W4GEN_CACHE", str(tmp_path / "file" / "cache"))
    binary = only(built("1x256x64", "int4_g128", "sm_90"))
    assert binary.files["cubin"].startswith(b"\x7fELF")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_spills_are_counted(arch: str) -> None:
    kernel = w4gen.compile("64x4096x4096", arch=arch)
    squeezed = replace(kernel, schedule=replace(kernel.schedule, maxnreg=64))
    binary = next(iter(toolchain.build(squeezed, ARCHES[arch]).values()))
    assert binary.spills == count(instructions(binary.files["cubin"]), "(LDL|STL)") > 0


def test_what_does_not_compile_is_named_in_one_line(fresh_cache: Path) -> None:
    kernel = w4gen.compile("1x256x64", arch="sm_90")
    broken = replace(kernel, source=kernel.source.replace("acc = (acc[0] + scaled[0]", "acc = (acc[0] + scaled[:, None]"))
    with pytest.raises(ToolchainError, match="gemv_half for sm_90: ") as caught:
        toolchain.build(broken, ARCHES["sm_90"])
    assert "\n" not in str(caught.value)
    assert cache.find(broken.source, "") is None


def test_what_ptxas_refuses_is_said_in_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    kernel = w4gen.compile("128x4096x14336", arch="sm_90")
    full = replace(kernel, schedule=replace(kernel.schedule, maxnreg=56))
    with pytest.raises(ToolchainError, match=r"gemm_wgmma for sm_90: ptxas fatal .* Insufficient registers \(56\)"):
        toolchain.build(full, ARCHES["sm_90"])


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_texts_of_a_binary(arch: str) -> None:
    binary = only(built("1x4096x4096", "int4_g128", arch))
    kinds = {"sm_90": ("ptx", "sass"), "gfx942": ("amdgcn",)}[arch]
    assert all("gemv" in binary.text(kind) for kind in kinds)
    with pytest.raises(ToolchainError, match="no wasm for this target"):
        binary.text("wasm")


def test_nothing_is_compiled_under_the_interpreter(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ToolchainError, match="unset it, or ask in another process"):
        built("1x256x64", "int4_g128", "sm_90")


def test_a_call_may_not_compile_where_that_is_forbidden(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that is asked for is no just-in-time compile; what it made is loaded."""
    kernel, arch = w4gen.compile("5x256x64", arch="sm_90"), ARCHES["sm_90"]
    (piece,) = kernel.pieces
    monkeypatch.setenv("W4GEN_JIT", "forbid")
    with pytest.raises(ForbiddenError, match=r"M=2\.\.8 of 256 -> 64 int4_g128 \(f16\) is not compiled for sm_90, and W4GEN_JIT"):
        toolchain.load(kernel, piece, arch, overlap=False)
    toolchain.build(kernel, arch)
    assert toolchain.load(kernel, piece, arch, overlap=False).metadata.name == piece.name
    monkeypatch.setenv("W4GEN_JIT", "allow")
    with pytest.raises(W4Error, match="W4GEN_JIT='allow' is not one of forbid"):
        toolchain.load(kernel, piece, arch, overlap=False)


def test_a_binary_is_loaded_and_its_text_is_not_run(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That would import Gluon and read every function: most of the time of a warm first call."""
    kernel, arch = w4gen.compile("5x256x64", arch="sm_90"), ARCHES["sm_90"]
    (piece,) = kernel.pieces
    source = toolchain._source(kernel, piece)
    toolchain.build(kernel, arch)
    monkeypatch.delattr(toolchain, "module")
    made = toolchain.load(kernel, piece, arch, overlap=False)
    assert (made.src.signature, made.src.constants) == (source.signature, source.constants)


def test_triton_hashes_all_of_itself_for_others_alone() -> None:
    """Its own cache tells releases apart by that; we compile where nothing is."""
    with toolchain._apart():
        assert named_by_triton.triton_key() == ""
    assert named_by_triton.triton_key().startswith(triton.__version__)


@pytest.mark.parametrize("state", ["damaged", "closed"])
def test_what_is_in_tritons_own_cache_does_not_matter(
    state: str, fresh_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is neither read nor written."""
    theirs = tmp_path / "triton"
    theirs.mkdir()
    if state == "closed":
        (tmp_path / "file").write_text("")
        theirs = tmp_path / "file" / "triton"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(theirs))
    assert only(built("1x256x64", "int4_g128", "sm_90")).files["cubin"].startswith(b"\x7fELF")
    assert not theirs.exists() or not list(theirs.iterdir())
