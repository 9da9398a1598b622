"""Names of layers: the patterns that choose among them, and the kinds that they are of."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase

from w4gen.errors import CheckpointError
from w4gen.formats import named
from w4gen.ir.types import Format


def kind_of(name: str) -> str:
    """A layer's name without its numbers: `model.layers.*.mlp.up_proj`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def by_pattern(format: str | Format | Mapping[str, str | Format]) -> dict[str, Format]:
    """The format of each pattern; one format alone is that of all layers."""
    formats = format if isinstance(format, Mapping) else {"*": format}
    return {pattern: named(each) for pattern, each in formats.items()}


def chosen(names: Iterable[str], choose: Mapping[str, Format]) -> Format | None:
    """The format of the first pattern that matches a layer, by any of its names."""
    return next((form for pattern, form in choose.items() if matches(names, (pattern,))), None)


def patterns(given: str | Iterable[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def matches(names: Iterable[str], patterns: Iterable[str]) -> bool:
    """Whether a pattern matches a name."""
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def unmatched(names: Iterable[str], *patterns: str) -> tuple[str, ...]:
    """The patterns that match no name, each once."""
    return tuple(each for each in dict.fromkeys(patterns) if not matches(names, (each,)))


def check_matched(where: object, layers: Collection[str], *patterns: str) -> None:
    """Raise `CheckpointError` where a pattern matches no linear layer of what is at `where`: it may be misspelt."""
    if missed := unmatched(layers, *patterns):
        known = ", ".join(dict.fromkeys(map(kind_of, layers)))
        raise CheckpointError(f"{where}: no linear layer matches {', '.join(map(repr, missed))}: they are called {known}")
