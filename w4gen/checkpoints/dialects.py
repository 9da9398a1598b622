"""The dialects that folders of safetensors are read in, and the layers of a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from w4gen.checkpoints import auto_round, awq, bitsandbytes, compressed_tensors, gpt_oss, gptq, hqq, modelopt, own, packed
from w4gen.checkpoints.folder import Folder
from w4gen.checkpoints.layer import UNREADABLE, Dialect, Layer, Tensors
from w4gen.errors import CheckpointError, W4Error

DIALECTS: tuple[Dialect, ...] = (gptq, awq, auto_round, compressed_tensors, modelopt, bitsandbytes, hqq, gpt_oss, own, packed)


def dialect(folder: Folder) -> Dialect | None:
    """The dialect that config.json names; None without a quantization. Raises `CheckpointError` where unknown."""
    for each in DIALECTS:
        if each.claims(folder.quantization):
            return each
    if folder.quantization:
        said, known = folder.quantization.get("quant_method"), ", ".join(each.NAME for each in DIALECTS)
        raise CheckpointError(f"{folder.path}: quant_method {said!r} of config.json is not read: known are {known}")
    marks = [name for name in folder.entries for each in DIALECTS for mark in each.MARKS if name.endswith(mark)]
    if marks:
        raise CheckpointError(f"{folder.path}: {marks[0]} is quantized, yet config.json has no quantization_config: it was lost")
    return None


def layers(folder: Folder) -> list[str]:
    """The names of the quantized layers, in the order of the files."""
    found = dialect(folder)
    marks = [(name, mark) for name in folder.entries for mark in (found.MARKS if found else ()) if name.endswith(mark)]
    return [each for name, mark in marks for each in _named(name, mark, folder.entries[name].shape)]


def _named(tensor: str, mark: str, shape: tuple[int, ...]) -> list[str]:
    """The layers that a tensor with a mark tells of."""
    name = tensor.removesuffix(mark)
    return [name] if mark[0] == "." else [f"{name}.{index}" for index in range(shape[0] if shape else 0)]


def used(folder: Folder) -> set[str]:
    """The tensors that are of quantized layers."""
    found = dialect(folder)
    under = tuple(
        f"{name.removesuffix(mark)}{mark[0]}"
        for name in folder.entries
        for mark in (found.MARKS if found else ())
        if name.endswith(mark)
    )
    return {name for name in folder.entries if name.startswith(under)}


def layer(folder: Folder, name: str, device: torch.device | str = "cpu") -> Layer:
    """One layer, read on a device. Raises `CheckpointError` that names the file, the layer and the tensor."""
    found = dialect(folder)
    if found is None:
        raise CheckpointError(f"{folder.path}: {name} is not quantized: its weight is a plain tensor")
    stack, _, index = name.rpartition(".")
    stacked = any(f"{stack}{mark}" in folder.entries for mark in found.MARKS if mark[0] != ".")
    tensors = folder.under(f"{stack}_", device, int(index)) if stacked else folder.under(f"{name}.", device)
    with placed(folder, name):
        return read(found, tensors, folder.quantization, name)


@contextmanager
def placed(folder: Folder, name: str) -> Iterator[None]:
    """Errors of a layer say where it is: its file, or the folder where it is in several."""
    try:
        yield
    except CheckpointError as error:
        files = {entry.file for each, entry in folder.entries.items() if each.startswith(f"{name}.")}
        raise CheckpointError(f"{files.pop() if len(files) == 1 else folder.path}: {error}") from error


def read(dialect: Dialect, tensors: Tensors, quantization: Mapping[str, Any], name: str) -> Layer:
    """One layer of its tensors. Raises `CheckpointError` that names the layer, whatever the tensors and the quantization are."""
    try:
        return dialect.read(tensors, quantization, name)
    except CheckpointError:
        raise
    except (*UNREADABLE, W4Error) as error:
        told = f"its tensors and the quantization_config of config.json are not as {dialect.NAME} has them"
        raise CheckpointError(f"{name}: {told} ({type(error).__name__}: {error})") from error
