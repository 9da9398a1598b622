"""Render the golden kernels anew: python tests/golden/make.py (or `make golden`), then read the diff before you commit it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from w4gen.api import parse_shape, problem_of
from w4gen.cache import address
from w4gen.ir.lower import lower
from w4gen.pipeline import made
from w4gen.schedule.arch import ARCHES
from w4gen.schedule.rules import pick
from w4gen.toolchain import able

HERE = Path(__file__).parent
README = HERE.parent.parent / "README.md"
SM_80, SM_90 = {"arch": "sm_80"}, {"arch": "sm_90"}
KERNELS: dict[str, tuple[str, str, dict[str, object]]] = {
    "m1_int4_g128": ("1x1536x256", "int4_g128", {}),
    "m1_int4_g128_half": ("1x1536x256", "int4_g128", SM_90),
    "m8_int4_g128_mma": ("8x1536x256", "int4_g128", SM_90),
    "m8_nvfp4_long": ("8x28672x8192", "nvfp4", SM_90),
    "m64_int4_g128": ("64x4096x4096", "int4_g128", SM_90),
    "m200_int4_g128_wgmma": ("200x4096x4096", "int4_g128", SM_90),
    "m200_int4_g128_wgmma_pairs": ("200x4096x4096", "int4_g128", {"activation": "silu_mul", **SM_90}),
    "m1_nf4_g64_ragged_bias": ("1x1000x37", "nf4_g64", {"bias": True}),
    "m16_nf4_g64": ("16x1536x256", "nf4_g64", SM_80),
    "m1_int4_g128_bf16": ("1x1536x256", "int4_g128", {"dtype": "bfloat16"}),
    "m512_nf4_g64_ragged_bias": ("512x1000x37", "nf4_g64", {"bias": True}),
    "m16_int4_g50": ("16x600x40", "int4_g50", SM_80),
    "m1_uint4_g128_z": ("1x1536x256", "uint4_g128_z", {}),
    "m16_uint4_g32_m": ("16x1536x256", "uint4_g32_m", SM_80),
    "m512_int4_g128_gradient": ("512x1536x256", "int4_g128", {"gradient": True, **SM_90}),
    "m16_nf4_g64_gradient_ragged": ("16x1000x37", "nf4_g64", {"gradient": True}),
}
"""Shape, format and options; the arch is `portable` where none is named."""


def source(name: str) -> str:
    """What w4gen renders now for the golden called `name`, as the rules choose: a tuned row is no reason for another text."""
    shape, form, options = KERNELS[name]
    arch = ARCHES[str(options.get("arch", "portable"))]
    m, k, n = parse_shape(shape)
    kind, bias, gradient = str(options.get("dtype", "float16")), bool(options.get("bias")), bool(options.get("gradient"))
    problem = problem_of(m=m, n=n, k=k, format=form, dtype_name=kind, bias=bias, gradient=gradient)
    program = lower(replace(problem, activation=str(options.get("activation", ""))))
    return made(program, pick(program, able(arch)), arch).source


def readme() -> str:
    """README.md with the first golden between its kernel marks, and its folder's name in what `make demo` prints."""
    text, (before, after) = README.read_text(), ("<!-- kernel -->", "<!-- /kernel -->")
    whole = source(next(iter(KERNELS)))
    text = re.sub(r"kernels/[0-9a-f]{8}\.\.\.", f"kernels/{address(whole)[:8]}...", text)
    kernel = whole.split("\n\nPROBLEM")[0].rstrip()
    start, end = text.index(before) + len(before), text.index(after)
    return f"{text[:start]}\n```python\n{kernel}\n```\n{text[end:]}"


if __name__ == "__main__":
    README.write_text(readme())
    for name in KERNELS:
        (HERE / f"{name}.py").write_text(source(name))
        print(f"wrote {HERE / name}.py")
