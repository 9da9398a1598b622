"""What Triton starts kernels by: a module in C for each list of arguments, which it has compiled when the first kernel is loaded.

A C compiler takes half a second. So it runs while a kernel is compiled, and a loaded kernel finds the module in Triton's cache.
"""

from __future__ import annotations

import contextlib
import functools
import subprocess
import threading
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def meanwhile(signature: Mapping[str, str]) -> Iterator[None]:
    """Have what starts kernels with these arguments, Triton's types by name, made by the end of this context."""
    kinds = tuple("*i8" if kind.startswith("*") else kind for kind in signature.values())  # a pointer is a pointer in C
    thread = threading.Thread(target=_make, args=(kinds,))
    thread.start()
    try:
        yield
    finally:
        thread.join()


@functools.cache
def _make(kinds: tuple[str, ...]) -> None:
    """What Triton 3.6 does when it loads a kernel, no GPU asked; what is wrong with it is told there, to whom it matters."""
    from triton.backends.nvidia import driver
    from triton.runtime.build import compile_module_from_src

    wrong = (AssertionError, OSError, RuntimeError, ImportError, subprocess.SubprocessError)  # no driver, no C compiler, …
    with contextlib.suppress(*wrong):
        driver.CudaUtils()
        compile_module_from_src(
            src=driver.make_launcher({}, dict(enumerate(kinds)), None),
            name="__triton_launcher",
            library_dirs=driver.library_dirs(),
            include_dirs=driver.include_dirs,
            libraries=driver.libraries,
        )
