"""Files of results, and where they come from, without torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def where(facts: Mapping[str, Any]) -> str:
    """Where, with what and when a run was made, and its command; what files of older versions do not note is left out."""
    named = ("w4gen", "w4gen"), ("torch", "torch"), ("Triton", "triton"), ("CUDA", "cuda"), ("driver", "driver")
    versions = ", ".join(f"{name} {facts[key]}" for name, key in named if facts.get(key))
    command = re.sub(r"(?<= )/\S*/", "", facts["command"])  # where a file lay on that machine is no news
    return f"{facts['device']}, {versions}, {facts['date']}. `{command}`"


def write(out: Path, results: Mapping[str, Any]) -> None:
    """Write results as JSON."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")
