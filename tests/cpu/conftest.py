"""These tests run kernels under Triton's interpreter, which must be chosen before triton is imported: a process of their own.

The interpreter of Triton 3.6 keeps bf16 as u16 and then computes on the bit patterns (dot, arithmetic) and truncates where a
GPU rounds. Mended here, so that a bf16 test says something of the kernel's text.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.fail(
            "tests/cpu needs a process of its own: TRITON_INTERPRET=1 pytest tests/cpu (and --ignore tests/cpu elsewhere)"
        )


def _wide(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _narrow(single: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(single, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(single), 0x7FC0, rounded).astype(np.uint16)


@pytest.fixture(autouse=True)
def bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 as a GPU has it: sums and products of f32, rounded to nearest even."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder as Builder
    from triton.runtime.interpreter import TensorHandle

    def is_bf16(handle: Any) -> bool:
        return handle.dtype.scalar == tl.bfloat16

    def wide(handle: Any) -> Any:
        return TensorHandle(_wide(handle.data), tl.float32) if is_bf16(handle) else handle

    def narrow(handle: Any) -> Any:
        return TensorHandle(_narrow(handle.data), tl.bfloat16)

    plain_binary, plain_dot, plain_cast = Builder.binary_op, Builder.create_dot, Builder.cast_impl

    def binary(self: Any, lhs: Any, rhs: Any, op: Callable[..., Any]) -> Any:
        result = plain_binary(self, wide(lhs), wide(rhs), op)
        return narrow(result) if is_bf16(lhs) and result.dtype.scalar == tl.float32 else result

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain_dot(self, wide(a), wide(b), *rest)

    def cast(self: Any, source: Any, kind: Any) -> Any:
        if source.dtype.scalar == tl.float32 and kind.scalar == tl.bfloat16:
            return narrow(source)
        return wide(source) if is_bf16(source) and kind.scalar == tl.float32 else plain_cast(self, source, kind)

    monkeypatch.setattr(Builder, "binary_op", binary)
    monkeypatch.setattr(Builder, "create_dot", dot)
    monkeypatch.setattr(Builder, "cast_impl", cast)
    monkeypatch.setattr(Builder, "create_fp_to_fp", lambda self, source, kind, _: cast(self, source, kind))
    constant = lambda self, value: narrow(TensorHandle(np.array([value], np.float32), tl.float32))  # noqa: E731
    monkeypatch.setattr(Builder, "get_bf16", constant, raising=False)
