"""A folder of safetensors and its config.json: which tensor is in which file, all of it checked before anything is read."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from w4gen.checkpoints import own
from w4gen.errors import CheckpointError

logger = logging.getLogger("w4gen")

INDEX = "model.safetensors.index.json"
BESIDES = (".json", ".jinja", ".txt", ".model")
"""How the files of a model end that lie beside its tensors."""
FETCHED = (
    "give a path on this machine; `hf download NAME --local-dir DIR`, or huggingface_hub.snapshot_download('NAME'), fetches a "
    "model of the Hub"
)
"""How one comes to files that are not there."""
PICKLE = "is a pickle, whose loading can run code: save the model as safetensors"
STARTS = {
    b"version https://git-lfs": "a pointer of Git LFS stands in its place: `git lfs pull` fetches the file",
    b"<": "a web page stands in its place: the download failed, perhaps for want of access; fetch it again",
    b"PK\x03\x04": f"it {PICKLE}",
    b"\x80": f"it {PICKLE}",
}
"""How files begin that stand in the place of safetensors."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor is, its shape, its type as safetensors calls it, and its bytes."""

    file: Path
    shape: tuple[int, ...]
    kind: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Folder:
    """What a checkpoint holds, by its headers, and what config.json says."""

    path: Path
    stated: dict[str, Any]
    entries: dict[str, Entry]

    @property
    def quantization(self) -> dict[str, Any]:
        return self.stated.get("quantization_config") or {}

    def tensors(self, names: Iterable[str], index: int | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors, mapped into memory, or one slice of each along their first dimension; each file is opened once."""
        for file, each in groupby(sorted(names, key=lambda name: self.entries[name].file), lambda name: self.entries[name].file):
            with opened(file) as held:
                yield from ((name, held.get_tensor(name) if index is None else held.get_slice(name)[index]) for name in each)

    def tensor(self, name: str) -> torch.Tensor:
        return dict(self.tensors([name]))[name]

    def under(self, start: str, device: torch.device | str = "cpu", index: int | None = None) -> dict[str, torch.Tensor]:
        """The tensors whose names begin with `start`, by what follows; or a slice of each."""
        names = [each for each in self.entries if each.startswith(start)]
        return {each[len(start) :]: tensor.to(device) for each, tensor in self.tensors(names, index)}


def read(path: str | Path) -> Folder:
    """Read the headers. Raises `CheckpointError` that names the file that is damaged or missing."""
    path = Path(path)
    files, listed = _files(path)
    found: dict[str, Entry] = {}
    for file in files:
        for name, entry in entries(file):
            if name in found:
                raise CheckpointError(f"{file}: {name} is in {found[name].file.name} too: two checkpoints may be mixed in {path}")
            found[name] = entry
    for name, file in listed.items():
        if name not in found or found[name].file != file:
            raise CheckpointError(f"{file}: {name} is not in it, yet {INDEX} says so: a shard may be of another version")
    stated = _json(path / "config.json")
    if not isinstance(stated.get("quantization_config") or {}, dict):
        raise CheckpointError(f"{path / 'config.json'}: its quantization_config is no JSON object: it may be damaged")
    return Folder(path, stated, found)


def _files(path: Path) -> tuple[list[Path], dict[str, Path]]:
    """The files of a checkpoint, all there, and what its index says of each tensor."""
    if path.is_file():
        gguf = "a GGUF file is quantized already: w4gen.load runs it as it is, and w4gen pack keeps its codes"
        raise CheckpointError(f"{path}: it is a file, not a folder with config.json and safetensors; {gguf}")
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such folder: {FETCHED}")
    listed: dict[str, Path] = {}
    if (path / INDEX).exists():
        told = _json(path / INDEX).get("weight_map", {})
        if not isinstance(told, dict) or not all(isinstance(file, str) for file in told.values()):
            raise CheckpointError(f"{path / INDEX}: its weight_map does not name a file for each tensor: it may be damaged")
        listed = {name: path / file for name, file in told.items()}
        files = sorted(set(listed.values()))
    else:
        files = sorted(path.glob("*.safetensors"))
        files = [path / "model.safetensors"] if path / "model.safetensors" in files else files
    if not files:
        pickles = sorted(each.name for end in ("bin", "pt", "pth") for each in path.glob(f"*.{end}"))
        way = f"{pickles[0]} {PICKLE}" if pickles else "is it this one?"
        raise CheckpointError(f"{path}: there are no safetensors in this folder; {way}")
    for match in filter(None, (re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.safetensors", each.name) for each in files)):
        names = (f"{match[1]}-{number:05}-of-{match[2]}.safetensors" for number in range(1, int(match[2]) + 1))
        files = sorted({*files, *(path / name for name in names)})
    for file in files:
        if not file.exists():
            raise CheckpointError(f"{file}: this shard is missing: the download may not be complete")
    if left := sorted(each.name for each in path.glob("*.safetensors") if each not in files):
        logger.warning("%s: not read, as %s is what counts: %s", path, INDEX if listed else files[0].name, ", ".join(left))
    return files, listed


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error}): it is part of every checkpoint") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: holds no JSON object: it may be damaged")
    return found


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A file of safetensors, mapped into memory."""
    with path.open("rb") as file:
        start = file.read(32)
    if not start:
        raise CheckpointError(f"{path}: it is empty: the download failed, or the disk was full")
    for sign, problem in STARTS.items():
        # the first 8 bytes of safetensors are the length of a header, which begins with a brace
        if start.startswith(sign) and start[8:9] != b"{":
            raise CheckpointError(f"{path}: {problem}")
    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not whole or no safetensors ({error}): the download may not be complete") from error


def entries(path: Path) -> Iterator[tuple[str, Entry]]:
    """The tensors of one file, by its header."""
    with opened(path) as file:
        for name in file.keys():  # noqa: SIM118
            view = file.get_slice(name)
            shape, kind = tuple(view.get_shape()), view.get_dtype()
            bits = int(re.sub(r"\D*(\d+).*", r"\1", kind)) if kind != "BOOL" else 8
            yield name, Entry(path, shape, kind, torch.Size(shape).numel() * bits // 8)


def save(path: Path, stated: dict[str, Any], tensors: Iterable[tuple[str, torch.Tensor]], shard: int = 2**30) -> None:
    """A new folder: config.json, and tensors in files of about `shard` bytes, of which one at a time is in memory."""
    path.mkdir(parents=True)
    held: dict[str, torch.Tensor] = {}
    count = 0
    for name, tensor in chain(tensors, [("", torch.empty(0))]):  # the last one ends the last file
        if held and (not name or sum(each.nbytes for each in held.values()) >= shard):
            count += 1
            save_file(
                held, path / f"{count}.partial", own.metadata(held, stated.get("quantization_config", {}).get("formats", {}))
            )
            held.clear()
        held[name] = tensor.contiguous()
    files = [path / f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    for number, file in enumerate(files, 1):
        (path / f"{number}.partial").rename(file)
    index(path, files)
    (path / "config.json").write_text(json.dumps(stated, indent=1))


def index(path: Path, files: Iterable[Path]) -> None:
    """Write which of its files each tensor of a folder is in."""
    place, size = dict[str, str](), 0
    for file in files:
        for name, entry in entries(file):
            place[name], size = file.name, size + entry.bytes
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": place}, indent=1))
