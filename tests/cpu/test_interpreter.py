"""bf16 under Triton's interpreter is what a GPU has: products and sums of f32, rounded to nearest even."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from w4gen.runtime.interpreter import mend


@triton.jit
def arithmetic(x_ptr, y_ptr, sum_ptr, product_ptr, near_ptr, dot_ptr):
    i = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(sum_ptr + i, x + y * 3.0)
    tl.store(product_ptr + i, x * y)
    tl.store(near_ptr + i, (x.to(tl.float32) / 3.0).to(tl.bfloat16))
    tl.store(dot_ptr + i, tl.dot(x, y))


def test_bf16_arithmetic_casts_constants_and_dots(rng: np.random.Generator) -> None:
    mend()
    a, b = (oracle.to_bf16(rng.standard_normal((16, 16))) for _ in range(2))
    x, y = (torch.from_numpy(each).bfloat16() for each in (a, b))
    results = [torch.zeros(16, 16, dtype=torch.bfloat16) for _ in range(3)] + [torch.zeros(16, 16)]
    arithmetic[(1,)](x, y, *results)
    added, multiplied, near, dotted = (each.double().numpy() for each in results)
    assert np.array_equal(added, oracle.to_bf16(a + oracle.to_bf16(b * np.float32(3))))
    assert np.array_equal(multiplied, oracle.to_bf16(a * b))
    assert np.array_equal(near, oracle.to_bf16(a / np.float32(3)))
    assert np.allclose(dotted, a.astype(np.float64) @ b.astype(np.float64), rtol=1e-5, atol=1e-5)


@triton.jit
def sums(x_ptr, y_ptr, TIMES: tl.constexpr):
    for i in tl.static_range(TIMES):
        tl.store(y_ptr + i, tl.sum(tl.load(x_ptr + tl.arange(0, 16))) + i)


def test_functions_that_kernels_call_replace_the_language_once_in_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    mend()
    plain, replaced = interpreter._patch_builtin, []
    monkeypatch.setattr(interpreter, "_patch_builtin", lambda *given: replaced.append(given[0]) or plain(*given))
    times = []
    for count in (8, 1, 8):
        y = torch.zeros(8)
        sums[(1,)](torch.arange(16.0), y, count)
        assert y.tolist() == [120.0 + i if i < count else 0.0 for i in range(8)]
        assert tl.core.is_builtin(tl.load), "the language is as it was"
        times.append(len(replaced))
        replaced.clear()
    assert times[1] == times[2] > 4, "of the kernel and of its function, in each launch"


def test_types_of_tiles_are_remembered_each_for_itself() -> None:
    mend()
    for _ in range(2):
        for kind in (tl.float16, tl.int16, tl.pointer_type(tl.float16)):
            for shape in ([4, 8], [8, 4], [tl.constexpr(8), 4], [32]):
                sizes = [getattr(size, "value", size) for size in shape]
                tile = tl.block_type(kind, shape)
                assert (tile.element_ty, list(tile.shape), tile.numel) == (kind, sizes, 32)
                assert [each.value for each in tile.shape.type.types] == sizes
                assert tile.name.endswith(f", {kind.name}>")
        with pytest.raises(ValueError, match="power of 2"):
            tl.block_type(tl.float16, [3])
        assert [type(each.value) for each in tl.tuple([True, 1]).type.types] == [bool, int]
        assert [type(each.value) for each in tl.tuple([1, 1]).type.types] == [int, int]
