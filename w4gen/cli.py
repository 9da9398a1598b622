"""The command line: `w4gen compile`, `show`, `doctor`."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import w4gen
from w4gen import api, cache, knobs, pipeline, toolchain
from w4gen.codegen.render import Kernel
from w4gen.errors import ShapeError, W4Error
from w4gen.ir.lower import lower
from w4gen.ir.problem import Problem
from w4gen.ir.show import show as show_program
from w4gen.ir.types import Format
from w4gen.schedule import arch as arches
from w4gen.schedule.cost import bytes_moved, floor_us

KINDS = ("py", "ptx", "sass", "cubin", "amdgcn", "hsaco")
SHAPE_HELP = "MxKxN: tokens x inputs x outputs (1x1536x256 is one token through a 1536 -> 256 projection)"


def question(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say which kernel is meant."""
    for option in (
        click.option(
            "--arch", default="", help=f"one of {', '.join(arches.ARCHES)}; default: W4GEN_ARCH, the GPU here, else portable"
        ),
        click.option("--bias", is_flag=True, help="add a bias"),
        click.option("--dtype", default="float16", show_default=True, help="of x and y: float16 or bfloat16"),
        click.option(
            "--format", "format_name", default="int4_g128", show_default=True, help="int4_g128, nf4_g64 …, or FILE.py:NAME"
        ),
        click.option("--n", type=int, help="outputs (out_features)"),
        click.option("--k", type=int, help="inputs (in_features)"),
        click.option("--m", type=int, help="rows of x (tokens)"),
        click.option("--shape", help=SHAPE_HELP),
    ):
        command = option(command)
    return command


def asked(
    shape: str | None, m: int | None, k: int | None, n: int | None, format_name: str, dtype: str, bias: bool, arch: str
) -> tuple[Problem, arches.Arch, int]:
    """The problem, the arch and M that the options name. Raises `W4Error`."""
    if shape is not None and (m, k, n) != (None, None, None):
        raise ShapeError("--shape and --m --n --k both say the sizes: give one of the two")
    if shape is None and None in (m, k, n):
        raise ShapeError(f"no shape: give --shape {SHAPE_HELP}, or --m, --n and --k")
    sizes = api.parse_shape(shape) if shape is not None else (m, k, n)
    form = load_format(format_name)
    problem = api.problem_of(
        m=int(sizes[0] or 0), k=int(sizes[1] or 0), n=int(sizes[2] or 0), format=form, dtype_name=dtype, bias=bias
    )
    return problem, arches.arch(arch or knobs.ARCH.read() or detected()), int(sizes[0] or 0)


def detected() -> str:
    """The arch of the GPU here, asked of the driver's own tool so that torch need not be imported; else `portable`."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "portable"
    done = subprocess.run([tool, "--query-gpu=compute_cap", "--format=csv,noheader"], capture_output=True, text=True, check=False)
    major, _, minor = done.stdout.splitlines()[0].strip().partition(".") if done.returncode == 0 and done.stdout else ("", "", "")
    return arches.for_capability(int(major), int(minor)).name if major.isdigit() and minor.isdigit() else "portable"


def load_format(name: str) -> str | Format:
    """A format's name, or the `Format` called NAME in FILE.py. Raises `W4Error` where the file or the name is not there."""
    path, colon, variable = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        return name
    if not Path(path).is_file():
        raise W4Error(f"no file {path}: give --format FILE.py:NAME with a file that defines NAME = w4gen.Format(...)")
    try:
        scope = runpy.run_path(path)
    except Exception as error:  # the file is the user's: whatever it raises is one line that names it
        raise W4Error(f"{path} does not run: {type(error).__name__}: {error}") from error
    found = scope.get(variable)
    if not isinstance(found, Format):
        known = [key for key, value in scope.items() if isinstance(value, Format)]
        raise W4Error(f"{path} defines no Format called {variable}: it defines {', '.join(known) or 'none'}")
    return found


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(w4gen.__version__)
def cli() -> None:
    """Generate Triton kernels for linear layers with low-bit weights."""


@cli.command("compile")
@question
@click.option("--json", "as_json", is_flag=True, help="print facts as JSON")
@click.option("--emit", default="", help=f"comma-separated, printed or with --out written: {', '.join(KINDS)}")
@click.option("--out", type=click.Path(path_type=Path), help="folder for what --emit names")
@click.option(
    "--check/--no-check", default=True, show_default=True, help="run the text against the truth, on the GPU here or interpreted"
)
def compile_command(as_json: bool, emit: str, out: Path | None, check: bool, **options: Any) -> None:
    """Compile one linear layer to a kernel; no GPU is needed."""
    kinds = [kind for kind in emit.split(",") if kind]
    if unknown := set(kinds) - set(KINDS):
        raise W4Error(f"--emit {sorted(unknown)[0]!r} is not one of {', '.join(KINDS)}")
    binaries = sorted({"cubin", "hsaco"} & set(kinds))
    if binaries and out is None:
        raise W4Error(f"--emit {binaries[0]} is binary: give --out FOLDER to write it to")
    if (kinds and as_json) or (out is not None and not kinds):
        raise W4Error("--emit writes texts and --json prints facts: give one of them, and --out only with --emit")
    problem, arch, rows = asked(**options)
    start = time.perf_counter()
    kernel = pipeline.compile(problem, arch)
    binaries = toolchain.build(kernel, arch)
    seconds = time.perf_counter() - start
    if kinds:
        emitted(kernel, binaries, kinds, out)
        return
    facts = facts_of(kernel, arch, binaries, seconds, rows)
    if check:
        facts["proof"] = proof(kernel)
    click.echo(json.dumps(facts, indent=1) if as_json else told(facts, kernel))
    if check and not facts["proof"].startswith("checked"):
        raise SystemExit(1)


def emitted(kernel: Kernel, binaries: dict[str, toolchain.Binary], kinds: list[str], out: Path | None) -> None:
    """Print or write what was asked for: one text, and of everything else one for each function."""
    texts = [(f"{kernel.name}.py", kernel.source.encode())] if "py" in kinds else []
    texts += [(f"{name}.{kind}", binary.data(kind)) for kind in kinds if kind != "py" for name, binary in binaries.items()]
    for name, data in texts:
        if out is None:
            click.echo(data.decode(), nl=False)
            continue
        out.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(data)
        click.echo(f"wrote {out / name}")


def facts_of(
    kernel: Kernel, arch: arches.Arch, binaries: dict[str, toolchain.Binary], seconds: float, rows: int
) -> dict[str, Any]:
    """Everything that `compile` tells, by name; units are in the names."""
    problem = kernel.problem
    stored = kernel.program.tile("codes.stored").layout
    padding = stored.size("k") / problem.k - 1 if stored is not None else 0.0
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
        "functions": list(binaries),
        "registers": max(binary.registers for binary in binaries.values()),
        "spills": sum(binary.spills for binary in binaries.values()),
        "shared_bytes": max(binary.shared_bytes for binary in binaries.values()),
        "bytes_moved": sum(bytes_moved(kernel.program, rows).values()),
        "padding": round(padding, 4),
        "floor_us": round(floor_us(kernel.program, arch, rows), 3),
        "seconds": round(seconds, 3),
        "cached": all(binary.cached for binary in binaries.values()),
    }


def told(facts: dict[str, Any], kernel: Kernel) -> str:
    """The facts in words."""
    (low, high), rows = facts["m"], facts["rows"]
    schedule, problem, n, k = kernel.schedule, kernel.problem, facts["n"], facts["k"]
    programs = kernel.programs(kernel.pieces[0], rows)
    grid = f"{count(programs[0] * programs[1] * programs[2], 'program')} of {count(schedule.warps, 'warp')}"
    units = {
        "lanes": "multiplied on multiply-add lanes",
        "mma": f"multiplied on matrix cores, w as the {schedule.side} operand",
        "vendor": "dequantized to memory, then the vendor's matmul",
    }
    tile = f"each {count(schedule.block_n, 'output')} by {schedule.block_k} k at a time"
    split = f", k shared by {schedule.split_k} programs and added up by a second function" if schedule.split_k > 1 else ""
    scales = "each weight is scaled" if schedule.scale_at == "weight" else "sums of products are scaled, not weights"
    zero = "; so is the zero point" if schedule.zero_at == "accumulator" else ""
    cached = ", found in the cache" if facts["cached"] else ""
    lines = [
        ("asked", f"y[{rows}, {n}] = x[{rows}, {k}] · wᵀ: {count(rows, 'token')} through a {k} -> {n} projection"),
        ("format", f"{facts['format']}, x and y in {facts['x']}, sums in {problem.accumulate}"),
        ("kernel", facts["kernel"]),
        ("schedule", f"{grid}, {tile}, {units[schedule.unit]}{split}"),
        ("why", f"the rules' choice for M={low}..{high} (nothing was timed): {scales}{zero}"),
        ("arch", f"{facts['arch']} ({facts['board']})"),
        ("needs", f"{facts['registers']} registers a thread, {facts['spills']} spills, {facts['shared_bytes']} bytes shared"),
        ("moves", f"{facts['bytes_moved']:,} bytes a call ({facts['padding']:.1%} of each row is padding)"),
        (
            "floor",
            f"{facts['floor_us']:.2f} us on {facts['board']}: these bytes at its data sheet's bandwidth, not a measurement",
        ),
        ("compiled", f"for {facts['target']} in {facts['seconds']:.2f} s{cached}"),
        ("proof", f"this text: {facts.get('proof', 'not checked (--no-check)')}"),
    ]
    if " on " not in facts.get("proof", "").split(":")[0]:
        lines.append(("", f"this binary for {facts['target']}: compiled, not run"))
    return "\n".join(f"{name:>9}  {text}" for name, text in lines)


def count(number: int, what: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def proof(kernel: Kernel) -> str:
    """Run the text against the f64 truth in a process of its own: on the GPU here, else in Triton's interpreter."""
    done = subprocess.run(
        [sys.executable, "-m", "w4gen.runtime.check", "-"],
        input=kernel.source,
        env=os.environ | ({"TRITON_INTERPRET": "1"} if detected() == "portable" else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    return (done.stdout or done.stderr).strip().splitlines()[-1] if done.stdout or done.stderr else "the check said nothing"


@cli.command()
@click.argument("what", type=click.Choice(["ir", "schedule", "kernel"]))
@question
def show(what: str, **options: Any) -> None:
    """Show the program (ir), the schedule or the text of a kernel."""
    problem, arch = asked(**options)
    kernel = pipeline.compile(problem, arch)
    if what == "ir":
        logical, scheduled = show_program(lower(problem)), show_program(kernel.program)
        click.echo(f"logical\n{logical}\n\nscheduled: {kernel.schedule}\n{scheduled}")
    else:
        click.echo(kernel.source if what == "kernel" else str(kernel.schedule), nl=what == "schedule")


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="print facts as JSON")
def doctor(as_json: bool) -> None:
    """Say what is here: versions, GPU, C compiler, cache."""
    facts = diagnosis()
    if as_json:
        click.echo(json.dumps(facts, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "found", "needed for", box=None)
    for name, (found, purpose) in facts.items():
        table.add_row(name, found, purpose)
    Console().print(table)


def diagnosis() -> dict[str, tuple[str, str]]:
    """What is here, and what it is needed for."""
    from importlib.metadata import PackageNotFoundError, version

    def installed(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "missing"

    folder = cache.kernels()
    count = sum(1 for _ in folder.glob("*/kernel.py")) if folder.is_dir() else 0
    return {
        "w4gen": (w4gen.__version__, "everything"),
        "python": (sys.version.split()[0], "everything"),
        "torch": (installed("torch"), "running and checking kernels"),
        "triton": (installed("triton"), "compiling kernels"),
        "gpu": (detected(), "running kernels (portable: no GPU here)"),
        "gcc": (shutil.which("gcc") or shutil.which("cc") or "missing", "launching kernels (Triton builds its launcher)"),
        "cache": (f"{folder} ({count} kernels)", "starting without compiling"),
        **{knob.name: (knob.read() or "not set", knob.sentence) for knob in knobs.ALL},
    }


def main() -> None:
    """Run the command line; a `W4Error` is one line on stderr and exit status 2."""
    try:
        cli(standalone_mode=False)
    except W4Error as error:
        click.echo(f"w4gen: {error}", err=True)
        raise SystemExit(2) from None
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
    except click.ClickException as error:
        click.echo(f"w4gen: {error.format_message()}", err=True)
        raise SystemExit(2) from None
    except click.exceptions.Abort:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
