"""Kernels that ended the process that timed them, kept beside their binaries: what makes another binary lifts a fault."""

from __future__ import annotations

from w4gen import cache, toolchain
from w4gen.codegen.render import Kernel
from w4gen.schedule.arch import Arch


def fault(kernel: Kernel, arch: Arch) -> str:
    """How a process ended with a kernel on this device; empty where none is known to."""
    files = cache.find(kernel.source, _address(kernel, arch))
    return files["facts"].decode() if files else ""


def keep(kernel: Kernel, arch: Arch, how: str) -> None:
    """Keep how a process ended with a kernel on this device."""
    cache.publish(kernel.source, _address(kernel, arch), {"facts": how.encode()})


def _address(kernel: Kernel, arch: Arch) -> str:
    return cache.address("fault", arch.device, *(toolchain.key(kernel, piece, arch) for piece in kernel.pieces))
