"""w4gen: a compiler-style generator of Triton kernels for linear layers with low-bit weights.

    layer = w4gen.Linear.from_float(nn_linear, "int4_g128")
    kernel = w4gen.compile("1x1536x256", "nf4_g64", arch="sm_90")   # no GPU needed

Names are loaded when first used: importing w4gen imports neither torch nor triton.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from w4gen.version import __version__ as __version__

if TYPE_CHECKING:
    from w4gen.api import compile, supports
    from w4gen.bench.ablate import ablate
    from w4gen.bench.cold import cold
    from w4gen.bench.compare import compare
    from w4gen.bench.curve import curve
    from w4gen.bench.machine import roofline
    from w4gen.bench.profile import profile
    from w4gen.bench.tune import tune
    from w4gen.checkpoints.accelerate import accelerate
    from w4gen.checkpoints.inspect import inspect
    from w4gen.checkpoints.load import load
    from w4gen.checkpoints.quantizer import W4GenConfig
    from w4gen.errors import W4Error
    from w4gen.ir.types import Format
    from w4gen.merging import merge
    from w4gen.models import convert
    from w4gen.runtime.launch import bind
    from w4gen.runtime.linear import Linear, linear
    from w4gen.runtime.warmup import warmup
    from w4gen.runtime.weight import Weight

_PLACES = {
    "compile": "w4gen.api",
    "supports": "w4gen.api",
    "W4Error": "w4gen.errors",
    "W4GenConfig": "w4gen.checkpoints.quantizer",
    "accelerate": "w4gen.checkpoints.accelerate",
    "ablate": "w4gen.bench.ablate",
    "cold": "w4gen.bench.cold",
    "compare": "w4gen.bench.compare",
    "curve": "w4gen.bench.curve",
    "roofline": "w4gen.bench.machine",
    "profile": "w4gen.bench.profile",
    "tune": "w4gen.bench.tune",
    "Format": "w4gen.ir.types",
    "bind": "w4gen.runtime.launch",
    "convert": "w4gen.models",
    "Linear": "w4gen.runtime.linear",
    "inspect": "w4gen.checkpoints.inspect",
    "linear": "w4gen.runtime.linear",
    "load": "w4gen.checkpoints.load",
    "merge": "w4gen.merging",
    "Weight": "w4gen.runtime.weight",
    "warmup": "w4gen.runtime.warmup",
}
__all__ = [
    "Format",
    "Linear",
    "W4Error",
    "W4GenConfig",
    "Weight",
    "ablate",
    "accelerate",
    "bind",
    "cold",
    "compare",
    "compile",
    "convert",
    "curve",
    "inspect",
    "linear",
    "load",
    "merge",
    "profile",
    "roofline",
    "supports",
    "tune",
    "warmup",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'w4gen' has no attribute {name!r}: it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
