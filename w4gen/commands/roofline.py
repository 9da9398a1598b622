"""`w4gen roofline`: the ceilings of a machine, and how fast a model can answer under them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

import w4gen
from w4gen.bench.ceilings import GIGA, Ceiling, Model, ceiling, kind_of, measured
from w4gen.bench.results import write
from w4gen.commands.question import aligned, as_json, detected, load_format, table, tell
from w4gen.errors import ArchError, W4Error
from w4gen.ir.types import DType, Format
from w4gen.layers import PRESETS, read
from w4gen.schedule.arch import arch as arch_of

FORMATS = ("bf16", "fp8_e4m3", "int4_g128", "nf4_g64", "mxfp4")

LEGEND = """tok/s: the bandwidth over weights and KV cache, at batch 1; moved is the bound
all: every weight at the format's nominal bits, without scales · KV too: the KV cache at those bits as well
moved: what a step reads: linear layers with their scales; head, norms, biases and one row of the embedding in 16 bits"""

DECODED = "decoded: the linear layers decoded once, at the rate measured with codes in L1, if nothing else took time"


@click.command()
@click.option("--model", type=click.Path(path_type=Path), help=f"config.json, or one of {', '.join(PRESETS)}")
@click.option("--format", "names", multiple=True, default=FORMATS, show_default=True, help="bf16, int4_g128 …; may be repeated")
@click.option("--measure", is_flag=True, help="measure the GPU here: memory, L2, matmul, decoding, launches; about a minute")
@click.option("--machine", type=click.Path(path_type=Path), help="take what --measure --out FILE wrote, here or elsewhere")
@click.option("--bandwidth", type=float, help="GB/s (1e9 bytes) that the memory is assumed to give")
@click.option("--arch", "arch_name", default="", help="take the bandwidth of an arch's data sheet, as in sm_90")
@click.option("--kv", default=0, show_default=True, type=click.IntRange(min=0), help="tokens of KV cache that a step reads")
@click.option("--out", type=click.Path(path_type=Path), help="with --measure: JSON file to write")
@as_json
def roofline(
    model: Path | None,
    names: tuple[str, ...],
    measure: bool,
    machine: Path | None,
    bandwidth: float | None,
    arch_name: str,
    kv: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure a GPU's ceilings, and bound a model's tokens per second at batch 1 by format; for the bounds no GPU is needed."""
    one_machine(measure, machine, bandwidth, arch_name)
    if out is not None and not measure:
        raise W4Error(f"--out {out} is for what --measure finds: add --measure on a GPU, or print bounds as JSON by --json")
    if model is None and not measure:
        raise W4Error(f"bounds are those of a model: name one by --model, config.json or one of {', '.join(PRESETS)}")
    of = Model.of(read(model)) if model else None  # refused before a minute is spent
    kinds = [kind_of(load_format(name)) for name in names]
    ceilings = taken(out, as_json) if measure else told_before(machine) if machine else None
    if of is None:
        return tell(ceilings) if as_json else None
    bandwidth_gbs, source = assumed(bandwidth, arch_name, ceilings)
    found = [ceiling(of, kind, bandwidth_gbs, kv, decode_rate(kind, ceilings)) for kind in kinds]
    if as_json:
        facts = {"model": str(model), "parameters": of.parameters, "bandwidth_gbs": bandwidth_gbs, "source": source}
        return tell({**facts, "kv_tokens": kv, "kv_gb": of.kv_bytes(kv) / GIGA, "ceilings": [asdict(each) for each in found]})
    head = "tied to the embedding" if of.sizes.tied else "apart from the embedding"
    lines = [
        ("model", f"{model}: {of.parameters:,} weights, head {head}"),
        ("bandwidth", f"{bandwidth_gbs:g} GB/s: {source}"),
        ("KV cache", f"{of.kv_bytes(kv) / GIGA:.4f} GB: {kv:,} tokens in 16 bits"),
    ]
    click.echo(aligned(lines) + "\n")
    decoded = ["decoded tok/s"] * (ceilings is not None)
    heads = ["format", "all GB", "all tok/s", "all tok/s, KV too", "moved GB", "moved tok/s", *decoded]
    table(*heads, rows=(cells(each)[: len(heads)] for each in found))
    click.echo(f"\n{LEGEND}" + f"\n{DECODED}" * bool(decoded))
    return None


def one_machine(measure: bool, machine: Path | None, bandwidth: float | None, arch_name: str) -> None:
    """Raise `W4Error` where the options name no machine, or two."""
    named = {"--measure": measure, "--machine": machine, "--bandwidth": bandwidth is not None, "--arch": arch_name}
    given = [option for option, value in named.items() if value]
    if not given:
        raise ArchError(
            "a ceiling is a machine's: measure the GPU here by --measure, take one that was measured by --machine FILE, assume a "
            "machine by --bandwidth 323.9 (GB/s), or take a data sheet's bandwidth by --arch sm_90"
        )
    if len(given) > 1:
        raise W4Error(f"{' and '.join(given)} each say which machine: give one of the two")
    if bandwidth is not None and not 0 < bandwidth < float("inf"):
        raise W4Error(f"--bandwidth {bandwidth:g} is no speed: give GB/s, as in 323.9")


def taken(out: Path | None, quiet: bool) -> dict[str, Any]:
    """The ceilings of the GPU here, measured now, and written to `out`. Raises `W4Error` where there is none."""
    if detected() == "portable":
        raise W4Error(
            "ceilings are measured on a GPU and there is none here: take a data sheet's by --arch sm_90, or a file by --machine"
        )
    facts = w4gen.roofline(lambda each: None if quiet else click.echo(f"{each.name:>28} {each.value:10,.2f} {each.unit}"))
    if out is not None:
        write(out, facts)
    return facts


def told_before(path: Path) -> dict[str, Any]:
    """The ceilings in a file. Raises `W4Error` where it holds none."""
    try:
        facts = json.loads(path.read_text())
        if measured(facts, "read"):
            return dict(facts)
    except OSError as error:
        raise W4Error(
            f"{path} cannot be read ({error.strerror}): give a file that w4gen roofline --measure --out wrote"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise W4Error(f"{path} holds no ceilings: give a file that w4gen roofline --measure --out wrote") from error
    raise W4Error(f"{path} has no bandwidth of reading: measure again by w4gen roofline --measure --out {path}")


def assumed(bandwidth: float | None, arch_name: str, ceilings: dict[str, Any] | None) -> tuple[float, str]:
    """The bandwidth of the machine that is named, in GB/s, and where it is from."""
    if ceilings is not None:
        return measured(ceilings, "read") or 0.0, f"reading, measured on {ceilings['device']}, {ceilings['date']}"
    if bandwidth is not None:
        return bandwidth, "assumed by --bandwidth, not a measurement"
    arch = arch_of(arch_name)
    return arch.bandwidth_gbs, f"the data sheet of {arch.board}, not a measurement"


def decode_rate(kind: DType | Format, ceilings: dict[str, Any] | None) -> float | None:
    """Weights of a format decoded a second, in 1e9, to f16, where that was measured."""
    return measured(ceilings, "decode", kind.label) if ceilings and isinstance(kind, Format) else None


def cells(each: Ceiling) -> list[str]:
    """One row of the table."""
    rates = (each.all_tokens_s, each.all_kv_too_tokens_s)
    return [each.format, f"{each.all_gb:.3f}", *(f"{rate:.1f}" for rate in rates), f"{each.moved_gb:.3f}",
            f"{each.moved_tokens_s:.1f}", f"{each.decoded_tokens_s:.0f}" if each.decoded_tokens_s else ""]  # fmt: skip
