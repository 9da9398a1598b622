"""AWQ, as AutoAWQ writes it for both of its kernels.

gemm: qweight i32[K, N/8] and qzeros i32[groups, N/8], the eight columns of a word in an order of their own; scales [groups, N].
gemv: qweight i32[N, K/8] and qzeros i32[N, words] in order, scales [N, 8·words]: words may be more than the groups fill.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from w4gen.checkpoints.layer import Layer, Tensors, bitstream, expect, integers, need, refuse

NAME = "awq"
MARKS = (".qweight",)
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in its word each of eight columns is."""
CAUSE = "version or group_size of the quantization_config may not be those of this layer"


def claims(quantization: Mapping[str, Any]) -> bool:
    return quantization.get("quant_method") == "awq"


def read(tensors: Tensors, quantization: Mapping[str, Any], name: str) -> Layer:
    bits = quantization.get("bits", quantization.get("w_bit", 4))
    group = quantization.get("group_size", quantization.get("q_group_size", 128))
    version = str(quantization.get("version", "gemm")).lower()
    if bits != 4 or version not in ("gemm", "gemv"):
        refuse(name, "qweight", f"bits={bits}, version={version!r}", "4 bits as gemm or gemv are read: convert it to gemm")
    words, zeros = (need(tensors, each, name, 2, torch.int32) for each in ("qweight", "qzeros"))
    scales = need(tensors, "scales", name, 2)
    codes, zeros, scales = (_gemm if version == "gemm" else _gemv)(words, zeros, scales, group, name)
    form, parts = integers(codes, bits, codes.shape[1] if group == -1 else group, scales, zeros)
    return Layer(name, NAME, form, parts, tensors.get("bias"))


Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _gemm(words: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group: int, name: str) -> Parts:
    (k, width), n = words.shape, scales.shape[1]
    groups = 1 if group == -1 else -(-k // group)
    expect(words, (k, n // 8), "qweight", name, CAUSE)
    expect(scales, (groups, width * 8), "scales", name, CAUSE)
    expect(zeros, (groups, width), "qzeros", name, CAUSE)
    column = torch.arange(n).reshape(-1, 8)[:, PLACES].reshape(-1)
    codes, zeros = (bitstream(each, 4, 1, n)[:, column].T for each in (words, zeros))
    return codes, zeros, scales.T


def _gemv(words: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group: int, name: str) -> Parts:
    n, k = words.shape[0], words.shape[1] * 8
    groups = 1 if group == -1 else -(-k // group)
    wide = scales.shape[1]
    if wide < groups or wide % 8:
        refuse(name, "scales", f"has shape {list(scales.shape)}, {groups} groups are needed", CAUSE)
    expect(scales, (n, wide), "scales", name, CAUSE)
    expect(zeros, (n, wide // 8), "qzeros", name, CAUSE)
    return bitstream(words, 4, 1, k), bitstream(zeros, 4, 1, groups), scales[:, :groups]
