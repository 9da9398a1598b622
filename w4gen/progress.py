"""A bar on standard error, where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def tracked(each: Iterable[T], total: int, what: str, shown: bool = True) -> Iterator[T]:
    """What `each` gives, with a bar that says how far it is and how long the rest takes."""
    if not (shown and sys.stderr.isatty()):
        yield from each
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(each, total=total, description=what, console=Console(stderr=True), transient=True)
