"""What a binary says of itself: its machine code and what it needs, by the tools that come with Triton and from AMD's text."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from w4gen.errors import ToolchainError


def _tool(name: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not path.exists():
        raise ToolchainError(f"{name} is not in the triton package: install triton's CUDA build to look into kernels")
    return str(path)


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([_tool(tool), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolchainError(f"{tool} failed: {(done.stderr or done.stdout).strip().splitlines()[0]}")
    return done.stdout


def _look(tool: str, option: str, cubin: bytes) -> str:
    """What a tool says of a cubin."""
    with tempfile.TemporaryDirectory(prefix="w4gen-") as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return _run(tool, option, str(path))


def disassemble(cubin: bytes) -> str:
    """SASS of a cubin."""
    return _look("nvdisasm", "-c", cubin)


def cuda_usage(cubin: bytes) -> dict[str, int]:
    usage = _look("cuobjdump", "-res-usage", cubin)
    found = re.search(r"REG:(\d+)\s+STACK:(\d+)\s+SHARED:(\d+)\s+LOCAL:(\d+)", usage)
    if found is None:
        raise ToolchainError("cuobjdump printed no resource usage: this triton's tools are not the ones w4gen knows")
    registers, stack, shared, local = map(int, found.groups())
    # a spill needs memory of the thread's own; to disassemble takes longer than to compile
    spills = len(re.findall(r"\b(?:LDL|STL)\b", disassemble(cubin))) if stack or local else 0
    return {"registers": registers, "spills": spills, "shared_bytes": shared}


def hip_usage(text: str) -> dict[str, int]:
    def number(field: str) -> int:
        return max((int(value) for value in re.findall(rf"\.{field}:\s+(\d+)", text)), default=0)

    return {"registers": number("vgpr_count"), "spills": number("vgpr_spill_count") + number("sgpr_spill_count")}
