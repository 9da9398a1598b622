"""Who quantizes a whole model before it is measured: w4gen, bitsandbytes, or nobody."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from w4gen.bench.peers import PeerError
from w4gen.models import convert


@dataclass(frozen=True, slots=True)
class Quantizer:
    """`convert(model, format)` quantizes linear layers in place and says what it left as it was; `module` is what that needs.

    only: the one format that it has, whatever is asked for.
    """

    module: str
    convert: Callable[[torch.nn.Module, Any], list[str]]
    only: str = ""


def by_w4gen(model: torch.nn.Module, format: Any) -> list[str]:
    """Every linear layer in a format of w4gen's, by rounding to nearest."""
    return [f"{each.name}: {each.reason}" for each in convert(model, format, progress=False).skipped]


def by_bitsandbytes(model: torch.nn.Module, _: Any) -> list[str]:
    """Every linear layer in bitsandbytes' NF4, blocks of 64, scales in f32; one whose weight another module holds stays."""
    bnb: Any = importlib.import_module("bitsandbytes")
    held = Counter(id(each) for module in model.modules() for each in module._parameters.values())
    plain = [(name, each) for name, each in model.named_modules() if type(each) is torch.nn.Linear]
    shared = [name for name, each in plain if held[id(each.weight)] > 1]
    chosen = [(name, each) for name, each in plain if name not in shared]
    for name, each in chosen:
        k, n, weight = each.in_features, each.out_features, each.weight.detach()
        how = {"compress_statistics": False, "quant_type": "nf4"}
        layer = bnb.nn.Linear4bit(k, n, each.bias is not None, weight.dtype, device="meta", **how)
        layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, module=layer, **how).to(weight.device)
        layer.bias = each.bias
        model.set_submodule(name, layer)
    return [f"{name}: its weight is another module's too" for name in shared]


def by_nobody(model: torch.nn.Module, _: Any) -> list[str]:
    """Leave all layers in 16 bits."""
    return []


QUANTIZERS = {
    "w4gen": Quantizer("w4gen", by_w4gen),
    "bitsandbytes": Quantizer("bitsandbytes", by_bitsandbytes, "NF4"),
    "none": Quantizer("torch", by_nobody, "16 bits"),
}


def known(name: str) -> Quantizer:
    """The quantizer called so. Raises `PeerError` where there is none, or what it needs is not installed."""
    if name not in QUANTIZERS:
        raise PeerError(f"nobody called {name!r} quantizes models here: give one of {', '.join(QUANTIZERS)}")
    try:
        importlib.import_module(QUANTIZERS[name].module)
    except ImportError as error:
        raise PeerError(f"{name} is not here ({error}): pip install {name}") from error
    return QUANTIZERS[name]
