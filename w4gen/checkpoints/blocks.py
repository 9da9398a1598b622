"""What readers of blocks share: tensors by name, and blocks that run on over the ends of rows as groups that do not."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from w4gen.errors import CheckpointError


def needed(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """The tensor called `name`. Raises `CheckpointError` where there is none."""
    if name not in tensors:
        raise CheckpointError(f"{name} is missing beside {', '.join(sorted(tensors)) or 'nothing'}: the file is incomplete")
    return tensors[name]


def row_group(k: int, block: int) -> int:
    """The longest group along rows of k weights that never holds parts of two blocks of the flat stream of weights."""
    return math.gcd(k, block)


def in_rows(each: torch.Tensor, n: int, k: int, block: int) -> torch.Tensor:
    """One value for each block of `block` weights, as one for each group of a row: [n, k / row_group(k, block)]."""
    if each.numel() != -(-n * k // block):
        raise CheckpointError(f"there are {each.numel()} scales for [{n}, {k}] in blocks of {block}: the file is damaged")
    group = row_group(k, block)
    return each.reshape(-1).repeat_interleave(block // group)[: n * k // group].reshape(n, k // group)
