"""`w4gen doctor`: what is here, and what it is needed for."""

from __future__ import annotations

import shutil
import sys

import click

from w4gen import __version__, bundle, cache, knobs, paths, toolchain, tuned
from w4gen.commands.question import as_json, count, detected, table, tell
from w4gen.errors import W4Error
from w4gen.schedule.arch import ARCHES, arch


@click.command()
@as_json
def doctor(as_json: bool) -> None:
    """Say what is here: versions, GPU, C compiler, cache."""
    facts = diagnosis()
    if as_json:
        tell(facts)
    else:
        table("what", "found", "needed for", rows=[(name, *row) for name, row in facts.items()])


def rows() -> str:
    """How many tuned rows there are, and of those how many were timed with another Triton."""
    found = [row for name in ARCHES for rows in tuned.sources(name) for row in rows]
    old = sum(row.triton not in ("", toolchain.version()) for row in found)
    return f"{count(len(found), 'row')}, {old} timed with another Triton"


def bundled() -> str:
    """What the bundle in use holds, and whether it is of use here."""
    path = paths.bundle()
    if path is None:
        return "none"
    try:
        contents = bundle.read(path)
    except W4Error as error:
        return str(error)
    facts, wrong = bundle.facts(contents), bundle.foreign(contents, toolchain.version())
    archs = sorted(name.removeprefix("tuned/").removesuffix(".json") for name in contents if name.startswith("tuned/"))
    rows = f", tuned rows of {', '.join(archs)}" if archs else ""
    holds = f"{path}: {count(sum(name.endswith('/kernel.py') for name in contents), 'kernel')}{rows}"
    return f"{holds}; it {wrong}" if wrong else f"{holds}, made with Triton {facts['triton']}"


def told(knob: knobs.Knob) -> str:
    """A knob's value, or what is wrong with it."""
    try:
        if knob.kind is not str:
            knob.number()
        elif knob.words:
            knob.chosen()
        elif knob is knobs.ARCH:
            arch(knob.read() or "portable")
    except W4Error as error:
        return str(error)
    return knob.read() or "not set"


def diagnosis() -> dict[str, tuple[str, str]]:
    """What is here, and what it is needed for."""
    from importlib.metadata import PackageNotFoundError, version

    def installed(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "missing"

    return {
        "w4gen": (__version__, "everything"),
        "python": (sys.version.split()[0], "everything"),
        "torch": (installed("torch"), "running and checking kernels"),
        "triton": (installed("triton"), "compiling kernels"),
        "gpu": (detected(), "running kernels (portable: no GPU here)"),
        "gcc": (shutil.which("gcc") or shutil.which("cc") or "missing", "launching kernels (Triton builds its launcher)"),
        "cache": (f"{cache.kernels()} ({count(len(cache.entries()), 'kernel')})", "starting without compiling"),
        "bundle": (bundled(), "starting without compiling, from one file (W4GEN_CACHE=FILE.w4g)"),
        "tuned rows": (rows(), "the fastest schedules that were found"),
        **{knob.name: (told(knob), knob.sentence) for knob in knobs.ALL},
    }
