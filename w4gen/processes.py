"""Other processes that run our code: from where it is imported here, whichever folder is the current one."""

from __future__ import annotations

import os
import sys

OURS = "import sys; sys.path[:] = filter(None, sys.path)\n"
"""Do not look for modules in the current folder first, where another may have their names."""

RUN = "import runpy; del sys.argv[0]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"


def program(text: str, *arguments: str) -> list[str]:
    """The command that runs a text of Python, as `python -c` does."""
    return [sys.executable, "-c", OURS + text, *arguments]


def module(name: str, *arguments: str) -> list[str]:
    """The command that runs a module, as `python -m` does."""
    return program(RUN, name, *arguments)


def environment(**changes: str) -> dict[str, str]:
    """The environment of this process, with the places that it imports from, and changes."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), **changes}
