"""Triton's interpreter: bf16 as a GPU has it, and without work that it does again or whose result it throws away.

The interpreter of Triton 3.6 keeps bf16 as u16 and then computes on the bit patterns (dot, arithmetic), truncates where a GPU
rounds, and knows no bf16 constants. Without this a check of a bf16 kernel would say nothing of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np


def wide_bits(bits: Any) -> Any:
    """u16 bf16 patterns as f32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow_bits(single: Any) -> Any:
    """f32 as u16 bf16 patterns, rounded to nearest even."""
    bits = np.ascontiguousarray(single, np.float32).view(np.uint32)
    return np.where(np.isnan(single), 0x7FC0, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


@cache
def mend() -> None:
    """Change the interpreter of this process. Done once."""
    mend_bf16()
    skip_overflow_checks()
    patch_once()
    remember_shapes()


def mend_bf16() -> None:
    """Operations on bf16 in f32, rounded to nearest even."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder as Builder
    from triton.runtime.interpreter import TensorHandle

    def is_bf16(handle: Any) -> bool:
        return bool(handle.dtype.scalar == tl.bfloat16)

    def wide(handle: Any) -> Any:
        return TensorHandle(wide_bits(handle.data), tl.float32) if is_bf16(handle) else handle

    def narrow(handle: Any) -> Any:
        return TensorHandle(narrow_bits(handle.data), tl.bfloat16)

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

    def constant(self: Any, value: float) -> Any:
        return narrow(TensorHandle(np.array([value], np.float32), tl.float32))

    Builder.binary_op, Builder.create_dot, Builder.cast_impl = binary, dot, cast
    Builder.create_fp_to_fp = lambda self, source, kind, _: cast(self, source, kind)
    Builder.get_bf16 = constant


def skip_overflow_checks() -> None:
    """Halve the interpreter's time; no result changes.

    It computes every sum and product of integers again in 64 bits for an assertion, which it makes only under `debug`.
    """
    from triton.runtime.interpreter import interpreter_builder as builder

    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def patch_once() -> None:
    """Save up to a third of the interpreter's time; no result changes.

    It puts its own operations in the place of the language's whenever a kernel calls a function (`tl.sum`), and takes those
    away when the kernel ends: the first call of each function in a launch is enough.
    """
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpretedFunction as Function

    launched, patch, patched = Function.run, interpreter._patch_lang, set[Any]()

    def run(self: Any, *arguments: Any, **given: Any) -> None:
        patched.clear()
        launched(self, *arguments, **given)

    def once(function: Callable[..., Any]) -> Any:
        if function in patched:
            return None  # only a launch asks what it is to take away
        patched.add(function)
        return patch(function)

    Function.run, interpreter._patch_lang = run, once


def remember_shapes() -> None:
    """Save another third of the interpreter's time; no result changes.

    It works out the type of every tile, and of every tuple of sizes, anew for each operation of each program. They are few.
    """
    from triton.language import core

    made, types_of, known = core.block_type.__init__, core._type_for_tuple_values, dict[Any, Any]()

    def block(self: Any, element: Any, shape: Any) -> None:
        key = (element.name, *numbers(shape))
        if key not in known:
            made(self, element, shape)
            known[key] = vars(self).copy()
        vars(self).update(known[key])

    def types(values: Any, fields: Any = None) -> Any:
        key = numbers(values)
        if fields is not None or set(map(type, key)) != {int}:
            return types_of(values, fields)
        if key not in known:
            known[key] = types_of(values)
        return known[key]

    def numbers(shape: Any) -> tuple[Any, ...]:
        return tuple([each.value if type(each) is core.constexpr else each for each in shape])

    core.block_type.__init__, core._type_for_tuple_values = block, types
