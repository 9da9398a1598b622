"""`python -m w4gen.bench.sanitize`: memcheck, racecheck and initcheck over a small call of every template, as JSON.

Kernels are compiled first, and the calls run once by themselves; then under each tool of compute-sanitizer. A tool counts as
clean where it saw the fault that was planted for it, nothing in our kernels and of itself but what is explained, and all calls
gave the truth. Reports about other kernels (the vendor's) are counted apart.
"""

from __future__ import annotations

import json
import linecache
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import torch

from w4gen import ahead, paths, processes, toolchain
from w4gen.bench.facts import facts
from w4gen.bench.results import write
from w4gen.bench.sanitized import CALLS, PLANTED, asks
from w4gen.runtime.launch import arch_of

NAME = "compute-sanitizer"
OPTIONS = {"memcheck": ["--padding", "256"]}
SHARED = ["--report-api-errors", "no", "--show-backtrace", "no", "--destroy-on-device-error", "kernel"]
BLIND = "it did not see the planted fault"
EXPLAINED: dict[str, str] = {}
"""Reports that are told and do not count: the kernel, the kind and its lines, as `named` says them, and why there is no fault."""


@dataclass(frozen=True, slots=True)
class Ran:
    """One process of the calls: what it told, how it ended, how long it took."""

    told: tuple[dict[str, Any], ...]
    status: int
    seconds: float
    last: str = ""

    @property
    def missing(self) -> list[str]:
        """Calls that were not made, or were wrong."""
        right = {each["case"] for each in self.told if each.get("right", True)}
        return [name for name in (*CALLS, "planted") if name not in right]


def candidates() -> Iterator[Path]:
    """Where the tool may be: on the PATH, in CUDA's folder, in pip's packages of NVIDIA and Triton."""
    if found := shutil.which(NAME):
        yield Path(found)
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    for home in [*homes, *sorted(Path("/usr/local").glob("cuda*"), reverse=True)]:
        yield from (home / "bin" / NAME, home / NAME / NAME)
    for package, inside in (("nvidia", "*"), ("triton", "backends/nvidia")):
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            yield from (path for sub in ("bin", NAME) for path in sorted(Path(folder).glob(f"{inside}/{sub}/{NAME}")))


def tool() -> Path | None:
    """The first that can be run."""
    return next((path for path in candidates() if path.is_file() and os.access(path, os.X_OK)), None)


def ran(before: Sequence[str], limit_s: float) -> Ran:
    """Run the calls, under a tool where `before` names one; what takes too long is ended, with all that it started."""
    environment = processes.environment(PYTORCH_NO_CUDA_MEMORY_CACHING="1")  # each tensor has memory of its own, with an end
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(
            [*before, *processes.module("w4gen.bench.sanitized")],
            stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        lines = out.read().splitlines()
    told = tuple(json.loads(line) for line in lines if line.startswith('{"case"'))
    rest = [line for line in lines if line.strip() and not line.startswith('{"case"')]
    return Ran(told, process.returncode, time.perf_counter() - start, rest[-1] if rest else "")


REPORT = re.compile(r"^========= (?! |COMPUTE-SANITIZER|.*SUMMARY:|Target application|Error: process didn't)\S")
KERNEL = re.compile(r"\b(?:at|Device Frame:) ?(?:void )?(\w[\w:]*)[(<+]")
PLACE = re.compile(r"\bat (\S.*\+0x[0-9a-f]+)(?: in (.+):(\d+))?(?: \[.*)?$")


def reports(log: str) -> list[tuple[str, frozenset[str]]]:
    """What a log of compute-sanitizer reports: the lines of each, and the kernels that it names."""
    blocks: list[list[str]] = []
    for line in log.splitlines():
        if REPORT.match(line):
            blocks.append([])
        if blocks and line.startswith("=========") and "SUMMARY:" not in line:
            blocks[-1].append(line)
    lines = ["\n".join(line.removeprefix("=========").strip() for line in block) for block in blocks]
    return [(text, frozenset(KERNEL.findall(text))) for text in lines]


def named(text: str) -> str:
    """What a report says that the next run would say too: its first line and its places, as lines of the kernel's text."""
    first, *others = text.splitlines()
    return " ".join(PLACE.sub(_line, line) for line in (first, *filter(PLACE.search, others)))


def _line(place: re.Match[str]) -> str:
    """The line of text that a place is in, of a kernel that `toolchain.module` read here; else the place as it was told."""
    instruction, file, number = place.groups()
    line = linecache.getline(Path(file).name, int(number)).strip() if file and "<" in file else ""
    return f"at `{line or (f'{file}:{number}' if file else instruction)}`"


def verdict(name: str, log: str, done: Ran, ours: Sequence[str]) -> dict[str, Any]:
    """What came of one tool: reports about each of our kernels and about others, and why it is not clean where it is not."""
    found, planted, others, whole = Counter[str](), 0, Counter[str](), dict[str, str]()
    for text, kernels in reports(log):
        mine = [each for each in ours if each in kernels]
        if mine or not kernels:
            what = f"{', '.join(mine) or 'no kernel'}: {named(text)}"
            found[what] += 1
            whole.setdefault(what, text)
        elif any(each.startswith("planted") for each in kernels):
            planted += PLANTED[name] in kernels
        else:
            others[f"{', '.join(sorted(kernels))}: {re.sub(r' at .*', '', text.partition(chr(10))[0])}"] += 1
    why = [
        *(f"{count} times {what}" for what, count in found.items() if what not in EXPLAINED),
        *([] if planted else [BLIND]),
        *([f"calls not made or not right: {', '.join(done.missing)}"] if done.missing else []),
        *([f"it ended with status {done.status}: {done.last}"] if done.status and done.missing else []),
    ]
    return {
        "tool": name,
        "clean": not why,
        "reports": dict(found),
        "explained": {what: EXPLAINED[what] for what in found if what in EXPLAINED},
        "first_of_each": whole,
        "others": dict(others),
        "planted": planted,
        "calls": len(CALLS) - sum(name in CALLS for name in done.missing),
        "seconds": round(done.seconds, 1),
        "why": "; ".join(why),
    }


def sanitized(path: Path, name: str, limit_s: float, ours: Sequence[str]) -> dict[str, Any]:
    """The calls under one tool."""
    with tempfile.TemporaryDirectory(prefix="w4gen-") as folder:
        log = Path(folder) / "log"
        done = ran([str(path), "--tool", name, *SHARED, *OPTIONS.get(name, []), "--log-file", str(log)], limit_s)
        return verdict(name, log.read_text() if log.exists() else "", done, ours)


def told(row: dict[str, Any]) -> str:
    """A tool's verdict as one line."""
    return f"{row['tool']}: {'clean' if row['clean'] else row['why']} ({row['calls']} calls, {row['seconds']} s)"


def summary(path: Path | None, alone: Ran, limit_s: float) -> dict[str, Any]:
    """All that is found out, given how the calls went by themselves."""
    kernels = sorted({name for each in alone.told for name in each.get("kernels", ())})
    templates = {each["template"] for each in alone.told if "template" in each}
    rows = []
    for name in PLANTED:
        why = f"{NAME} is not on the PATH, in CUDA's folder or in pip's packages"
        rows.append({"tool": name, "clean": False, "why": why} if path is None else sanitized(path, name, limit_s, kernels))
        click.echo(told({"calls": 0, "seconds": 0.0} | rows[-1]))
    return {
        "title": "compute-sanitizer",
        "method": "three launches of each call, memory of its own for each tensor; a fault is planted for each tool",
        "sanitizer": version(path),
        "templates": sorted(templates),
        "templates_without_a_call": sorted(set(written()) - templates),
        "alone": asdict(alone) | {"missing": alone.missing},
        "tools": rows,
    }


def written() -> list[str]:
    """The templates that there are."""
    return [path.name.removesuffix(".py.jinja") for path in paths.templates().glob("*.py.jinja")]


def version(path: Path | None) -> str:
    """What the tool says that it is; empty where there is none."""
    said = "" if path is None else subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    return next((line for line in said.splitlines() if line.startswith("Version")), "")


@click.command()
@click.option("--sanitizer", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="in place of the one found")
@click.option("--limit", "limit_s", default=40.0, show_default=True, help="seconds for each tool")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="JSON file to write")
def main(sanitizer: Path | None, limit_s: float, out: Path) -> None:
    """Run compute-sanitizer over every template on the GPU here, and write what it found."""
    if not torch.cuda.is_available():
        raise click.ClickException("kernels are watched where they run and there is no GPU here: run this where one is")
    calls = asks(arch_of(torch.device("cuda", torch.cuda.current_device()))).values()
    ahead.needed(calls)
    for kernel in (ask.kernel() for ask in calls):
        toolchain.module(kernel.source, kernel.name)  # reports name lines of it
    alone = ran([], limit_s)
    click.echo(f"alone: {', '.join(alone.missing) or 'all calls are right'} ({alone.seconds:.1f} s) {alone.last}")
    write(out, facts("w4gen.bench.sanitize") | summary(sanitizer or tool(), alone, limit_s))


if __name__ == "__main__":
    main()
