"""Pictures of results: rooflines, time against M, where a token's time goes, % of the floor over shapes. Needs matplotlib."""

from __future__ import annotations

import base64
import io
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from w4gen.bench.ceilings import measured
from w4gen.bench.end_to_end_report import shares
from w4gen.errors import W4Error

Facts = Mapping[str, Any]
WIDE, DPI = 6.4, 150
"""Inches, and dots an inch: 960 dots, which a phone shows without scaling letters away."""
COLORS = {"w4gen": "C0", "cuBLAS": "0.45", "floor": "black", "dequantize, matmul": "C1", "tinygemm": "C2", "gemlite": "C3"} | {
    "humming": "C4", "bitsandbytes": "C5"
}  # fmt: skip
LARGE = 512
"""Rows of x from which a matmul tells how fast the machine multiplies."""
MOST = 6
"""Layers of a picture of time against M: the largest."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture: the name of its file, its title, what it shows in a sentence, and the figure of matplotlib."""

    name: str
    title: str
    shows: str
    figure: Any

    def png(self) -> bytes:
        """The picture as PNG."""
        held = io.BytesIO()
        self.figure.savefig(held, format="png", dpi=DPI)
        return held.getvalue()

    def uri(self) -> str:
        """The picture as text that a page holds."""
        return "data:image/png;base64," + base64.b64encode(self.png()).decode()


def canvas(high: float, columns: int = 1, rows: int = 1) -> tuple[Any, list[Any]]:
    """A figure `high` inches high, and its axes. Raises `W4Error` where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise W4Error(f"matplotlib, which draws, is not to be had ({error}): pip install 'w4gen[bench]'") from error
    figure = Figure(figsize=(WIDE, high), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


@dataclass(frozen=True, slots=True)
class Roof:
    """What rows are drawn under: GB/s of reading, TFLOP/s of multiplying, GB/s of codes decoded where known, their source."""

    read: float
    matrix: float | None
    decode: float | None
    source: str

    @classmethod
    def over(cls, rows: Sequence[Facts], every: Sequence[Facts], machine: Facts) -> Roof:
        """That of a machine over rows of one format; what `every` row of it in the same type of x reached is below its ceilings.

        Small matmuls do not multiply as fast as the machine does: they would be their own ceiling.
        """
        first = rows[0]
        label, kind = first["format"], first["dtype"]
        large = [row for row in every if row["m"] >= LARGE]
        matmuls = [each["value"] for each in machine["figures"] if each["name"].startswith(f"matrix {kind},")]
        fastest = max([*matmuls, *speeds(large, "cublas_us"), *speeds(large, "us")], default=None)
        reached = max(row["bytes"] / row["floor_us"] for row in rows) / 1e3
        decode = measured(machine, f"decode {label} to {kind}", label)
        read = measured(machine, "read")
        how = "these rows' floors" if read is None else "measured on this machine"
        source = f"ceilings: reading as {how}, multiplying as its fastest matmul"
        return cls(read or reached, fastest, decode and decode * first["bytes"] / (first["k"] * first["n"]), source)

    def floor_us(self, row: Facts) -> float:
        """Microseconds below which a row cannot go: reading its weight, or multiplying where that is known."""
        return float(max(row["floor_us"], work(row) / self.matrix / 1e6 if self.matrix else 0.0))


def drawn(runs: Sequence[Facts]) -> Iterator[Picture]:
    """Every picture that can be made of some runs, the JSON of `--out`: models first, then all layers, then each format.

    Ceilings are those of a machine of the same device.
    """
    for run in runs:
        if "variants" in run:
            yield bars(run)
        if "phases" in run:
            yield layers(run)
        if "total_us" in run:
            yield curve(run)
    timed = [run for run in runs if any("cublas_us" in row for row in run.get("rows", ()))]
    for device in dict.fromkeys(run["device"] for run in timed):
        here = [forward(run) for run in timed if run["device"] == device]
        machine = next((run for run in runs if "figures" in run and run["device"] == device), {"figures": []})
        of: dict[str, list[Facts]] = defaultdict(list)
        for row in chain(*here):
            of[row["dtype"]].append(row)
        for dtype, rows in of.items():
            yield heat(device, dtype, rows, Roof.over(rows, rows, machine))
        for kind in dict.fromkeys((row["format"], row["dtype"]) for row in chain(*here)):
            groups = [same for rows in here if (same := [row for row in rows if (row["format"], row["dtype"]) == kind])]
            every = list(chain(*groups))
            yield roofline(device, kind, every, Roof.over(every, of[kind[1]], machine))
            if len({row["m"] for row in every}) > 2:
                yield against_m(device, kind, groups)


def forward(run: Facts) -> list[Facts]:
    """The rows of a comparison, gradients left out."""
    return [row for row in run["rows"] if "cublas_us" in row and not row.get("gradient")]


def slug(*words: str) -> str:
    """A file's name of some words."""
    return "-".join(re.findall(r"[a-z0-9]+", " ".join(words).lower()))


def work(row: Facts) -> float:
    """Operations of a row: a multiplication and an addition for each weight and row of x."""
    return 2.0 * row["m"] * row["k"] * row["n"]


def speeds(rows: Sequence[Facts], time: str) -> list[float]:
    """TFLOP/s."""
    return [work(row) / row[time] / 1e6 for row in rows]


def roofline(device: str, kind: tuple[str, str], rows: Sequence[Facts], roof: Roof) -> Picture:
    """Kernels as points under the ceilings of memory, of the matmul, and of decoding where that was measured."""
    figure, (axes,) = canvas(4.4)
    ends: list[float] = []
    for name, time, mark in (("cuBLAS", "cublas_us", "x"), ("w4gen", "us", "o")):
        moved = [
            (row["bytes"] if name == "w4gen" else 2 * row["k"] * row["n"]) + 2 * row["m"] * (row["k"] + row["n"]) for row in rows
        ]
        at = [work(row) / nbytes for row, nbytes in zip(rows, moved, strict=True)]
        axes.scatter(at, speeds(rows, time), s=14, color=COLORS[name], marker=mark, label=name, zorder=3)
        ends += [min(at) / 2, max(at) * 2]
    slopes = [("reading", roof.read, "-"), *([("decoding", roof.decode, ":")] if roof.decode else [])]
    flat = roof.matrix or float("inf")
    for name, slope, style in slopes:
        knee = [min(ends), min(flat * 1e3 / slope, max(ends)), max(ends)]
        line = [min(slope * each / 1e3, flat) for each in knee]
        axes.plot(knee, line, style, color="black", linewidth=1, label=f"{name}: {slope:,.0f} GB/s")
    axes.plot([], [], " ", label=f"multiplying: {f'{flat:,.0f} TFLOP/s' if roof.matrix else 'not measured'}")
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s")
    axes.grid(True, which="major", linewidth=0.3)
    axes.legend(fontsize=7, loc="lower right")
    title = f"Roofline: {kind[0]}, x in {kind[1]}, {device}"
    shows = f"Each point is a layer at an M, cuBLAS over 16-bit weights; {roof.source}."
    return titled("roofline", title, shows, figure, device, *kind)


def titled(kind: str, title: str, shows: str, figure: Any, *words: str) -> Picture:
    """A picture with its title drawn, too."""
    figure.suptitle(title, fontsize=9)
    return Picture(slug(kind, *words), title, shows, figure)


def against_m(device: str, kind: tuple[str, str], groups: Sequence[Sequence[Facts]]) -> Picture:
    """Time against M, a panel for each layer; points of one run are joined, and no others."""
    every = {(row["k"], row["n"]) for group in groups for row in group}
    largest = sorted(every, key=lambda shape: -shape[0] * shape[1])[:MOST]
    figure, panels = canvas(2.2 * -(-len(largest) // 2), min(2, len(largest)), -(-len(largest) // 2))
    for axes, (k, n) in zip(panels, largest, strict=False):
        for group in groups:
            rows = sorted((row for row in group if (row["k"], row["n"]) == (k, n)), key=lambda row: row["m"])
            for name, line in lines(rows).items():
                style = (
                    {"linestyle": "--", "linewidth": 0.8}
                    if name == "floor"
                    else {"marker": "o", "markersize": 2.5, "linewidth": 1}
                )
                axes.plot(*zip(*line, strict=True), color=COLORS.get(name, "C6"), label=name, **style)
        axes.set(xscale="log", yscale="log")
        axes.set_title(f"{k} → {n}", fontsize=8)
        axes.set_xlabel("M, rows of x", fontsize=7)
        axes.set_ylabel("µs", fontsize=7)
        axes.tick_params(which="both", labelsize=6)
        numbered(axes)
        if axes.get_xlim()[1] < 10 * axes.get_xlim()[0]:  # there may be no power of ten among them
            counts = sorted({row["m"] for group in groups for row in group if (row["k"], row["n"]) == (k, n)})
            axes.set_xticks(counts, [str(m) for m in counts], minor=False)
        axes.grid(True, which="major", linewidth=0.3)
    for axes in panels[len(largest) :]:
        axes.set_visible(False)
    named = {name: line for axes in panels for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named, fontsize=7, ncols=4, loc="outside lower center")
    title = f"Time against M: {kind[0]}, x in {kind[1]}, {device}"
    shows = "Microseconds of a layer against rows of x; points are joined where they are of one run."
    return titled("time", title, shows, figure, device, *kind)


def numbered(axes: Any) -> None:
    """Numbers in full on axes that are logarithmic: powers of ten, and on y some between."""
    axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")


def lines(rows: Sequence[Facts]) -> dict[str, list[tuple[int, float]]]:
    """(M, microseconds) of everyone who answered some rows."""
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        for name, time in (("w4gen", "us"), ("cuBLAS", "cublas_us"), ("floor", "floor_us")):
            found[name].append((row["m"], row[time]))
        for each in row.get("others", ()):
            if "us" in each:
                found[each["name"]].append((row["m"], each["us"]))
    return found


def heat(device: str, dtype: str, rows: Sequence[Facts], roof: Roof) -> Picture:
    """% of the floor, layers of each format by M."""
    cells = {((row["format"], row["k"], row["n"]), row["m"]): roof.floor_us(row) / row["us"] for row in rows}
    layers = sorted(dict.fromkeys(layer for layer, _ in cells), key=lambda layer: (layer[0], -layer[1] * layer[2]))
    ms = sorted({m for _, m in cells})
    figure, (axes,) = canvas(1.2 + 0.32 * len(layers))
    shares = [[cells.get((layer, m), float("nan")) for m in ms] for layer in layers]
    axes.imshow(shares, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(ms)), [str(m) for m in ms], fontsize=7)
    axes.set_yticks(range(len(layers)), [f"{form}  {k} → {n}" for form, k, n in layers], fontsize=7)
    axes.set_xlabel("M, rows of x", fontsize=8)
    for y, row in enumerate(shares):
        for x, share in enumerate(row):
            if share == share:  # not measured is NaN
                axes.text(x, y, f"{share:.0%}", ha="center", va="center", fontsize=7)
    title = f"% of the floor: x in {dtype}, {device}"
    other = f", or multiplying at {roof.matrix:,.0f} TFLOP/s, the machine's fastest matmul" if roof.matrix else ""
    shows = f"How near a time is to its floor: only reading the weight{other}."
    return titled("floor", title, shows, figure, device, dtype)


def bars(run: Facts) -> Picture:
    """Where the time of a token goes, a bar for each variant of a whole model."""
    told = {name: dict(shares(variant)) for name, variant in run["variants"].items()}
    told = {name: parts for name, parts in told.items() if parts}
    figure, (axes,) = canvas(1.3 + 0.45 * len(told))
    causes = [
        cause for cause in dict.fromkeys(cause for parts in told.values() for cause in parts) if not cause.startswith("host")
    ]
    left = dict.fromkeys(told, 0.0)
    for cause in causes:
        widths = [max(0.0, parts.get(cause, 0.0)) for parts in told.values()]
        axes.barh(list(told), widths, left=list(left.values()), height=0.6, label=cause)
        left = {name: left[name] + width for name, width in zip(told, widths, strict=True)}
    axes.invert_yaxis()
    axes.set_xlabel("microseconds of a token, in one CUDA graph", fontsize=8)
    axes.tick_params(labelsize=7)
    figure.legend(fontsize=7, ncols=4, loc="outside lower center")
    title = f"A decode step of {run['model']} on {run['device']}"
    return titled("step", title, "What one token takes, batch 1, by its causes.", figure, run["model"], run["device"])


def layers(run: Facts) -> Picture:
    """Shares of a step by kind of layer, in both phases, with the part that is above the floor."""
    figure, panels = canvas(1.4 + 0.24 * max(len(phase["layers"]) for phase in run["phases"].values()), len(run["phases"]))
    for axes, (name, phase) in zip(panels, run["phases"].items(), strict=True):
        found = sorted(phase["layers"], key=lambda each: -each["share"])
        names = [each["name"].removeprefix("model.layers.*.") for each in found]
        floors = [each["share"] * min(1.0, each["floor_us"] / each["us"]) for each in found]
        above = [each["share"] - least for each, least in zip(found, floors, strict=True)]
        axes.barh(names, floors, color="C2", label="only reading it")
        axes.barh(names, above, left=floors, color="C1", label="above that")
        axes.invert_yaxis()
        axes.set_title(f"{name}: {phase['step_us']:,.0f} µs", fontsize=8)
        axes.tick_params(labelsize=6)
        axes.set_xlabel("share of the step", fontsize=7)
    panels[0].legend(fontsize=7)
    model = str(run["model"]).rpartition("/")[2]
    title = f"Linear layers of {model}, {run['format']} by {run['quantizer']}, {run['device']}"
    return titled(
        "layers", title, "What each kind of linear layer takes of a step.", figure, model, run["format"], run["quantizer"]
    )


def curve(run: Facts) -> Picture:
    """Time of a model's linear layers against M, with the M from which another bucket, or another tile of rows, answers."""
    figure, (axes,) = canvas(3.6)
    axes.plot(run["ms"], run["total_us"], marker="o", markersize=2.5, linewidth=1, color=COLORS["w4gen"])
    least = sum(part["count"] * part.get("floor_us", 0.0) for part in run["parts"])
    if least:
        axes.axhline(
            least, color=COLORS["floor"], linewidth=0.8, linestyle="--", label=f"only reading the weights: {least:,.0f} µs"
        )
        axes.legend(fontsize=7)
    for step in run["steps"]:
        axes.axvline(step["m"], color="0.7", linewidth=0.6, linestyle="--" if "bucket" in step["why"] else ":")
    axes.set(xscale="log", yscale="log", xlabel="M, rows of x (dashed: a bucket begins, dotted: another tile)", ylabel="µs")
    numbered(axes)
    axes.grid(True, which="major", axis="y", linewidth=0.3)
    layers = ", ".join(f"{part['k']} → {part['n']} × {part['count']}" for part in run["parts"])
    title = f"All linear layers against M: {run['format']}, {run['source']} on {run['where'].partition(',')[0]}"
    shows = f"Microseconds of {layers}, {run['source']} on {run['where']}."
    return titled("curve", title, shows, figure, run["source"], run["where"].partition(",")[0], run["format"], layers)
