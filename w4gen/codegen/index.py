"""Index arithmetic as small sums of digits, simplified where digits divide evenly, and printed."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Term:
    """`text // divide % modulo * weight` (modulo 0: none); `axes` are the tensor axes that `text` runs along."""

    text: str
    axes: tuple[str, ...] = ()
    divide: int = 1
    modulo: int = 0
    weight: int = 1

    def render(self, dims: tuple[str, ...]) -> str:
        parts = [suffixed(self.text, self.axes, dims) if self.axes else self.text]
        parts += [f"// {self.divide}"] if self.divide > 1 else []
        parts += [f"% {self.modulo}"] if self.modulo else []
        return " ".join(parts + ([f"* {self.weight}"] if self.weight > 1 else []))


@dataclass(frozen=True, slots=True)
class Index:
    """`(sum of terms) // floor * weight`."""

    terms: tuple[Term, ...]
    floor: int = 1
    weight: int = 1

    def __add__(self, other: Index) -> Index:
        if self.floor == other.floor == 1:
            return Index(self.times(1).terms + other.times(1).terms)
        raise ValueError(f"cannot add the indices {self} and {other}: one of them is a quotient")

    def times(self, factor: int) -> Index:
        """This index times a constant."""
        factor *= self.weight
        if self.floor > 1:
            return replace(self, weight=factor)
        return Index(tuple(replace(term, weight=term.weight * factor) for term in self.terms))

    def remainder(self, modulo: int) -> Index:
        """This index % modulo, for terms that are the digits of one number; the highest below `modulo` is cut to it."""
        if self.floor > 1:
            raise ValueError(f"no remainder of the index {self}: a quotient has no digits")
        if modulo == 1:
            return Index(())
        low = sorted((term for term in self.terms if term.weight < modulo), key=lambda term: term.weight)
        if not low:
            return Index(())
        most = modulo // low[-1].weight
        return Index((*low[:-1], replace(low[-1], modulo=min(low[-1].modulo or most, most))))

    def quotient(self, divisor: int) -> Index:
        """This index // divisor, for terms that are the digits of one number (each less than the next one's weight)."""
        if self.floor > 1 or divisor == 1:
            return replace(self, floor=self.floor * divisor)
        unit = max((term.weight for term in self.terms if divisor % term.weight == 0), default=1)
        terms = [replace(term, weight=term.weight // unit) for term in self.terms if term.weight >= unit]
        divisor //= unit
        whole = [replace(term, weight=term.weight // divisor) for term in terms if term.weight % divisor == 0]
        rest = [term for term in terms if term.weight % divisor]
        if len(rest) == 1 and rest[0].weight == 1 and rest[0].modulo % divisor == 0:
            rest = [replace(rest[0], divide=rest[0].divide * divisor, modulo=rest[0].modulo // divisor)]
            return Index(tuple(term for term in whole + rest if term.modulo != 1))
        return Index(tuple(terms), divisor) if rest else Index(tuple(whole))

    def splits(self, *cuts: int) -> bool:
        """Whether its terms can be told apart at every cut: `quotient` and `remainder` are exact there."""
        apart = all(term.weight % cut == 0 or cut % term.weight == 0 for term in self.terms for cut in cuts)
        return apart and all(self.quotient(cut).floor == 1 for cut in cuts)

    @property
    def axes(self) -> set[str]:
        return {axis for term in self.terms for axis in term.axes}

    def render(self, dims: tuple[str, ...]) -> str:
        """The text, each tensor brought to the axes `dims` by `[:, None]`."""
        text = " + ".join(term.render(dims) for term in sorted(self.terms, key=lambda t: -t.weight) if term.text != "0") or "0"
        if self.floor > 1:
            text = f"({text}) // {self.floor}" + (f" * {self.weight}" if self.weight > 1 else "")
        return text


def suffixed(text: str, have: tuple[str, ...], dims: tuple[str, ...]) -> str:
    """`text`, a tensor with axes `have` in the order of `dims`, with an axis of one for each that it lacks."""
    if tuple(have) == tuple(dims):
        return text
    return f"{text}[{', '.join(':' if axis in have else 'None' for axis in dims)}]"
