"""What can be proven of a kernel where no GPU is: its text, or its portable twin's, is interpreted, and it compiles."""

from __future__ import annotations

import re
import subprocess

from w4gen import processes
from w4gen.codegen.render import Kernel
from w4gen.errors import ToolchainError
from w4gen.pipeline import twin
from w4gen.schedule.apply import FAST
from w4gen.schedule.arch import arch
from w4gen.toolchain import able, build, version

TWIN = "portable twin: "
"""How a proof begins where another kernel was run in this one's place."""


def checked(kernel: Kernel, **environment: str) -> subprocess.CompletedProcess[str]:
    """The text run against the f64 truth, in a process of its own."""
    return subprocess.run(
        processes.module("w4gen.runtime.check", "-"),
        input=kernel.source,
        env=processes.environment(**environment),
        text=True,
        check=False,
        capture_output=True,
    )


def without_gpu(kernel: Kernel) -> subprocess.CompletedProcess[str]:
    """The same in the interpreter, of a kernel or of the portable twin of one that only a GPU runs, which then is compiled."""
    stand_in = twin(kernel)
    done = checked(stand_in, TRITON_INTERPRET="1")
    if stand_in is not kernel:
        compiles, proven = placement(kernel)
        done.stdout = f"{TWIN}{done.stdout.strip() or 'the check said nothing'} · this kernel: {proven}, not run\n"
        done.returncode = done.returncode or int(not compiles)
    return done


def placement(kernel: Kernel) -> tuple[bool, str]:
    """Compile a kernel for the arch in its second line: whether nothing is wrong with it, and what that proves.

    In a fast template each conversion that a layout makes trivial is asserted to be: one that is not does not compile.
    """
    named = re.search(r"(?m)^# made by: .* --arch (\S+)", kernel.source)
    target = arch(named[1] if named else "sm_90")
    fast = kernel.schedule.template in FAST
    if fast and "gluon" not in able(target).features:
        return True, f"not compiled, as its template is not made for Triton {version()}"
    try:
        build(kernel, target)
    except ToolchainError as error:
        return False, f"WRONG, as it does not compile: {error}"
    return True, "compiled, placement proven" if fast else "compiled"
