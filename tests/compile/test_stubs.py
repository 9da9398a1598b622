"""What starts a kernel is compiled while the kernel is, where a driver is installed; a compile never fails for it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest
from triton.backends.nvidia import driver

import w4gen
from w4gen import processes, stubs, toolchain

BUILD = """
import w4gen
from w4gen import toolchain
from w4gen.schedule.arch import ARCHES
(binary,) = toolchain.build(w4gen.compile("1x1536x256", "{form}", arch="sm_90"), ARCHES["sm_90"]).values()
assert not binary.cached
"""


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a driver's library that has the functions Triton calls, and does nothing."""
    folder = tmp_path_factory.mktemp("libcuda")
    calls = Path(driver.dirname, "driver.c").read_text() + driver.make_launcher({}, {0: "*i8"}, None)
    names = sorted(set(re.findall(r"\b(cu[A-Z]\w+)\s*\(", calls)))
    (folder / "all.c").write_text("\n".join(f"int {name}() {{ return 0; }}" for name in names))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "all.c"], check=True)
    return folder


def build(tmp_path: Path, form: str, **environment: str) -> list[str]:
    """Compile a kernel in a process with empty caches: what is in Triton's then, which the next such process finds."""
    ours = {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "W4GEN_CACHE": str(tmp_path / form)}
    command = processes.program(BUILD.format(form=form))
    subprocess.run(command, env=processes.environment(**ours, **environment), check=True)
    return sorted(path.name.partition(".")[0] for path in tmp_path.glob("triton/*/*"))


def test_it_is_made_beside_the_kernel_once_for_all_that_take_as_many_arguments(libcuda: Path, tmp_path: Path) -> None:
    installed = {"TRITON_LIBCUDA_PATH": str(libcuda), "LD_LIBRARY_PATH": str(libcuda)}
    assert build(tmp_path, "int4_g128", **installed) == ["__triton_launcher", "cuda_utils"]
    assert build(tmp_path, "int8_g64", **installed) == ["__triton_launcher", "cuda_utils"]
    assert build(tmp_path, "nf4_g64", **installed) == ["__triton_launcher", "__triton_launcher", "cuda_utils"]  # a codebook too


def test_without_a_compiler_or_a_driver_kernels_compile_still(libcuda: Path, tmp_path: Path) -> None:
    assert build(tmp_path, "int4_g128", TRITON_LIBCUDA_PATH=str(libcuda), CC="false") == []
    assert build(tmp_path, "int8_g64", TRITON_LIBCUDA_PATH=str(tmp_path)) == []


def test_it_is_the_one_that_a_load_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, made = w4gen.compile("1x1536x256", "nf4_g64", arch="sm_90"), []
    for place in ("triton.runtime.build", "triton.backends.nvidia.driver"):
        monkeypatch.setattr(f"{place}.compile_module_from_src", lambda **asked: made.append(asked) or Mock())
    monkeypatch.setattr(driver, "CudaUtils", Mock())
    monkeypatch.setattr(driver, "library_dirs", list)
    monkeypatch.setattr(stubs, "_make", stubs._make.__wrapped__)
    arguments = toolchain.Arguments.of(kernel, kernel.pieces[0])
    with stubs.meanwhile(arguments.signature):
        pass
    driver.CudaLauncher(arguments, Mock(tensordesc_meta=None))
    ahead, asked = made
    assert ahead == asked
