"""Formats by layer under a budget of bytes: each layer gets the format in which the bytes do most against its error.

python examples/05_mixed_formats.py                    a small decoder block of random weights, half a second on a CPU
python examples/05_mixed_formats.py --bits 3.6 4.0     other budgets, in bits a weight: layers are rounded once for all

Every layer is rounded to every candidate once; its error is |W - W'|² over the whole model's |W|². All layers begin with the
fewest bytes. Then, again and again, the layer is upgraded whose error falls most for each byte, as long as the budget lasts. What
comes out is a dict of names to formats, as `w4gen.convert` takes it, as W4GenConfig takes it, and as the command line does:
`w4gen convert IN OUT --format 'model.layers.0.mlp.down_proj=int4_g64' --format '*=int3_g64'`.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import torch

import w4gen

CANDIDATES = ("int2_g64", "int3_g64", "int4_g128", "nf4_g64", "int4_g32", "int6_g64", "int8_g128")


@dataclass(frozen=True, slots=True)
class Choice:
    """A layer in a format: what it takes, and how much of the model's weights it loses."""

    format: str
    bytes: int
    error: float


def model() -> torch.nn.Module:
    """Layers of several shapes. In some a few inputs have weights ten times as large, which costs a format much."""
    torch.manual_seed(0)
    sizes = {"q_proj": (256, 256), "k_proj": (256, 64), "v_proj": (256, 64), "up_proj": (256, 704), "down_proj": (704, 256)}
    blocks = [torch.nn.ModuleDict({name: torch.nn.Linear(*size, bias=False) for name, size in sizes.items()}) for _ in range(4)]
    for block in blocks[1:]:
        with torch.no_grad():
            block["down_proj"].weight[:, ::50] *= 10
    return torch.nn.ModuleDict({"layers": torch.nn.ModuleList(blocks)})


def choices(weight: torch.Tensor, size: float) -> list[Choice]:
    """A layer in every candidate, by bytes; those that take more bytes and lose more than another are left out."""
    found: list[Choice] = []
    for form in CANDIDATES:
        stored = w4gen.Weight.from_float(weight, form)
        found.append(Choice(form, stored.nbytes, float((stored.dequantize() - weight).square().sum()) / size))
    found.sort(key=lambda each: (each.bytes, each.error))
    return [each for at, each in enumerate(found) if all(each.error < before.error for before in found[:at])]


def chosen(layers: dict[str, list[Choice]], budget: int) -> dict[str, Choice]:
    """The format of each layer: the steepest step first, while there is room for it."""
    picked = dict.fromkeys(layers, 0)
    left = budget - sum(each[0].bytes for each in layers.values())
    while True:
        steps = [
            ((layers[name][at].error - better.error) / (better.bytes - layers[name][at].bytes), name, further)
            for name, at in picked.items()
            for further, better in enumerate(layers[name])
            if further > at and better.bytes - layers[name][at].bytes <= left
        ]
        if not steps:
            return {name: layers[name][at] for name, at in picked.items()}
        _, name, further = max(steps)
        left -= layers[name][further].bytes - layers[name][picked[name]].bytes
        picked[name] = further


def spend(layers: dict[str, list[Choice]], budget: int) -> None:
    """Convert a model under a budget, and tell what it takes beside the same format everywhere."""
    picked = chosen(layers, budget)
    for name, each in picked.items():
        print(f"{name:22} {each.format:10} {each.bytes:8,} bytes")
    report = w4gen.convert(model(), {name: each.format for name, each in picked.items()}, progress=False)
    error = math.sqrt(sum(each.error for each in picked.values()))
    print(f"mixed: {report.bytes_after:,} of {budget:,} bytes, error {error:.4f}")
    for form in CANDIDATES:
        same = [each for layer in layers.values() for each in layer if each.format == form]
        taken = sum(each.bytes for each in same)
        if len(same) == len(layers) and taken <= budget:
            print(f"{form} everywhere: {taken:,} bytes, error {math.sqrt(sum(each.error for each in same)):.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=float, nargs="+", default=[4.25], help="budgets, in bits a weight")
    options = parser.parse_args()
    linear = {name: module.weight.detach() for name, module in model().named_modules() if isinstance(module, torch.nn.Linear)}
    size = sum(float(each.square().sum()) for each in linear.values())
    layers = {name: choices(weight, size) for name, weight in linear.items()}
    for bits in options.bits:
        spend(layers, int(bits * sum(map(torch.Tensor.numel, linear.values())) / 8))


if __name__ == "__main__":
    main()
