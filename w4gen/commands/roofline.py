"""`w4gen roofline`: how fast a model can answer, by the bytes that a token reads."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from w4gen.bench.ceilings import GIGA, Ceiling, Model, ceiling, kind_of
from w4gen.commands.question import aligned, as_json, load_format, table, tell
from w4gen.errors import ArchError, W4Error
from w4gen.layers import PRESETS, read
from w4gen.schedule.arch import arch as arch_of

FORMATS = ("bf16", "fp8_e4m3", "int4_g128", "nf4_g64", "mxfp4")

LEGEND = """tok/s: the bandwidth over weights and KV cache, at batch 1; moved is the bound
all: every weight at the format's nominal bits, without scales · KV too: the KV cache at those bits as well
moved: what a step reads: linear layers with their scales; head, norms, biases and one row of the embedding in 16 bits"""


@click.command()
@click.option("--model", required=True, type=click.Path(path_type=Path), help=f"config.json, or one of {', '.join(PRESETS)}")
@click.option("--format", "names", multiple=True, default=FORMATS, show_default=True, help="bf16, int4_g128 …; may be repeated")
@click.option("--bandwidth", type=float, help="GB/s (1e9 bytes) that the memory is assumed to give")
@click.option("--arch", "arch_name", default="", help="take the bandwidth of an arch's data sheet, as in sm_90")
@click.option("--kv", default=0, show_default=True, type=click.IntRange(min=0), help="tokens of KV cache that a step reads")
@as_json
def roofline(model: Path, names: tuple[str, ...], bandwidth: float | None, arch_name: str, kv: int, as_json: bool) -> None:
    """Bound a model's tokens per second at batch 1, by format; no GPU is needed."""
    bandwidth_gbs, source = assumed(bandwidth, arch_name)
    of = Model.of(read(model))
    found = [ceiling(of, kind_of(load_format(name)), bandwidth_gbs, kv) for name in names]
    if as_json:
        facts = {"model": str(model), "parameters": of.parameters, "bandwidth_gbs": bandwidth_gbs, "source": source}
        tell({**facts, "kv_tokens": kv, "kv_gb": of.kv_bytes(kv) / GIGA, "ceilings": [asdict(each) for each in found]})
        return
    head = "tied to the embedding" if of.sizes.tied else "apart from the embedding"
    lines = [
        ("model", f"{model}: {of.parameters:,} weights, head {head}"),
        ("bandwidth", f"{bandwidth_gbs:g} GB/s: {source}, not a measurement"),
        ("KV cache", f"{of.kv_bytes(kv) / GIGA:.4f} GB: {kv:,} tokens in 16 bits"),
    ]
    click.echo(aligned(lines) + "\n")
    table("format", "all GB", "all tok/s", "all tok/s, KV too", "moved GB", "moved tok/s", rows=map(cells, found))
    click.echo(f"\n{LEGEND}")


def assumed(bandwidth: float | None, arch_name: str) -> tuple[float, str]:
    """The bandwidth that the options name, in GB/s, and where it is from. Raises `W4Error` where they name none, or two."""
    if bandwidth is not None and arch_name:
        raise W4Error("--bandwidth and --arch both say how fast the memory is: give one of the two")
    if bandwidth is not None:
        if not 0 < bandwidth < float("inf"):
            raise W4Error(f"--bandwidth {bandwidth:g} is no speed: give GB/s, as in 323.9")
        return bandwidth, "assumed by --bandwidth"
    if not arch_name:
        raise ArchError(
            "ceilings measured on a machine need its GPU, and w4gen measures none yet: assume a machine by --bandwidth 323.9 "
            "(GB/s), or take a data sheet's bandwidth by --arch sm_90"
        )
    arch = arch_of(arch_name)
    return arch.bandwidth_gbs, f"the data sheet of {arch.board}"


def cells(each: Ceiling) -> list[str]:
    """One row of the table."""
    rates = (each.all_tokens_s, each.all_kv_too_tokens_s)
    return [each.format, f"{each.all_gb:.3f}", *(f"{rate:.1f}" for rate in rates), f"{each.moved_gb:.3f}",
            f"{each.moved_tokens_s:.1f}"]  # fmt: skip
