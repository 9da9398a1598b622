"""`python -m w4gen.bench.end_to_end`: whole decoders of Transformers, bf16 against w4gen in one run, as JSON.

Random weights in a known architecture; a prompt of 512 tokens and up to 128 new ones over a static cache; each eager, in one
CUDA graph, and compiled by Inductor in one CUDA graph. Every measurement has a time of its own, and what is known is written
after each. Logits are compared with those of the same model without kernels.
"""

from __future__ import annotations

import copy
import gc
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from w4gen.bench.decoder import Decoder, built, without_kernels
from w4gen.bench.facts import facts, reason
from w4gen.bench.floors import floor
from w4gen.bench.limits import LATE, bounded, ended, share
from w4gen.bench.replay import captured, kernels
from w4gen.bench.results import write
from w4gen.layers import PRESETS
from w4gen.merging import merge
from w4gen.models import Report, convert
from w4gen.runtime.launch import arch_of
from w4gen.runtime.linear import Linear
from w4gen.runtime.warmup import warmup

KINDS = ("graph", "eager", "prefill", "logits", "batch", "floor", "compiled")
PLAIN, HOW = "bf16", {"merged": False, "gated": True}
TINY = {
    "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 256, "tie_word_embeddings": True,
}  # fmt: skip
MODELS = {"tiny": TINY} | {name.lower(): about for name, about in PRESETS.items()}


@dataclass(frozen=True, slots=True)
class Run:
    """What is measured, and where it is written: `results` is what the file holds."""

    out: Path
    prompt: int
    new: int
    device: torch.device
    ends: float
    only: tuple[str, ...] = ()
    results: dict[str, Any] = field(default_factory=dict)

    def take(self, name: str, kind: str, seconds: float, measure: Callable[[], dict[str, Any]]) -> None:
        """Note what `measure` gives within `seconds`, or why it gave nothing, and write all that is known, also before."""
        if self.only and kind.split()[0] not in self.only:
            return
        start, into = time.perf_counter(), self.results["variants"].setdefault(name, {})
        into[kind] = {"failed": "the process ended within it"}
        write(self.out, self.results)
        try:
            with bounded(min(seconds, self.left())):
                into[kind] = measure()
        except Exception as error:  # noqa: BLE001  whatever one measurement ends with, the others are to be had
            into[kind] = {"failed": reason(error)}
        into[kind]["took_s"] = round(time.perf_counter() - start, 2)
        click.echo(f"{name} {kind}: {into[kind]}")
        write(self.out, self.results)

    def left(self) -> float:
        """Seconds that are left."""
        return self.ends - time.time()

    def wait(self) -> None:
        """Wait for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def spoken(run: Run, decoder: Decoder, step: Callable[[], object], seconds: float = 5.0) -> dict[str, Any]:
    """Tokens per second of a step, over as many new tokens as `seconds` allow, and the microseconds of one."""
    best, count = [], 4
    for turn in range(4):  # the first tells how long a token takes
        decoder.again()
        run.wait()
        start = time.perf_counter()
        for _ in range(count):
            step()
        run.wait()
        best.append((time.perf_counter() - start) / count)
        count = count if turn else max(4, min(run.new - 4, int(seconds / 3 / best[0])))
    each = statistics.median(best[1:])
    return {"tokens_s": round(decoder.token.shape[0] / each, 2), "token_us": round(each * 1e6, 2), "new_tokens": count}


def linears_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Its linear layers as they are launched, the head too, converted or not."""
    found = [each for each in model.modules() if isinstance(each, torch.nn.Linear | Linear)]
    return list(dict.fromkeys(each.launched if isinstance(each, Linear) else each for each in found))


def stored(layer: torch.nn.Module) -> int:
    """Bytes of a layer's weight."""
    return layer.weight.nbytes  # type: ignore[union-attr, return-value]


def floors(run: Run, model: torch.nn.Module) -> dict[str, Any]:
    """The least time in which a step reads the weights of its linear layers: the fastest kernels that only read, one for each."""
    sizes = Counter((stored(each), isinstance(each, Linear)) for each in linears_of(model))
    early = "dependent_launch" in arch_of(run.device).features
    us = sum(count * floor(nbytes, run.device, ours and early).us for (nbytes, ours), count in sizes.items())
    return {"floor_us": round(us, 2), "linear_bytes": sum(nbytes * count for (nbytes, _), count in sizes.items())}


def memory(model: torch.nn.Module) -> int:
    """Bytes of all that a model holds, once each."""
    held = [*model.parameters(), *model.buffers()]
    return sum({each.data_ptr(): each.nbytes for each in held}.values())


def converted(run: Run, models: dict[str, torch.nn.Module], form: str) -> dict[str, Any]:
    """A copy of the plain model in a format, put with `models`, and its memory: its own, that of a file of it, and the peak.

    With `+merged` after the format, layers that read the same x are launched as one; with `+gated`, their activation too.
    """
    model, on_gpu = copy.deepcopy(models[PLAIN]), run.device.type == "cuda"
    before, largest = memory(model), max(map(stored, linears_of(model)))
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    name, _, how = form.partition("+")
    done: Report = convert(model, name, progress=False)
    groups = merge(model, HOW[how]).merged if how else ()
    peak = torch.cuda.max_memory_allocated() - held if on_gpu else 0
    rest = before - done.bytes_before
    models[form] = model
    return {
        "plain_bytes": before,
        "bytes": memory(model),
        "stored_bytes": rest + done.bytes_after,
        "peak_more_bytes": peak,
        "largest_layer_bytes": largest,
        "layers": len(done.converted),
        "merged": len(groups),
        "skipped": [f"{each.name}: {each.reason}" for each in done.skipped],
    }


def warmed(models: Iterable[torch.nn.Module], rows: Iterable[int]) -> dict[str, Any]:
    """The kernels that models need for so many rows, compiled."""
    told = warmup(torch.nn.ModuleList(models), rows, progress=False)
    return {"kernels": told.compiled, "found": told.found}


def compared(run: Run, model: torch.nn.Module) -> dict[str, Any]:
    """Relative errors of logits, after the prompt and one token later, to the same model's without kernels."""
    ours, theirs = (Decoder.started(each, 1, run.prompt, 2) for each in (model, without_kernels(model)))
    theirs.token.copy_(ours.token)
    pairs = {"prompt": (ours.prefill(), theirs.prefill())}
    theirs.token.copy_(ours.token)
    pairs["token"] = ours.step(), theirs.step()
    found: dict[str, Any] = {}
    for name, (y, expected) in pairs.items():
        found[f"{name}_error"] = float((y.double() - expected.double()).norm() / expected.double().norm())
        found[f"{name}_same_choice"] = bool((y.argmax(-1) == expected.argmax(-1)).all())
    return found


def prefilled(run: Run, decoder: Decoder) -> dict[str, Any]:
    """Milliseconds to read the prompt, in one CUDA graph, with its kernels' time."""
    replay, times = captured(decoder.prefill), []
    for _ in range(6):
        run.wait()
        start = time.perf_counter()
        replay()
        run.wait()
        times.append((time.perf_counter() - start) * 1e3)
    return {"ms": round(statistics.median(times[1:]), 3), "tokens": decoder.prompt.shape[1]} | kernels(replay)


def profiled(decoder: Decoder, replay: Callable[[], object]) -> dict[str, Any]:
    """Kernel time of a step that follows the prompt."""
    decoder.again()
    return kernels(replay)


def graphed(run: Run, decoder: Decoder) -> dict[str, Any]:
    """A step in one CUDA graph, with its kernels' time."""
    decoder.again()
    replay = captured(decoder.step)
    return spoken(run, decoder, replay) | profiled(decoder, replay)


def compiled(run: Run, decoder: Decoder, mode: str) -> dict[str, Any]:
    """A step that Inductor compiled, in one CUDA graph. The model is compiled whole, so that norms join across its layers.

    Raises `RuntimeError` where it breaks into several graphs, or would be compiled again at a later token.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    start, options = time.perf_counter(), {} if mode == "default" else {"mode": mode}
    step = decoder.by(torch.compile(decoder.model, dynamic=False, fullgraph=True, **options)).step
    decoder.again()
    step()
    seconds = time.perf_counter() - start
    replay = captured(step)
    with torch.compiler.set_stance("fail_on_recompile"):
        found = spoken(run, decoder, replay) | profiled(decoder, replay)
    return found | {
        "mode": mode,
        "compile_s": round(seconds, 1),
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
    }


def batched(run: Run, model: torch.nn.Module, batch: int) -> dict[str, Any]:
    """Steps of several answers at once, in one CUDA graph."""
    gc.collect()
    return graphed(run, Decoder.started(model, batch, run.prompt, run.new))


def measured(run: Run, models: dict[str, torch.nn.Module], batches: tuple[int, ...], mode: str) -> None:
    """All measurements, those that take longest last."""
    decoders = {name: Decoder.started(model, 1, run.prompt, run.new) for name, model in models.items()}
    for name, decoder in decoders.items():
        run.take(name, "graph", 20, partial(graphed, run, decoder))
    for name, decoder in decoders.items():
        run.take(name, "eager", 15, partial(spoken, run, decoder, decoder.step, 2.5))
        run.take(name, "prefill", 15, partial(prefilled, run, decoder))
    for name, model in models.items():
        if name != PLAIN:
            run.take(name, "logits", 30, partial(compared, run, model))
    for name, model in models.items() if run.device.type == "cuda" else ():
        run.take(name, "floor", 30, partial(floors, run, model))
    for place, (name, decoder) in enumerate(decoders.items() if mode else ()):
        run.take(name, "compiled", share(run.left(), len(decoders) - place - 1), partial(compiled, run, decoder, mode))
    for batch, (name, model) in itertools.product(batches, models.items()):
        run.take(name, f"batch {batch}", 20, partial(batched, run, model, batch))


@click.command()
@click.option("--model", "name", type=click.Choice(sorted(MODELS)), default="qwen2.5-1.5b", show_default=True)
@click.option("--format", "forms", multiple=True, default=("int4_g128", "nf4_g64", "int4_g128+merged"), show_default=True)
@click.option("--prompt", default=512, show_default=True, help="tokens of the prompt")
@click.option("--new", default=128, show_default=True, help="new tokens")
@click.option("--batch", "batches", multiple=True, type=int, default=(16, 64), show_default=True, help="decoded besides 1")
@click.option("--compile", "mode", default="default", show_default=True, help="Inductor's mode; '' leaves compiling out")
@click.option("--only", multiple=True, type=click.Choice(KINDS), help="what is measured, repeatable; by default all of it")
@click.option("--budget", default=150.0, show_default=True, help="seconds that all of it may take; what is left then is left out")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="JSON file to write")
def main(
    name: str,
    forms: tuple[str, ...],
    prompt: int,
    new: int,
    batches: tuple[int, ...],
    mode: str,
    only: tuple[str, ...],
    budget: float,
    out: Path,
) -> None:
    """Measure a decoder in bf16 and in formats, on the GPU if there is one, and write what was measured."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    run = Run(out, prompt, new, device, time.time() + budget, (*only, "memory", "warmup") if only else ())
    asked = {"model": name, "prompt": prompt, "new": new, "about": MODELS[name]}
    run.results.update(facts("w4gen.bench.end_to_end") | asked | {"variants": {}})
    with torch.no_grad(), ended(budget + LATE):
        models = {PLAIN: built(MODELS[name], torch.bfloat16, device, prompt + new)}
        run.take(PLAIN, "memory", 30, lambda: {"bytes": memory(models[PLAIN])})
        for form in forms:
            run.take(form, "memory", 60, partial(converted, run, models, form))
        if device.type == "cuda":
            rows = (1, prompt, *(batches if not only or "batch" in only else ()))
            ours = [each for form, each in models.items() if form != PLAIN]
            run.take(PLAIN, "warmup", 120, partial(warmed, ours, rows))
        measured(run, models, batches, mode)


if __name__ == "__main__":
    main()
