"""`w4gen profile`: where the time of a model goes, linear layer by linear layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import w4gen
from w4gen.api import problem_of
from w4gen.bench.results import write
from w4gen.commands.question import aligned, as_json, detected, load_format, table, tell
from w4gen.errors import W4Error
from w4gen.layers import read

LEGEND = """us: one layer of the kind alone, replayed over cold copies · in model: by CUDA events in the model · host: of its call
tax: its time over nn.Linear's in 16 bits · share: of the step, all of the kind · gain: the step's, if the kind only read it"""


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--format", "format_name", default="int4_g128", show_default=True, help="int4_g128, nf4_g64 …, or FILE.py:NAME")
@click.option("--dtype", default="float16", show_default=True, help="of the model: float16 or bfloat16")
@click.option("--by", default="w4gen", show_default=True, help="who quantizes: w4gen, bitsandbytes (NF4), or none")
@click.option("--prompt", default=512, show_default=True, type=click.IntRange(min=1), help="tokens of the prompt")
@click.option("--out", type=click.Path(path_type=Path), help="JSON file to write")
@as_json
def profile(model: Path, format_name: str, dtype: str, by: str, prompt: int, out: Path | None, as_json: bool) -> None:
    """Time the linear layers of MODEL in prefill and in decode; the worst paid for being quantized first.

    MODEL is a folder with a config.json and weights in safetensors; without these, or where it is a config.json or the name of a
    known model, weights are random.
    """
    about, form = read(model), load_format(format_name)
    problem_of(m=prompt, n=1, k=1, format=form, dtype_name=dtype)  # refused before a GPU is asked for
    if detected() == "portable":
        raise W4Error(
            f"times come from GPUs only and there is none here: run w4gen profile where one is; w4gen roofline --model {model} "
            f"--arch sm_90 and w4gen curve --model {model} --arch sm_90 work out bounds and predictions from data sheets"
        )
    folder = model if any(model.glob("*.safetensors")) else None
    facts = w4gen.profile(about, form, dtype, by, prompt, folder) | {"model": str(model)}
    if out is not None:
        write(out, facts)
    if as_json:
        tell(facts)
    else:
        shown(facts, click.echo)


def shown(facts: dict[str, Any], say: Callable[[str], Any]) -> None:
    """Print what was found: both phases, what fell back, and what was left as it was."""
    say(f"weights: {facts['weights']}")
    for name, phase in facts["phases"].items():
        step, dense = phase["step_us"], phase["dense_step_us"]
        counted = f", {phase['kernels']} kernels" if phase["kernels"] else ""
        say(
            aligned(
                [(name, f"{step:,.1f} us in a CUDA graph{counted}; in {facts['dtype']} {dense:,.1f} us ({dense / step:.2f} x)")]
            )
        )
        heads = ("layer", "count", "M", "K->N", "stored", "us", "of floor", "in model", "host", "16 bits", "tax", "share", "gain")
        table(*heads, rows=map(cells, phase["layers"]))
        say("")
    say(LEGEND)
    for each in facts["measuring_errors"]:
        say(each)
    for why in facts["fallbacks"]:
        say(f"fell back: {why}")
    for each in facts["skipped"]:
        say(f"left as it was: {each}")


def cells(layer: dict[str, Any]) -> list[str]:
    """One kind of layer as a row."""
    times = [f"{layer['us']:.2f}", f"{layer['floor_us'] / layer['us']:.0%}"]
    times += [f"{layer[name]:.2f}" for name in ("event_us", "host_us", "dense_us")]
    return [
        layer["name"], str(layer["count"]), str(layer["m"]), f"{layer['k']}->{layer['n']}", layer["stored"], *times,
        f"{layer['tax']:.2f}", f"{layer['share']:.1%}", f"{layer['gain']:.3f} x",
    ]  # fmt: skip
