"""A schedule: every choice that turns a logical program into the program of a kernel, flat and printable."""

from __future__ import annotations

from dataclasses import dataclass, fields

from w4gen.errors import ScheduleError

IN_PROGRAM = (
    "template",
    "block_m",
    "block_n",
    "block_k",
    "split_k",
    "sum_at",
    "unit",
    "side",
    "scale_at",
    "zero_at",
    "convert_at",
    "x_at",
    "w_at",
)
"""The choices that applying a schedule writes into the program; the others a template must read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How one piece is computed.

    block_n, block_k: outputs and k per program and step · unit: lanes (multiply-add), halves (of pairs of f16), mma, or vendor
    (the vendor's matmul of a dequantized weight) · side: of w in an mma · scale_at, zero_at: weight or accumulator ·
    convert_at: register, or for the vendor global · x_at, w_at: where the x that an mma reads is, and the words that are
    decoded, register or shared · split_k: programs that share a k range · sum_at: where their sums meet, global memory or
    shared (of a cluster) · warps, stages: as Triton counts them, or steps asked for ahead · teams: times these warps, which
    multiply apart from each other · maxnreg: registers a thread at most (0: the compiler's choice) · vector: neighbouring k of
    a lane where w is decoded in the order of the matrix instruction · ring: pieces of x (with w_at=shared, of words too) in
    flight · overlap: 1 to start while the kernel in front still runs (dependent launch).
    """

    template: str
    block_m: int = 1
    block_n: int = 1
    block_k: int = 128
    unit: str = "lanes"
    side: str = "right"
    scale_at: str = "accumulator"
    zero_at: str = "weight"
    convert_at: str = "register"
    x_at: str = "register"
    w_at: str = "register"
    split_k: int = 1
    sum_at: str = "global"
    warps: int = 4
    teams: int = 1
    stages: int = 1
    maxnreg: int = 0
    vector: int = 2
    ring: int = 2
    overlap: int = 0

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "block_k", "split_k", "warps", "teams", "stages"):
            if getattr(self, name) < 1:
                raise ScheduleError(f"{name}={getattr(self, name)} is not positive")
        for name, allowed in (
            ("unit", ("lanes", "halves", "mma", "vendor")),
            ("sum_at", ("shared", "global")),
            ("side", ("left", "right")),
            ("scale_at", ("weight", "accumulator")),
            ("zero_at", ("weight", "accumulator")),
            ("convert_at", ("register", "global")),
            ("x_at", ("register", "shared")),
            ("w_at", ("register", "shared")),
        ):
            if getattr(self, name) not in allowed:
                raise ScheduleError(f"{name}={getattr(self, name)!r}: use one of {', '.join(allowed)}")

    @property
    def launched(self) -> int:
        """Warps that a program is launched with: all teams, but where they part from warps that bring x, as Triton adds those."""
        return self.warps * (1 if self.x_at == "shared" else self.teams)

    def __str__(self) -> str:
        return " ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The schedule that `str()` wrote; fields left out take their defaults. Raises `ScheduleError` on anything else."""
        kinds = {field.name: field.type for field in fields(cls)}
        known = {}
        for part in text.split():
            name, _, value = part.partition("=")
            if name not in kinds or (kinds[name] == "int" and not value.isdigit()):
                raise ScheduleError(f"cannot read {part!r} of a schedule: give name=value with names {', '.join(kinds)}")
            known[name] = int(value) if kinds[name] == "int" else value
        if "template" not in known:
            raise ScheduleError(f"the schedule {text!r} names no template: add template=gemv")
        return cls(**known)  # type: ignore[arg-type]
