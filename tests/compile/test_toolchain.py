"""Kernels compile for every arch with no GPU present; what the binaries say of themselves; nothing compiles twice."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import w4gen
from w4gen import Format, cache, toolchain
from w4gen.errors import ToolchainError
from w4gen.schedule.arch import ARCHES

SHAPES = {
    "gemv": "1x4096x4096",
    "gemm 16": "16x4096x4096",
    "gemm 64": "64x4096x4096",
    "gemm large": "128x8192x28672",
    "dequant": "512x4096x4096",
}


def built(shape: str, form: str | Format, arch: str, **options: object) -> dict[str, toolchain.Binary]:
    return toolchain.build(w4gen.compile(shape, form, arch=arch, **options), ARCHES[arch])


def only(binaries: dict[str, toolchain.Binary]) -> toolchain.Binary:
    (binary,) = binaries.values()
    return binary


def check(binaries: dict[str, toolchain.Binary], arch: str) -> None:
    """No spill, and no more of anything than the arch has."""
    kind = "cubin" if ARCHES[arch].backend == "cuda" else "hsaco"
    for name, binary in binaries.items():
        assert binary.spills == 0, name
        assert 0 < binary.registers <= ARCHES[arch].registers, name
        assert 0 <= binary.shared_bytes <= ARCHES[arch].shared_bytes, name
        assert binary.files[kind].read_bytes().startswith(b"\x7fELF")


@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("arch", ARCHES)
def test_every_template_compiles_for_every_arch(arch: str, shape: str, form: str) -> None:
    check(built(SHAPES[shape], form, arch), arch)


@pytest.mark.parametrize("arch", [name for name, arch in ARCHES.items() if arch.fragment])
def test_several_rows_of_what_gemm_does_not_read_compile_for_every_arch(arch: str) -> None:
    """gemv with x on the left: rows too ragged for whole steps of gemm."""
    kernel = w4gen.compile("16x600x4096", "int4_g128", arch=arch)
    assert (kernel.name, kernel.schedule.unit) == ("gemv", "mma")
    check(toolchain.build(kernel, ARCHES[arch]), arch)


@pytest.mark.parametrize("form", ["uint4_g128_z", "uint4_g32_m", "int8_g128", "e2m1_g32"])
@pytest.mark.parametrize("shape", ["gemv", "gemm 16", "dequant"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
def test_other_formats_compile_for_an_arch_of_each_kind(arch: str, shape: str, form: str) -> None:
    assert not any(binary.spills for binary in built(SHAPES[shape], form, arch).values())


NARROW = [Format("bit", bits=1, group=32), Format("bit", bits=1, group=-1), Format("uint2", bits=2, group=128)]
FORMS = ["int4_g32", "int4_row", "uint4_g128_z", "uint4_g32_m", "int8_g128", "e2m1_g32", "nf4_g64", *NARROW]


@pytest.mark.parametrize("form", NARROW, ids=lambda form: form.label)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_long_steps_of_narrow_codes_do_not_spill(arch: str, form: Format) -> None:
    check(built(SHAPES["gemm 64"], form, arch), arch)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: getattr(form, "label", form))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("arch", ARCHES)
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
        ("300x331x37", "uint4_g32_z", {"bias": True}),
        ("200x8192x262144", "int4_g128", {}),
    ],
)
def test_odd_kernels_compile_for_sm_90(shape: str, form: str, options: dict[str, object]) -> None:
    assert not any(binary.spills for binary in built(shape, form, "sm_90", **options).values())


def sass(shape: str, form: str) -> list[str]:
    """The instructions for sm_90."""
    return next(iter(built(shape, form, "sm_90").values())).text("sass").splitlines()


def test_one_row_reads_sixteen_bytes_of_codes_at_once_and_converts_no_integer() -> None:
    lines = sass(SHAPES["gemv"], "int4_g128")
    loads = [line for line in lines if re.search(r"\bLDG\S*\.128\b", line)]
    assert loads
    assert not [line for line in lines if re.search(r"\bI2F", line)]


@pytest.mark.parametrize("shape", ["gemm 16", "gemm 64", "gemm large"])
def test_more_rows_use_the_matrix_cores_with_w_in_registers(shape: str) -> None:
    """Weights come in wide loads and go to the instruction without a shuffle."""
    lines = sass(SHAPES[shape], "int4_g128")
    assert [line for line in lines if re.search(r"\bHGMMA\b", line)]
    assert [line for line in lines if re.search(r"\bLDG\S*\.(64|128)\b", line)]
    assert not [line for line in lines if re.search(r"\bSHFL\b", line)]
    last = max(index for index, line in enumerate(lines) if re.search(r"\bHGMMA\b", line))
    assert not [line for line in lines[:last] if re.search(r"\bSTSM?\b", line)], (
        "x comes by LDGSTS; weights never leave registers"
    )


@pytest.mark.parametrize("shape", ["16x4096x4096", "64x1536x256", "128x8192x28672"])
def test_a_sum_is_never_carried_through_a_dot_of_decoded_registers(shape: str) -> None:
    """The hazard of docs/kernels.md: with w on the left, each dot starts a sum of its own."""
    source = w4gen.compile(shape, arch="sm_90").source
    assert re.findall(r"tl\.dot\((.*)\)", source) == ["w_value, tl.trans(x_tile)"]


def test_a_second_build_finds_the_first(fresh_cache: Path) -> None:
    kernel = w4gen.compile("1x256x64", arch="sm_90")
    first, second = (only(toolchain.build(kernel, ARCHES["sm_90"])) for _ in range(2))
    assert (first.cached, second.cached) == (False, True)
    assert replace(second, cached=False) == first
    assert not [path for path in fresh_cache.rglob("*") if path.name.startswith(".new")]


def test_a_damaged_binary_is_built_again(fresh_cache: Path) -> None:
    kernel = w4gen.compile("1x256x64", arch="sm_90")
    path = only(toolchain.build(kernel, ARCHES["sm_90"])).files["cubin"]
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    again = only(toolchain.build(kernel, ARCHES["sm_90"]))
    assert not again.cached
    assert again.files["cubin"].read_bytes().startswith(b"\x7fELF")
    assert len(again.files["cubin"].read_bytes()) == len(whole)


def test_another_text_target_or_option_is_another_binary(fresh_cache: Path) -> None:
    kernel = w4gen.compile("1x256x64", arch="sm_90")
    changed = replace(kernel, source=kernel.source.replace("acc += scaled", "acc += scaled * 2.0"))
    assert changed.source != kernel.source
    options = replace(kernel, schedule=replace(kernel.schedule, warps=4 if kernel.schedule.warps != 4 else 2))
    builds = [
        only(toolchain.build(kernel, ARCHES["sm_90"])),
        only(toolchain.build(changed, ARCHES["sm_90"])),
        only(toolchain.build(options, ARCHES["sm_90"])),
        only(toolchain.build(kernel, ARCHES["sm_80"])),
    ]
    assert not any(binary.cached for binary in builds)
    assert len({binary.files["cubin"] for binary in builds}) == 4
    assert len({binary.files["cubin"].parent.parent for binary in builds[:2]}) == 2, "kernels are addressed by their text"


def test_another_compiler_is_another_binary(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = w4gen.compile("1x256x64", arch="sm_90")
    toolchain.build(kernel, ARCHES["sm_90"])
    monkeypatch.setattr(toolchain, "version", lambda: "99.0")
    assert not only(toolchain.build(kernel, ARCHES["sm_90"])).cached


def test_a_closed_cache_still_gives_a_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("W4GEN_CACHE", str(tmp_path / "file" / "cache"))
    binary = only(built("1x256x64", "int4_g128", "sm_90"))
    assert binary.files["cubin"].read_bytes().startswith(b"\x7fELF")


def test_what_does_not_compile_is_named_in_one_line(fresh_cache: Path) -> None:
    kernel = w4gen.compile("1x256x64", arch="sm_90")
    broken = replace(kernel, source=kernel.source.replace("acc += scaled", "acc += scaled[:, :, None, None]"))
    with pytest.raises(ToolchainError, match="gemv for sm_90: ") as caught:
        toolchain.build(broken, ARCHES["sm_90"])
    assert "\n" not in str(caught.value)
    assert cache.find(broken.source, "") is None


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
