"""Blocks that run on over the ends of rows, as groups that do not."""

from __future__ import annotations

import math

import torch

from w4gen.checkpoints.layer import refuse


def row_group(k: int, block: int) -> int:
    """The longest group along rows of k weights that never holds parts of two blocks of the flat stream of weights."""
    return math.gcd(k, block)


def in_rows(each: torch.Tensor, n: int, k: int, block: int, tensor: str, name: str) -> torch.Tensor:
    """One value for each block of `block` weights, as one for each group of a row: [n, k / row_group(k, block)]."""
    if each.numel() != -(-n * k // block):
        refuse(name, tensor, f"{each.numel()} scales for [{n}, {k}] in blocks of {block}", "the file may be damaged")
    group = row_group(k, block)
    return each.reshape(-1).repeat_interleave(block // group)[: n * k // group].reshape(n, k // group)
