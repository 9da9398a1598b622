"""These tests run kernels under Triton's interpreter, which must be chosen before triton is imported: a process of their own."""

from __future__ import annotations

import os

import pytest

COMMAND = "TRITON_INTERPRET=1 pytest tests/cpu (and --ignore tests/cpu elsewhere)"


@pytest.fixture(autouse=True)
def interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.fail(f"tests/cpu needs a process of its own: {COMMAND}")
