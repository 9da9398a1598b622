"""`w4gen compile`: one linear layer to a kernel, checked."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from w4gen import cache, toolchain
from w4gen.codegen.render import Kernel
from w4gen.commands.bundle import bundled
from w4gen.commands.question import (
    aligned,
    answer,
    as_json,
    asked,
    because,
    count,
    detected,
    formula,
    picked,
    question,
    tell,
    trial,
)
from w4gen.errors import W4Error
from w4gen.proof import TWIN, checked, without_gpu
from w4gen.schedule import arch as arches
from w4gen.schedule.cost import bytes_moved, floor_us

KINDS = ("py", "ptx", "sass", "cubin", "amdgcn", "hsaco")


@click.command("compile")
@question
@trial
@as_json
@click.option(
    "--model", type=click.Path(path_type=Path), help="config.json or a preset: compile all linear layers of a model into a bundle"
)
@click.option("--tp", help="with --model: shards of tensor parallelism, one or several, as in 1,2,4")
@click.option("--merged", is_flag=True, help="with --model: also what w4gen.merge launches as one, gated or not")
@click.option("--emit", default="", help=f"comma-separated, printed or with --out written: {', '.join(KINDS)}")
@click.option("--out", type=click.Path(path_type=Path), help="folder for what --emit names; with --model the bundle, FILE.w4g")
@click.option(
    "--check/--no-check", default=True, show_default=True, help="run the text against the truth, on the GPU here or interpreted"
)
def compile_command(
    as_json: bool,
    emit: str,
    out: Path | None,
    check: bool,
    schedule: str,
    templates: Path | None,
    model: Path | None,
    tp: str | None,
    merged: bool,
    **options: Any,
) -> None:
    """Compile one linear layer to a kernel, or those of a model to a bundle; no GPU is needed."""
    kinds = [kind for kind in emit.split(",") if kind]
    if unknown := set(kinds) - set(KINDS):
        raise W4Error(f"--emit {sorted(unknown)[0]!r} is not one of {', '.join(KINDS)}")
    if model is not None:
        if schedule or templates is not None:
            raise W4Error("--schedule and --templates change one kernel, not those of a model: give them with --shape")
        return bundled(model, tp or "1", kinds, out, as_json, merged, **options)
    if tp or merged:
        raise W4Error("--tp shares out the layers of a model, --merged puts some together: give --model config.json with them")
    binaries = sorted({"cubin", "hsaco"} & set(kinds))
    if binaries and out is None:
        raise W4Error(f"--emit {binaries[0]} is binary: give --out FOLDER to write it to")
    if (kinds and as_json) or (out is not None and not kinds):
        raise W4Error("--emit writes texts and --json prints facts: give one of them, and --out only with --emit")
    problem, arch, rows = asked(**options)
    start = time.perf_counter()
    kernel = answer(problem, arch, schedule, templates)
    built = toolchain.build(kernel, arch)
    seconds = time.perf_counter() - start
    if kinds:
        return emitted(kernel, built, kinds, out)
    facts = facts_of(kernel, arch, built, seconds, rows)
    facts["chosen"] = f"{picked(problem, arch)[1]}{f', changed by {schedule}' if schedule else ''}"
    passed = True
    if check:
        passed, facts["proof"] = proof(kernel)
    if as_json:
        tell(facts)
    else:
        click.echo(told(facts, kernel))
    if not passed:
        raise SystemExit(1)
    return None


def emitted(kernel: Kernel, built: dict[str, toolchain.Binary], kinds: list[str], out: Path | None) -> None:
    """Print or write what was asked for: one text, and of everything else one for each function."""
    texts = [(f"{kernel.name}.py", kernel.source.encode())] if "py" in kinds else []
    texts += [(f"{name}.{kind}", binary.data(kind)) for kind in kinds if kind != "py" for name, binary in built.items()]
    for name, data in texts:
        if out is None:
            click.echo(data.decode(), nl=False)
            continue
        out.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(data)
        click.echo(f"wrote {out / name}")


def facts_of(kernel: Kernel, arch: arches.Arch, built: dict[str, toolchain.Binary], seconds: float, rows: int) -> dict[str, Any]:
    """Everything that `compile` tells, by name; units are in the names."""
    problem = kernel.problem
    stored = kernel.program.tile("codes.stored").layout
    padding = stored.padding(n=problem.n, k=problem.k) if stored is not None else 0.0
    return {
        "m": list(problem.m),
        "rows": rows,
        "n": problem.n,
        "k": problem.k,
        "format": problem.format.label,
        "x": problem.x.name,
        "arch": arch.name,
        "board": arch.board,
        "target": f"sm_{arch.target}" if arch.backend == "cuda" else str(arch.target),
        "schedule": str(kernel.schedule),
        "kernel": str(cache.text_path(kernel)),
        "functions": list(built),
        "registers": max(binary.registers for binary in built.values()),
        "spills": sum(binary.spills for binary in built.values()),
        "shared_bytes": max(binary.shared_bytes for binary in built.values()),
        "bytes_moved": sum(bytes_moved(kernel.program, rows).values()),
        "padding": round(padding, 4),
        "floor_us": round(floor_us(kernel.program, arch, rows), 3),
        "seconds": round(seconds, 3),
        "cached": all(binary.cached for binary in built.values()),
    }


def told(facts: dict[str, Any], kernel: Kernel) -> str:
    """The facts in words."""
    rows, schedule, problem = facts["rows"], kernel.schedule, kernel.problem
    programs = kernel.programs(kernel.pieces[0], rows)
    each = schedule.split_k if schedule.sum_at == "shared" else 1  # of a cluster
    grid = (
        f"{count(each * programs[0] * programs[1] * programs[2], 'program')} of {count(schedule.warps * schedule.teams, 'warp')}"
    )
    through = {"left": "from the registers that it is decoded in", "right": "through shared memory"}
    units = {
        "lanes": "multiplied on multiply-add lanes",
        "halves": "multiplied on lanes in pairs of halves",
        "mma": f"multiplied on matrix cores, w as the {schedule.side} operand, {through[schedule.side]}",
        "vendor": "dequantized to memory, then the vendor's matmul",
    }
    n_and_k = count(schedule.block_n, "output"), f"{schedule.block_k} k"
    tile = f"each {' by '.join(reversed(n_and_k) if problem.gradient else n_and_k)} at a time"
    meet = "in the shared memory of a cluster" if schedule.sum_at == "shared" else "by a second function"
    split = f", k shared by {schedule.split_k} programs and added up {meet}" if schedule.split_k > 1 else ""
    scales = "each weight is scaled" if schedule.scale_at == "weight" else "sums of products are scaled, not weights"
    zero = "; so is the zero point" if schedule.zero_at == "accumulator" else ""
    cached = ", found in the cache" if facts["cached"] else ""
    lines = [
        ("asked", formula(problem, rows)),
        ("format", f"{facts['format']}, x and y in {facts['x']}, sums in {problem.accumulate}"),
        ("kernel", facts["kernel"]),
        ("schedule", f"{grid}, {tile}, {units[schedule.unit]}{split}"),
        ("why", f"{because(facts['chosen'], problem)}: {scales}{zero}"),
        ("arch", f"{facts['arch']} ({facts['board']})"),
        ("needs", f"{facts['registers']} registers a thread, {facts['spills']} spills, {facts['shared_bytes']} bytes shared"),
        ("moves", f"{facts['bytes_moved']:,} bytes a call ({facts['padding']:.1%} of the codes are padding)"),
        (
            "floor",
            f"{facts['floor_us']:.2f} us on {facts['board']}: these bytes at its data sheet's bandwidth, not a measurement",
        ),
        ("compiled", f"for {facts['target']} in {facts['seconds']:.2f} s{cached}"),
    ]
    if (said := facts.get("proof", "")).startswith(TWIN):
        return aligned([*lines, *zip(("proof", ""), said.split(" · "), strict=True)])
    lines.append(("proof", f"this text: {said or 'not checked (--no-check)'}"))
    if " on " not in said.split(":")[0]:
        lines.append(("", f"this binary for {facts['target']}: compiled, not run"))
    return aligned(lines)


def proof(kernel: Kernel) -> tuple[bool, str]:
    """Run the text against the f64 truth: on the GPU here, else in Triton's interpreter, as far as that runs it."""
    done = without_gpu(kernel) if detected() == "portable" else checked(kernel)
    told = (done.stdout or done.stderr).strip()
    return done.returncode == 0, told.splitlines()[-1] if told else "the check said nothing"
