"""One page of what was measured: pictures and tables in a file that needs no other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt

from w4gen.bench import end_to_end_report, quality_report, report
from w4gen.bench.pictures import Picture, drawn
from w4gen.errors import W4Error

ABOUT = "Times are of GPUs, weights cold in the L2 cache unless a table says otherwise; ratios are formed inside a run only."


def runs(paths: Sequence[Path]) -> dict[Path, dict[str, Any]]:
    """What files of results hold. Raises `W4Error` where one is none."""
    found = {}
    for path in paths:
        try:
            found[path] = json.loads(path.read_text())
            origin(found[path])
        except OSError as error:
            raise W4Error(
                f"{path} cannot be read ({error.strerror}): give JSON that a command of w4gen wrote by --out"
            ) from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise W4Error(
                f"{path} is no file of results, as it does not name the device: give JSON that a command of w4gen wrote by --out"
            ) from error
    return found


def origin(facts: Mapping[str, Any]) -> tuple[str, str]:
    """The device and the date of a run; figures of quality, which are of many runs, say so of the last."""
    made = facts.get("facts", facts)
    return made["device"], made["date"]


def devices(found: Mapping[Path, Mapping[str, Any]]) -> str:
    """The GPUs that runs were made on, each with their dates; where there is none, what there is."""
    dates: dict[str, set[str]] = {}
    for device, date in map(origin, found.values()):
        dates.setdefault(device, set()).add(date)
    gpus = {device: on for device, on in dates.items() if device != "cpu"} or dates
    return "; ".join(f"{device}, {', '.join(sorted(on))}" for device, on in gpus.items())


def pictures(found: Mapping[Path, Mapping[str, Any]]) -> list[Picture]:
    """The pictures of some files of results."""
    return list(drawn(list(found.values())))


def section(facts: Mapping[str, Any]) -> str:
    """The tables of a run, as Markdown, its title left out; nothing where none are made of it."""
    if "variants" in facts:
        return end_to_end_report.section(facts).partition("\n")[2]
    if any("spent_us" in row for row in facts.get("rows", ())):
        return end_to_end_report.host(facts).partition("\n")[2]
    if "facts" in facts:
        return quality_report.page(facts).partition("\n")[2]
    return report.told(facts, "").partition("\n")[2] if report.known(facts) else ""


def page(found: Mapping[Path, Mapping[str, Any]], made: Sequence[Picture]) -> str:
    """The page, as HTML: pictures are in it as text."""
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    sections = [(path.stem, markdown.render(text)) for path, facts in found.items() if (text := section(facts))]
    environment = Environment(loader=PackageLoader("w4gen", "bench"), autoescape=True, undefined=StrictUndefined)
    asked = {"title": "w4gen, measured", "about": f"{devices(found)}. {ABOUT}", "pictures": made, "sections": sections}
    return environment.get_template("page.html.jinja").render(asked)
