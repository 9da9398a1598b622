"""The compile-time half of the public interface: a shape and a format as people write them, to a kernel."""

from __future__ import annotations

import re

from w4gen import knobs, pipeline
from w4gen.codegen.render import Kernel
from w4gen.errors import ShapeError, W4Error
from w4gen.formats import named
from w4gen.ir.problem import Problem
from w4gen.ir.types import Format, dtype
from w4gen.schedule import arch as arches
from w4gen.schedule.rules import bucket


def parse_shape(text: str) -> tuple[int, int, int]:
    """(m, k, n) of `MxKxN`: tokens x inputs x outputs. Raises `ShapeError` on anything else."""
    match = re.fullmatch(r"(-?\d+)[xX×](-?\d+)[xX×](-?\d+)", text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ShapeError(f"shape {text!r} is not MxKxN: give tokens x inputs x outputs, as in 1x1536x256")
    m, k, n = (int(part) for part in match.groups())
    return m, k, n


def parse_layer(text: str) -> tuple[int, int] | None:
    """(k, n) of `KxN`: inputs x outputs; None where it is something else."""
    match = re.fullmatch(r"(\d+)[xX×](\d+)", text.strip())
    return (int(match[1]), int(match[2])) if match else None


def layer_of(text: str) -> tuple[int, int]:
    """(k, n) of `KxN`. Raises `ShapeError` on anything else."""
    sizes = parse_layer(text)
    if sizes is None:
        raise ShapeError(f"{text!r} is not KxN: give inputs x outputs, as in 4096x14336, and tokens by --m")
    return sizes


def problem_of(
    *,
    m: int,
    n: int,
    k: int,
    format: str | Format = "int4_g128",
    dtype_name: object = "float16",
    bias: bool = False,
    gradient: bool = False,
) -> Problem:
    """The problem of the bucket that `m` falls in. Raises `W4Error` on sizes, formats and dtypes that are not valid."""
    kind = dtype(dtype_name)
    if kind.bits != 16:
        raise ShapeError(f"dtype {dtype_name}: kernels take float16 and bfloat16; float32 x is run by the fallback")
    return Problem(m=bucket(m), n=n, k=k, format=named(format), x=kind, y=kind, bias=bias, gradient=gradient)


def compile(
    shape: str,
    format: str | Format = "int4_g128",
    *,
    arch: str = "",
    dtype: object = "float16",
    bias: bool = False,
    gradient: bool = False,
) -> Kernel:
    """The kernel for `MxKxN` on `arch` (default: W4GEN_ARCH, else `portable`); it has `.source`, `.schedule`, `.program`.

    With `gradient` it takes dY [M, N] and gives dX [M, K]. Raises `W4Error` where there is none; no GPU is needed.
    """
    m, k, n = parse_shape(shape)
    problem = problem_of(m=m, n=n, k=k, format=format, dtype_name=dtype, bias=bias, gradient=gradient)
    return pipeline.compile(problem, arches.arch(arch or knobs.ARCH.read() or "portable"))


def supports(
    *, m: int, n: int, k: int, format: str | Format = "int4_g128", arch: str = "portable", dtype: object = "float16"
) -> tuple[bool, str]:
    """Whether a kernel answers, and if not why: then the fallback (dequantize, matmul) does."""
    try:
        pipeline.compile(problem_of(m=m, n=n, k=k, format=format, dtype_name=dtype), arches.arch(arch))
    except W4Error as error:
        return False, str(error)
    return True, ""
