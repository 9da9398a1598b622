"""What every built-in format costs; `python -m w4gen.bench.formats` writes docs/formats.md. No GPU is needed."""

from __future__ import annotations

import sys
from typing import Any

from w4gen import api, toolchain
from w4gen.errors import W4Error
from w4gen.formats import FAMILIES, USERS
from w4gen.ir.lower import lower
from w4gen.ir.problem import Problem
from w4gen.ir.types import BF16, F16, DType, Format
from w4gen.paths import CHECKOUT
from w4gen.schedule.apply import apply
from w4gen.schedule.arch import ARCHES
from w4gen.schedule.cost import decoding
from w4gen.schedule.rules import pick

SIZE = 4096
"""N and K of the layer that the figures are worked out for: a codebook then weighs next to nothing."""

ZEROS = (
    "_z is (q - z) · s with z one of the codes (GPTQ, AWQ, compressed-tensors, AutoRound), _zf the same with any z (HQQ), "
    "_m is q · s - z (GGUF, which stores -z)."
)
"""Which checkpoint uses which mode of the zero."""

HINT = f"""bits a weight: with scales, zeros and tables · ops: word operations that decode a weight, x being f16 or bf16 (M = 1)
Suffixes change a family: _g64 (group), _row and _tensor (one scale for each), _f16 _bf16 _f32 _e8m0 _e4m3 (type of the scale).
Zeros: {ZEROS} Or --format FILE.py:NAME."""

SHAPES = ("1x4096x4096", "16x4096x4096", "512x4096x4096")
TARGETS = ("sm_80", "sm_90", "gfx942")
HEAD = f"""# Formats

What each built-in format costs. Made by `make formats-docs`; nothing here was measured on a GPU.

{HINT}

Registers a thread, and spills where there are any (`+n`), of the kernels that the rules pick for 4096 inputs and 4096 outputs
with 1 / 16 / 512 tokens in f16, compiled for three archs. Every other arch compiles too: `make compile-all`.
"""


def described(form: Format, note: str) -> dict[str, Any]:
    """The figures of one family."""
    return {
        "format": form.label,
        "bits": form.bits,
        "decoding": form.decoding,
        "group": group_of(form),
        "scale": kind_of(form.scale),
        "zero": kind_of(form.zero),
        "bits_per_weight": round(form.stated_bits(SIZE, SIZE), 2),
        "operations_f16": operations(form, F16),
        "operations_bf16": operations(form, BF16),
        "used_by": note,
    }


def group_of(form: Format) -> str:
    """What one scale is for."""
    return ("tensor" if form.flat else "row") if form.group == -1 else str(form.group)


def kind_of(kind: DType | Format | None) -> str | None:
    """The type of scales; of those that are codes, the group and the type of their own scales too."""
    if not isinstance(kind, Format):
        return kind.name if kind else None
    return f"{kind.name}, of {group_of(kind)} under {kind_of(kind.scale) or 'nothing'}"


def operations(form: Format, kind: DType) -> float | None:
    """Word operations that decode one weight in the kernel for one token of `kind`; None where there is no such kernel."""
    problem, arch = Problem(m=(1, 1), n=SIZE, k=SIZE, format=form, x=kind, y=kind), ARCHES["portable"]
    program = lower(problem)
    try:
        return round(decoding(apply(program, pick(program, arch), arch)), 2)
    except W4Error:
        return None


def needs(form: Format, arch: str) -> str:
    """Registers and spills of the kernels of one format on one arch: `40 / 56 / 32`."""
    found = []
    for shape in SHAPES:
        built = toolchain.build(api.compile(shape, form, arch=arch), ARCHES[arch]).values()
        spills = sum(binary.spills for binary in built)
        found.append(f"{max(binary.registers for binary in built)}{f'+{spills}' if spills else ''}")
    return " / ".join(found)


def rows() -> list[list[str]]:
    """A row for each family."""
    made = []
    for form in FAMILIES.values():
        facts = described(form, USERS.get(form.name, ""))
        chosen = ("format", "bits_per_weight", "decoding", "scale", "operations_f16", "operations_bf16")
        made.append([*(str(facts[name]) for name in chosen), *(needs(form, arch) for arch in TARGETS), facts["used_by"]])
        print(" | ".join(made[-1]), file=sys.stderr, flush=True)
    return made


def main() -> None:
    titles = ["format", "bits a weight", "decoded by", "scale", "ops f16", "ops bf16", *TARGETS, "used by"]
    lines = [titles, ["---"] * len(titles), *rows()]
    (CHECKOUT / "docs" / "formats.md").write_text(HEAD + "\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n")


if __name__ == "__main__":
    main()
