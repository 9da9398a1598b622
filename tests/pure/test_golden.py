"""Rendered kernels, byte for byte: a change of a template or printer shows in review."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent.parent / "golden"
SPEC = importlib.util.spec_from_file_location("golden_make", GOLDEN / "make.py")
make = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(make)


@pytest.mark.parametrize("name", make.KERNELS)
def test_a_golden_is_what_w4gen_renders(name: str) -> None:
    assert make.source(name) == (GOLDEN / f"{name}.py").read_text(), "run `make golden` and read the diff"


def test_readme_shows_the_kernel_that_w4gen_renders() -> None:
    assert make.readme() == make.README.read_text(), "run `make golden` and read the diff"


def test_no_golden_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.py")} == {"make", *make.KERNELS}


def test_goldens_are_formatted() -> None:
    command = [sys.executable, "-m", "ruff", "format", "--check", "--diff", "--isolated", "--line-length", "130"]
    done = subprocess.run([*command, *map(str, GOLDEN.glob("*.py"))], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
