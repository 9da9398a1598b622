"""A linear layer of PyTorch becomes one with 4-bit weights, on a CPU or on a GPU; then a kernel for a GPU you need not have.

python examples/01_first_linear.py
"""

from __future__ import annotations

import torch

import w4gen

INPUTS, OUTPUTS = 1536, 256


def compare(linear: torch.nn.Linear, x: torch.Tensor, format: str) -> None:
    """Quantize `linear`, call both layers with `x`, print the error and the bytes."""
    layer = w4gen.Linear.from_float(linear, format)
    expected, got = linear(x).float(), layer(x).float()
    error = ((got - expected).norm() / expected.norm()).item()
    before, after = linear.weight.nbytes, layer.weight.nbytes
    print(f"  {format:10} error {error:.1%}, weight {before:,} -> {after:,} bytes ({before / after:.2f} times smaller)")


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    linear = torch.nn.Linear(INPUTS, OUTPUTS, dtype=torch.float16, device=device)
    torch.nn.init.normal_(linear.weight, std=0.02)  # trained weights are close to normal, fresh ones are uniform
    x = torch.randn(1, INPUTS, dtype=torch.float16, device=device)
    print(f"one token through {linear} on {device}: error against the float16 layer")
    with torch.no_grad():
        for format in ("int4_g128", "nf4_g64"):
            compare(linear, x, format)

    # The shape is tokens x inputs x outputs. Rendering a kernel needs no GPU, so any arch can be named.
    kernel = w4gen.compile(f"1x{INPUTS}x{OUTPUTS}", "int4_g128", arch="sm_90")
    print(f"\nschedule for sm_90: {kernel.schedule}\n")
    print("\n".join(kernel.source.splitlines()[:30]))


if __name__ == "__main__":
    main()
