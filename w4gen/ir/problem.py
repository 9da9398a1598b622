"""The question that a kernel answers."""

from __future__ import annotations

from dataclasses import dataclass

from w4gen.errors import FormatError, ShapeError
from w4gen.ir.layout import Layout
from w4gen.ir.types import F16, F32, DType, Format, dtype

LARGEST = 2**36
"""Weights of a layer at most: in 4 bits they would fill half of a GPU's memory."""

EVERY = (1, 2**31 - 1)
"""The bucket of every M. Its one kernel is batch-invariant: the bits of a row of y depend on that row of x alone."""


PAIRED = "silu_mul"
"""The activation that takes outputs in pairs, gate and up: y[m, i] = silu(acc[m, 2i]) * acc[m, 2i + 1], n / 2 in all."""

ACTIVATIONS = ("", "relu", "gelu", "gelu_tanh", "silu", PAIRED)
"""What may be done to the sums before they are rounded. gelu is the exact one, by erf; gelu_tanh the usual approximation."""


def outputs(n: int, activation: str) -> int:
    """Columns of y under an activation of n sums."""
    return n // 2 if activation == PAIRED else n


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """`y[m, n] = activation(sum over k of x[m, k] * w[n, k] (+ bias[n])) (+ residual[m, n])`, for every m of a bucket.

    With `gradient` it is the gradient of that in x: x is dY [m, n], and `y[m, k] = sum over n of x[m, n] * w[n, k]` is dX.
    `layout` is None for a new weight (the schedule asks `layout_for`) and given where the codes are packed already.
    `Problem.parse(str(p)) == p`. Raises `ShapeError` on sizes below 1 and on an empty bucket.
    """

    m: tuple[int, int]
    n: int
    k: int
    format: Format
    layout: Layout | None = None
    x: DType = F16
    y: DType = F16
    accumulate: DType = F32
    bias: bool = False
    activation: str = ""
    residual: bool = False
    gradient: bool = False

    def __post_init__(self) -> None:
        for name, value in (("m", self.m[0]), ("n", self.n), ("k", self.k)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ShapeError(f"{name}={value} is not a positive whole number: a linear layer needs m, n and k of at least 1")
        if self.n * self.k > LARGEST:
            raise ShapeError(f"n={self.n} k={self.k} are {self.n * self.k:,} weights: a layer has at most {LARGEST:,}, cut it")
        if self.m[1] < self.m[0]:
            raise ShapeError(f"m={self.m[0]}..{self.m[1]} is empty: give the smaller bound first")
        if self.accumulate != F32:
            raise FormatError(f"accumulate={self.accumulate} is not supported: sums are f32")
        if self.activation not in ACTIVATIONS:
            raise ShapeError(f"activation={self.activation!r} is not known: use {', '.join(ACTIVATIONS[1:])}, or none")
        if self.activation == PAIRED and (self.n % 2 or self.residual):
            raise ShapeError(f"{PAIRED} takes outputs in pairs and adds no residual: n={self.n}, residual={int(self.residual)}")
        if self.gradient and (self.bias or self.epilogue):
            raise ShapeError(f"gradient=1 with bias={int(self.bias)} {self.epilogue}: dX = dY W has neither, leave them out")

    @property
    def over(self) -> str:
        """The axis that is summed over."""
        return "n" if self.gradient else "k"

    @property
    def inputs(self) -> int:
        """Columns of x."""
        return self.n if self.gradient else self.k

    @property
    def outputs(self) -> int:
        """Columns of y."""
        return self.k if self.gradient else outputs(self.n, self.activation)

    @property
    def epilogue(self) -> str:
        """What is done to the sums but for the bias, as `str` writes it; empty where nothing is."""
        words = [f"activation={self.activation}"] * bool(self.activation) + ["residual=1"] * self.residual
        return " ".join(words)

    @property
    def far(self) -> bool:
        """Whether offsets of 32 bits do not reach all of x or y."""
        return self.m[1] * max(self.n, self.k) >= 2**31

    def __str__(self) -> str:
        parts = [f"m={self.m[0]}..{self.m[1]} n={self.n} k={self.k} format={self.format} x={self.x} y={self.y}"]
        parts.append(f"accumulate={self.accumulate} bias={int(self.bias)}")
        parts += [self.epilogue] * bool(self.epilogue) + ["gradient=1"] * self.gradient
        return " ".join(parts + ([f"layout={self.layout}"] if self.layout else []))

    @classmethod
    def parse(cls, text: str) -> Problem:
        """The problem that `str()` wrote. Raises `ShapeError` on anything else."""
        try:
            given = dict(part.split("=", 1) for part in text.split(" "))
            low, high = given["m"].split("..")
            return cls(
                m=(int(low), int(high)),
                n=int(given["n"]),
                k=int(given["k"]),
                format=Format.parse(given["format"]),
                layout=Layout.parse(given["layout"]) if "layout" in given else None,
                x=dtype(given["x"]),
                y=dtype(given["y"]),
                accumulate=dtype(given["accumulate"]),
                bias=given["bias"] == "1",
                activation=given.get("activation", ""),
                residual=given.get("residual") == "1",
                gradient=given.get("gradient") == "1",
            )
        except (KeyError, ValueError) as error:
            raise ShapeError(
                f"cannot read the problem {text!r}: write it with str(problem), or take it from the end of a generated kernel"
            ) from error
