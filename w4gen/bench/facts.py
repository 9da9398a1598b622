"""Where and with what a run was made: what every file of results begins with."""

from __future__ import annotations

import datetime
import hashlib
import subprocess
import sys
from typing import Any

import torch

from w4gen import toolchain
from w4gen.paths import CHECKOUT, PACKAGE, templates
from w4gen.version import __version__


def here() -> torch.device:
    """The GPU that is measured: the current one."""
    return torch.device("cuda", torch.cuda.current_device())


def said(*command: str) -> str:
    """The first line that a program prints, empty where it is not here or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""


def revision() -> str:
    """w4gen's version with its commit, `0.1.0, 5fde787-dirty` where files differ from that; elsewhere a hash of its sources."""
    own = (CHECKOUT / ".git").exists()  # and not of a repository that w4gen is installed within
    commit = said("git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--exclude=*") if own else ""
    return f"{__version__}, {commit or f'sources {sources()}'}"


def sources() -> str:
    """The first digits of the hash of w4gen's code and templates: runs of different code do not look alike."""
    files = [*PACKAGE.rglob("*.py"), *templates().glob("*.jinja")]
    return hashlib.sha256(b"".join(sorted(hashlib.sha256(path.read_bytes()).digest() for path in files))).hexdigest()[:7]


def facts(module: str) -> dict[str, Any]:
    """The device, the date, the versions, and the command line of `module` (`w4gen.bench.compare`)."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "date": datetime.date.today().isoformat(),
        "w4gen": revision(),
        "torch": torch.__version__,
        "triton": toolchain.version(),
        "cuda": torch.version.cuda,
        "driver": said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "command": " ".join([f"python -m {module}", *sys.argv[1:]]),
    }


def reason(error: Exception) -> str:
    """What an error says, in a line: its first, and the next where that only announces it."""
    first, *more = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    told = f"{first} {more[0]}" if first.endswith(":") and more else first
    return f"{type(error).__name__}: {told[:300]}"
