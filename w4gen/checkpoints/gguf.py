"""A GGUF file: its facts, where its tensors are, and each of them as parts of a weight. Nothing is read but what is asked for.

The header is checked against the size of the file before anything of the size that it states is made (ggml's `docs/gguf.md`).
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from w4gen import quantize
from w4gen.checkpoints import gguf_blocks
from w4gen.checkpoints.folder import FETCHED
from w4gen.errors import CheckpointError
from w4gen.ir.types import Format
from w4gen.quantize import Parts

PLAIN = {0: torch.float32, 1: torch.float16, 24: torch.int8, 25: torch.int16, 26: torch.int32, 27: torch.int64, 28: torch.float64,
         30: torch.bfloat16}  # fmt: skip
"""Types that are no blocks, by their number in a file."""

_VECTORS = "a code of it stands for several weights, in a table of vectors"
UNREAD = {
    9: ("Q8_1", "it is for activations"), 15: ("Q8_K", "it is for activations"),
    16: ("IQ2_XXS", _VECTORS), 17: ("IQ2_XS", _VECTORS), 18: ("IQ3_XXS", _VECTORS), 19: ("IQ1_S", _VECTORS),
    21: ("IQ3_S", _VECTORS), 22: ("IQ2_S", _VECTORS), 29: ("IQ1_M", _VECTORS), 34: ("TQ1_0", "five weights share a byte"),
    41: ("Q1_0", "no library says what its bits are"),
}  # fmt: skip
"""Types that are known and not read, and why."""

CAUSES = {
    b"version https://git-lfs": "it is a Git LFS pointer, not the file: fetch it with `git lfs pull`",
    b"<": "it is a page of HTML or XML, not the file: the download went wrong",
    b"PK\x03\x04": "it is a zip archive: unpack it, or load it with torch if it is a .pt file",
    b"ggjt": "it is a file from before GGUF: convert it with a llama.cpp of its time",
}
"""What a file that is no GGUF may be, by its first bytes."""

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY, DIMENSIONS = 8, 9, 4


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of the file: its shape, [N, K] for a weight, the number of its type, and the byte at which it starts."""

    name: str
    shape: tuple[int, ...]
    type: int
    start: int

    @property
    def kind(self) -> str:
        """The name of its type."""
        if (block := gguf_blocks.TYPES.get(self.type)) is not None:
            return block.name
        return str(PLAIN[self.type]).removeprefix("torch.") if self.type in PLAIN else UNREAD[self.type][0]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the tensor; none are known of a type that is not read."""
        block, plain = gguf_blocks.TYPES.get(self.type), PLAIN.get(self.type)
        if block is not None:
            return self.elements // block.weights * block.bytes
        return 0 if plain is None else self.elements * plain.itemsize


@dataclass(frozen=True, slots=True)
class File:
    """A GGUF file that was checked: single facts by name (of lists only how long they are), tensors by name."""

    path: Path
    facts: Mapping[str, Any]
    entries: Mapping[str, Entry]
    stored: torch.Tensor = field(repr=False)

    def bytes_of(self, entry: Entry) -> torch.Tensor:
        """u8, as mapped from the file: nothing is read before it is used."""
        return self.stored[entry.start : entry.start + entry.bytes]

    def format(self, name: str) -> Format | None:
        """The format of a weight; None where it is not quantized. Raises `CheckpointError` where w4gen does not read it."""
        entry = self.entries[name]
        if entry.type in UNREAD:
            kind, reason = UNREAD[entry.type]
            raise CheckpointError(
                f"{self.path}: {name} is {kind}, which w4gen does not read: {reason}; take another quantization"
            )
        block = gguf_blocks.TYPES.get(entry.type)
        return None if block is None else block.format

    def parts(self, name: str) -> Parts:
        """The parts of a quantized weight [N, K], all outer dimensions together being its rows."""
        entry = self.entries[name]
        rows = self.bytes_of(entry).reshape(math.prod(entry.shape[:-1]), -1)
        factor = self.entries.get(f"{name.removesuffix('weight')}scale")
        return gguf_blocks.parts(rows, gguf_blocks.TYPES[entry.type], 1.0 if factor is None else float(self.values(factor.name)))

    def values(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor in `dtype`: as it is, or decoded, some rows at a time."""
        entry, form = self.entries[name], self.format(name)
        if form is None:
            return self.bytes_of(entry).clone().view(PLAIN[entry.type]).reshape(entry.shape).to(dtype)
        parts = self.parts(name)
        whole = torch.empty(entry.shape, dtype=dtype).reshape(-1, entry.shape[-1])
        for start in range(0, len(whole), ROWS):
            some = {each: part if len(part) != len(whole) else part[start : start + ROWS] for each, part in parts.items()}
            whole[start : start + ROWS] = quantize.values(some, form, torch.float32)
        return whole.reshape(entry.shape)


ROWS = 4096
"""Rows that are decoded at a time."""


def read(path: str | Path) -> File:
    """The facts and entries of a GGUF file. Raises `CheckpointError` naming file, tensor and likely cause."""
    path = Path(path)
    if path.is_dir():
        held = ", ".join(sorted(each.name for each in path.glob("*.gguf"))) or "none"
        raise CheckpointError(f"{path}: it is a folder: give the GGUF file in it ({held})")
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file or folder: {FETCHED}")
    if path.stat().st_size == 0:
        raise CheckpointError(f"{path}: the file is empty")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        facts, entries = _Header(data, path).all()
    stored = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    return File(path, facts, entries, stored)


class _Header:
    """A reader that never goes, or allocates, beyond the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0

    def wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}")

    def number(self, code: str) -> Any:
        form = struct.Struct(f"<{code}")
        self.room(1, form.size, "header")
        (value,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return value

    def room(self, count: int, size: int, what: str) -> None:
        """Raise `CheckpointError` where `count` things of at least `size` bytes cannot follow."""
        if count * size > len(self.data) - self.at:
            raise self.wrong(
                f"its {what} needs {count * size:,} bytes from byte {self.at:,} on, the file has {len(self.data):,}: "
                "it was cut short or is damaged; download it again"
            )

    def text(self, what: str) -> str:
        self.room(size := self.number("Q"), 1, what)
        self.at += size
        return bytes(self.data[self.at - size : self.at]).decode("utf-8", "replace")

    def value(self, kind: int, what: str) -> Any:
        """A number or a text; of a list, its length."""
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == TEXT:
            return self.text(what)
        if kind != ARRAY:
            raise self.wrong(f"{what} is of type {kind}, which GGUF does not have: the file is damaged")
        of, count = self.number("I"), self.number("Q")
        if of in SCALARS:
            self.room(count, size := struct.calcsize(f"<{SCALARS[of]}"), what)
            self.at += count * size
            return count
        if of != TEXT:
            raise self.wrong(f"{what} is a list of type {of}: w4gen reads lists of numbers and of texts")
        self.room(count, 8, what)
        for _ in range(count):
            self.text(what)
        return count

    def all(self) -> tuple[dict[str, Any], dict[str, Entry]]:
        if self.data[:4] != b"GGUF":
            cause = next(
                (cause for start, cause in CAUSES.items() if self.data[: len(start)] == start), "it is damaged or no GGUF"
            )
            raise self.wrong(f"it starts with {bytes(self.data[:4])!r}, not with b'GGUF': {cause}")
        self.at = 4
        if (version := self.number("I")) not in (2, 3):
            way = "convert it on a little-endian machine" if version & 0xFFFF == 0 else "convert it anew"
            raise self.wrong(f"it is GGUF version {version}, w4gen reads 2 and 3 in little-endian order: {way}")
        count, pairs = self.number("Q"), self.number("Q")
        self.room(pairs, 13, f"list of {pairs:,} facts")
        facts = {name: self.value(self.number("I"), name) for name in (self.text("list of facts") for _ in range(pairs))}
        self.room(count, 24, f"list of {count:,} tensors")
        return facts, self.entries(list(self.stated(count)), facts)

    def stated(self, count: int) -> Iterator[Entry]:
        """The entries as the header has them, where each starts being counted from the end of the header."""
        for _ in range(count):
            name, dimensions = self.text("list of tensors"), self.number("I")
            if dimensions > DIMENSIONS:
                raise self.wrong(f"{name} has {dimensions} dimensions, GGUF at most {DIMENSIONS}: the file is damaged")
            shape = tuple(reversed([self.number("Q") for _ in range(dimensions)]))
            yield Entry(name, shape, self.number("I"), self.number("Q"))

    def entries(self, stated: list[Entry], facts: Mapping[str, Any]) -> dict[str, Entry]:
        """The entries by name, each checked against its type and the size of the file."""
        step = facts.get("general.alignment", 32)
        if not isinstance(step, int) or step <= 0 or step & (step - 1):
            raise self.wrong(f"general.alignment is {step}, not a power of two: the file is damaged")
        start, found = -(-self.at // step) * step, dict[str, Entry]()
        for entry in stated:
            if entry.name in found:
                raise self.wrong(f"{entry.name} is there twice: the file is damaged")
            found[entry.name] = self.checked(Entry(entry.name, entry.shape, entry.type, start + entry.start))
        return found

    def checked(self, entry: Entry) -> Entry:
        block = gguf_blocks.TYPES.get(entry.type)
        if block is None and entry.type not in PLAIN and entry.type not in UNREAD:
            raise self.wrong(f"{entry.name} is of type {entry.type}, which w4gen does not know: the file is newer, or damaged")
        if block is not None and (not entry.shape or entry.shape[-1] % block.weights):
            raise self.wrong(
                f"{entry.name} {list(entry.shape)} is {block.name}, of blocks of {block.weights}: the file is damaged"
            )
        if not all(entry.shape):
            raise self.wrong(f"{entry.name} has shape {list(entry.shape)}: the file is damaged")
        if entry.start + entry.bytes > len(self.data):
            raise self.wrong(
                f"{entry.name} {list(entry.shape)} ends at byte {entry.start + entry.bytes:,}, the file has {len(self.data):,}: "
                "it was cut short; download it again"
            )
        return entry
