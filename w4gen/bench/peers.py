"""Kernels of others for low-bit weights, given the codes and scales that ours are given.

A peer is loaded when it is asked for. One that is not installed, does not take a format or fails is told with the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from w4gen.errors import W4Error
from w4gen.formats import named
from w4gen.ir.types import DType, Format
from w4gen.runtime.weight import Weight

Call: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


class PeerError(W4Error):
    """A peer that cannot be measured."""


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """What a peer packs: codes u8[N, K], scales [N, groups], and what they mean."""

    format: Format
    codes: torch.Tensor
    scales: torch.Tensor
    dense: torch.Tensor
    """float32 [N, K]: scale times value."""

    @classmethod
    def of(cls, w: Weight) -> Given:
        """What a weight is made of."""
        parts = w.parts()
        return cls(w.format, parts["codes"], parts["scale"], w.dequantize())

    @property
    def n(self) -> int:
        return self.codes.shape[0]

    @property
    def k(self) -> int:
        return self.codes.shape[1]


@dataclass(frozen=True, slots=True)
class Peer:
    """A kernel of somebody else's. `package` is what pip installs, `module` what is imported, `takes` which weights it has.

    `make(given, kind)` packs a weight and gives y = f(x) for x [M, K] in `kind`; a peer's own `kind` is the one type of x that
    it has.
    """

    name: str
    package: str
    module: str
    takes: Callable[[Format], bool]
    format: str
    make: Callable[[Given, torch.dtype], Call]
    kind: torch.dtype | None = None

    def ready(self, given: Given, kind: torch.dtype) -> Call:
        """A packed weight as a function. Raises `PeerError` with the reason where there is none."""
        if not self.takes(given.format):
            raise PeerError(f"takes {self.format}, not {given.format.label}")
        try:
            importlib.import_module(self.module)
        except ImportError as error:
            raise PeerError(f"is not here ({error}): pip install {self.package}") from error
        return self.make(given, self.kind or kind)


def grouped_int4(form: Format) -> bool:
    """Codes 0 … 15 of -8 … 7 under one 16-bit scale for a group."""
    plain = form.affine and (form.bits, form.origin, form.step) == (4, -8.0, 1.0) and form.zero is None
    return plain and form.group > 0 and isinstance(form.scale, DType) and form.scale.bits == 16


def blocks_of_nf4(form: Format) -> bool:
    """NF4 under one scale for a group, which may be rounded to 16 bits."""
    return form.codebook == named("nf4_g64").codebook and form.group > 0 and isinstance(form.scale, DType) and form.zero is None


def tinygemm(given: Given, kind: torch.dtype) -> Call:
    """PyTorch's own int4 matmul, which torchao calls: codes by the byte, scales and zeros [groups, N, 2] in bfloat16."""
    packed = torch.ops.aten._convert_weight_to_int4pack(given.codes[:, ::2] << 4 | given.codes[:, 1::2], 8)
    both = torch.stack([given.scales, torch.zeros_like(given.scales)], -1).transpose(0, 1).contiguous().to(kind)
    return lambda x: torch.ops.aten._weight_int4pack_mm(x, packed, given.format.group, both)


def bitsandbytes(given: Given, kind: torch.dtype) -> Call:
    """NF4 of bitsandbytes: each block's largest value is its scale, so that it finds the codes that the weight was made of."""
    if given.k % given.format.group:
        raise PeerError(f"has blocks of {given.format.group} that cross rows of K={given.k}")
    bnb: Any = importlib.import_module("bitsandbytes")
    packed, state = bnb.functional.quantize_4bit(given.dense.to(kind), blocksize=given.format.group, quant_type="nf4")
    return lambda x: bnb.matmul_4bit(x, packed.t(), quant_state=state)


def gemlite(given: Given, kind: torch.dtype) -> Call:
    """GemLite, in the mode of its own default autotuner."""
    core: Any = importlib.import_module("gemlite.core")
    own = core.DType.FP16 if kind == torch.float16 else core.DType.BF16
    layer = core.GemLiteLinear(4, given.format.group, given.k, given.n, input_dtype=own, output_dtype=own)
    scales = given.scales.to(kind)
    layer.pack(given.codes, scales, torch.full_like(scales, -given.format.origin), None)
    return lambda x: layer(x)


def humming(given: Given, kind: torch.dtype) -> Call:
    """Humming, by its own choice of kernels: codes eight to a word, the first at its low end."""
    layers: Any = importlib.import_module("humming.layer")
    about = {"dtype": "int4", "group_size": given.format.group}
    layer = layers.HummingLayer(shape_n=given.n, shape_k=given.k, weight_config=about, torch_dtype=kind).to(given.codes.device)
    shifts = 4 * torch.arange(8, device=given.codes.device)
    words = (given.codes.view(given.n, -1, 8).long() << shifts).sum(-1)
    layer.load_from_tensors({"weight": words.to(torch.int32), "weight_scale": given.scales.to(kind)})
    layer.transform()
    getattr(layer, "prepare_default_kernel_configs", lambda: None)()  # newer releases choose when they are called
    return lambda x: layer(x)


INT4, NF4 = "4-bit integers with a 16-bit scale for a group and no zero", "NF4 with a scale for a group"
PEERS = (
    Peer("tinygemm", "torch", "torch", grouped_int4, INT4, tinygemm, torch.bfloat16),
    Peer("gemlite", "gemlite", "gemlite.core", grouped_int4, INT4, gemlite),
    Peer("humming", "humming-kernels", "humming.layer", grouped_int4, INT4, humming),
    Peer("bitsandbytes", "bitsandbytes", "bitsandbytes", blocks_of_nf4, NF4, bitsandbytes),
)


def chosen(names: Sequence[str] | None) -> tuple[Peer, ...]:
    """Peers by name; all of them for None. Raises `PeerError` on a name that is none's."""
    known = {each.name: each for each in PEERS}
    for name in names or ():
        if name not in known:
            raise PeerError(f"{name} is no peer: give one of {', '.join(known)}")
    return PEERS if names is None else tuple(known[name] for name in names)
