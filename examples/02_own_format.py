"""A format of your own is one line: `e2m1`, the 4-bit float (2 exponent bits, 1 mantissa bit), with a scale for each 32 weights.

python examples/02_own_format.py

The command line takes the format from this file, compiles a kernel for it and checks that kernel:

w4gen compile --format examples/02_own_format.py:e2m1 --shape 1x1536x256
"""

from __future__ import annotations

import w4gen

e2m1 = w4gen.Format("e2m1", bits=4, codebook=(0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6), group=32)


def main() -> None:
    # Imported here, so that `w4gen compile --format FILE.py:NAME`, which runs the file, does not wait for torch.
    import torch

    torch.manual_seed(0)
    linear = torch.nn.Linear(1536, 256)
    torch.nn.init.normal_(linear.weight, std=0.02)  # trained weights are close to normal, fresh ones are uniform
    with torch.no_grad():
        for format in (e2m1, "int4_g32"):
            layer = w4gen.Linear.from_float(linear, format)
            weight = layer.weight.dequantize()
            error = ((weight - linear.weight).norm() / linear.weight.norm()).item()
            print(f"{layer.format.label:9} error of the weight {error:.1%}, {layer.weight.nbytes:,} bytes")

    kernel = w4gen.compile("1x1536x256", e2m1, arch="sm_90")
    print(f"\nkernel for sm_90: {kernel.schedule}")
    text = str(e2m1)
    print(f"\nstr(format): {text}")
    print(f"w4gen.Format.parse gives the same format back: {w4gen.Format.parse(text) == e2m1}")


if __name__ == "__main__":
    main()
