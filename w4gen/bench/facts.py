"""Where and with what a run was made: what every file of results begins with."""

from __future__ import annotations

import datetime
import sys
from typing import Any

import torch

from w4gen import toolchain


def here() -> torch.device:
    """The GPU that is measured: the current one."""
    return torch.device("cuda", torch.cuda.current_device())


def facts(module: str) -> dict[str, Any]:
    """The device, the date, the versions, and the command line of `module` (`w4gen.bench.compare`)."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "triton": toolchain.version(),
        "cuda": torch.version.cuda,
        "command": " ".join([f"python -m {module}", *sys.argv[1:]]),
    }


def reason(error: Exception) -> str:
    """What an error says, in a line: its first, and the next where that only announces it."""
    first, *more = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    told = f"{first} {more[0]}" if first.endswith(":") and more else first
    return f"{type(error).__name__}: {told[:300]}"
