"""Kernels compile for every arch with no GPU present; what the binaries say of themselves; nothing compiles twice."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import w4gen
from w4gen import cache, toolchain
from w4gen.errors import ToolchainError
from w4gen.schedule.arch import ARCHES

SHAPES = {"m1": "1x4096x4096", "m16": "16x4096x4096"}


def built(shape: str, form: str, arch: str, **options: object) -> tuple[w4gen.compile, toolchain.Binary]:  # type: ignore[valid-type]
    kernel = w4gen.compile(shape, form, arch=arch, **options)
    return kernel, toolchain.build(kernel, ARCHES[arch])


@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("arch", ARCHES)
def test_every_kernel_compiles_for_every_arch(arch: str, shape: str, form: str) -> None:
    _, binary = built(SHAPES[shape], form, arch)
    assert binary.spills == 0
    assert 0 < binary.registers <= ARCHES[arch].registers
    assert 0 <= binary.shared_bytes <= ARCHES[arch].shared_bytes
    kind = "cubin" if ARCHES[arch].backend == "cuda" else "hsaco"
    assert binary.files[kind].read_bytes().startswith(b"\x7fELF")


@pytest.mark.parametrize("form", ["uint4_g128_z", "uint4_g32_m", "int8_g128", "e2m1_g32"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
def test_other_formats_compile_for_an_arch_of_each_kind(arch: str, shape: str, form: str) -> None:
    _, binary = built(SHAPES[shape], form, arch)
    assert binary.spills == 0


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
    ],
)
def test_odd_kernels_compile_for_sm_90(shape: str, form: str, options: dict[str, object]) -> None:
    _, binary = built(shape, form, "sm_90", **options)
    assert binary.spills == 0


def sass(shape: str, form: str) -> list[str]:
    """The instructions for sm_90."""
    return built(shape, form, "sm_90")[1].text("sass").splitlines()


def test_one_row_reads_sixteen_bytes_of_codes_at_once_and_converts_no_integer() -> None:
    lines = sass(SHAPES["m1"], "int4_g128")
    loads = [line for line in lines if re.search(r"\bLDG\S*\.128\b", line)]
    assert loads
    assert not [line for line in lines if re.search(r"\bI2F", line)]


def test_sixteen_rows_use_the_matrix_cores() -> None:
    assert [line for line in sass(SHAPES["m16"], "int4_g128") if re.search(r"\b(HMMA|HGMMA)\b", line)]


def test_a_second_build_finds_the_first(fresh_cache: Path) -> None:
    kernel = w4gen.compile("1x256x64", arch="sm_90")
    first, second = (toolchain.build(kernel, ARCHES["sm_90"]) for _ in range(2))
    assert (first.cached, second.cached) == (False, True)
    assert replace(second, cached=False) == first
    assert not [path for path in fresh_cache.rglob("*") if path.name.startswith(".new")]


def test_a_damaged_binary_is_built_again(fresh_cache: Path) -> None:
    kernel = w4gen.compile("1x256x64", arch="sm_90")
    path = toolchain.build(kernel, ARCHES["sm_90"]).files["cubin"]
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    again = toolchain.build(kernel, ARCHES["sm_90"])
    assert not again.cached
    assert again.files["cubin"].read_bytes().startswith(b"\x7fELF")
    assert len(again.files["cubin"].read_bytes()) == len(whole)


def test_another_text_target_or_option_is_another_binary(fresh_cache: Path) -> None:
    kernel = w4gen.compile("1x256x64", arch="sm_90")
    changed = replace(kernel, source=kernel.source.replace("acc += scaled", "acc += scaled * 2.0"))
    assert changed.source != kernel.source
    options = replace(kernel, schedule=replace(kernel.schedule, warps=4 if kernel.schedule.warps != 4 else 2))
    builds = [
        toolchain.build(kernel, ARCHES["sm_90"]),
        toolchain.build(changed, ARCHES["sm_90"]),
        toolchain.build(options, ARCHES["sm_90"]),
        toolchain.build(kernel, ARCHES["sm_80"]),
    ]
    assert not any(binary.cached for binary in builds)
    assert len({binary.files["cubin"] for binary in builds}) == 4
    assert len({binary.files["cubin"].parent.parent for binary in builds[:2]}) == 2, "kernels are addressed by their text"


def test_another_compiler_is_another_binary(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = w4gen.compile("1x256x64", arch="sm_90")
    toolchain.build(kernel, ARCHES["sm_90"])
    monkeypatch.setattr(toolchain, "version", lambda: "99.0")
    assert not toolchain.build(kernel, ARCHES["sm_90"]).cached


def test_a_closed_cache_still_gives_a_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("W4GEN_CACHE", str(tmp_path / "file" / "cache"))
    _, binary = built("1x256x64", "int4_g128", "sm_90")
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
    _, binary = built("1x4096x4096", "int4_g128", arch)
    kinds = {"sm_90": ("ptx", "sass"), "gfx942": ("amdgcn",)}[arch]
    assert all("gemv" in binary.text(kind) for kind in kinds)
    with pytest.raises(ToolchainError, match="no wasm for this target"):
        binary.text("wasm")


def test_nothing_is_compiled_under_the_interpreter(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ToolchainError, match="unset it, or ask in another process"):
        built("1x256x64", "int4_g128", "sm_90")
