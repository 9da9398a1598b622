"""A model's kernels in one file: compiled side by side with no GPU, checked, and brought into another cache."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from w4gen import __version__, ahead, api, bundle, cache, knobs, paths, toolchain, tuned
from w4gen.ahead import Ask, Done
from w4gen.commands.question import count, detected, load_format, numbers, of_models, tell
from w4gen.errors import CacheError, W4Error
from w4gen.ir.problem import PAIRED, Problem
from w4gen.ir.types import Format
from w4gen.layers import GATE_UP, Layer, layers, merged, read
from w4gen.schedule import arch as arches

NEEDED = ("json", "facts", "cubin", "hsaco")
"""The files of a binary that a launch needs."""


def of_model(
    model: Path, tp: str, m: str, form: str | Format, dtype: str, together: bool = False
) -> dict[Problem, tuple[Layer, int]]:
    """The problems of a model, one for each layer and bucket, with the layer and the rows of x that ask it.

    With `together` those of `w4gen.merge` too, of gate and up as they are and with the activation between them.
    """
    facts = read(model)
    found: dict[Problem, tuple[Layer, int]] = {}
    for share, rows in itertools.product(numbers(tp, "tp"), numbers(m, "m")):
        for layer in [*layers(facts, share), *(merged(facts, share) if together else [])]:
            problem = api.problem_of(m=rows, n=layer.n, k=layer.k, format=form, dtype_name=dtype, bias=layer.bias)
            found.setdefault(problem, (layer, rows))
            if layer.names == ("+".join(GATE_UP),):
                found.setdefault(replace(problem, activation=PAIRED), (layer, rows))
    return found


def bundled(
    model: Path, tp: str, kinds: list[str], out: Path | None, as_json: bool, together: bool = False, **options: Any
) -> None:
    """Compile the layers of a model for every M and arch that is named, and write the bundle `out`; exit with 1 if any failed."""
    if out is None or out.suffix != paths.BUNDLE:
        raise W4Error("a model is compiled into a bundle: give --out FILE.w4g")
    if set(kinds) & {"py", "sass"}:
        raise W4Error("a bundle holds texts and binaries as they are compiled: --emit cubin, hsaco, ptx or amdgcn")
    of_models(options)
    archs = [arches.arch(name) for name in (options["arch"] or knobs.ARCH.read() or detected()).split(",")]
    form, start = load_format(options["format_name"]), time.perf_counter()
    problems = of_model(model, tp, options["m"] or "1,16,256", form, options["dtype"], together)
    asks = [Ask(problem, arch) for arch in archs for problem in problems]
    found = list(dict.fromkeys(layer for layer, _ in problems.values()))
    done = list(ahead.every(asks))
    contents = packed([each.ask for each in done if not each.error], kinds)
    bundle.write(out, contents)
    tell_of(found, done, out, as_json, time.perf_counter() - start)


def tell_of(found: list[Layer], done: list[Done], out: Path, as_json: bool, seconds: float) -> None:
    """Say what is in a bundle; exit with 1 where a kernel is missing."""
    failed = [each for each in done if each.error]
    made = len(done) - len(failed)
    if as_json:
        kernels = [{"problem": str(each.ask.problem), "arch": each.ask.arch.name, "error": each.error} for each in done]
        tell({"bundle": str(out), "bytes": out.stat().st_size, "seconds": round(seconds, 2), "kernels": kernels})
    else:
        for layer in found:
            click.echo(str(layer))
        for each in failed:
            click.echo(f"no kernel for {each.ask.problem} on {each.ask.arch.name}: {each.error}")
        old = sum(each.cached for each in done)
        click.echo(f"{count(made, 'kernel')} ({old} found in the cache) in {seconds:.1f} s: {out}, {out.stat().st_size:,} bytes")
    if failed:
        raise SystemExit(1)


def packed(asks: Iterable[Ask], kinds: Iterable[str]) -> dict[str, bytes]:
    """What a bundle of these kernels holds, by name: texts, binaries with their checksums, and the tuned rows that chose them."""
    contents: dict[str, bytes] = {}
    rows: dict[str, list[tuned.Row]] = {}
    kept = {*NEEDED, *kinds}
    for ask in asks:
        kernel = ask.kernel()
        contents[f"kernels/{cache.place(kernel.source)}/kernel.py"] = kernel.source.encode()
        for piece in kernel.pieces:
            where = f"kernels/{cache.place(kernel.source, toolchain.key(kernel, piece, ask.arch))}"
            built = toolchain.build_piece(kernel, piece, ask.arch).files
            files = {kind: data for kind, data in built.items() if kind in kept}
            contents |= {f"{where}/kernel.{kind}": data for kind, data in files.items()}
            contents[f"{where}/sums.json"] = cache.checksums(files)
        row = tuned.tuned(ask.problem, ask.arch)
        if row is not None:
            rows.setdefault(ask.arch.name, []).append(row)
    contents |= {f"tuned/{name}.json": tuned.dump(each) for name, each in rows.items()}
    made = {
        "w4gen": __version__,
        "triton": toolchain.version(),
        "kernels": len([name for name in contents if name.endswith(".py")]),
    }
    return contents | {"bundle.json": (json.dumps(made, indent=1) + "\n").encode()}


def imported(path: Path, contents: Mapping[str, bytes]) -> dict[str, int]:
    """Put what a bundle holds into the cache.

    Raises `CacheError` before anything is written where a part of it is damaged, or another Triton made it.
    """
    if wrong := bundle.foreign(contents, toolchain.version()):
        raise CacheError(f"{path} {wrong}, or import it where that Triton is")
    entries = {match[1]: match[2] for name in contents if (match := re.fullmatch(r"(kernels/(\w+)/\w+)/sums\.json", name))}
    binaries = {where: cache.whole(lambda name, where=where: contents[f"{where}/{name}"]) for where in entries}  # type: ignore[misc]
    texts = {name: contents.get(f"kernels/{name}/kernel.py", b"").decode(errors="replace") for name in entries.values()}
    bad = [where for where, files in binaries.items() if files is None] + [
        name for name, text in texts.items() if cache.place(text) != name
    ]
    if bad:
        raise CacheError(f"{path} is damaged at {bad[0]}: copy it again, or make it anew")
    rows = {Path(name).stem: tuned.parse(f"{path}/{name}", data) for name, data in contents.items() if name.startswith("tuned/")}
    for where, files in binaries.items():
        cache.publish(texts[entries[where]], where.rpartition("/")[2], files or {})
    if cache.kernels() in cache.closed:
        raise CacheError(f"{cache.kernels()} cannot be written: set W4GEN_CACHE to a folder that can, or to {path} itself")
    for name, each in rows.items():
        tuned.save(name, each)
    return {"kernels": len(texts), "binaries": len(binaries), "rows": sum(map(len, rows.values()))}
