"""Make `bitsandbytes.safetensors` and `hqq.safetensors`: layers as these libraries write them, and what they dequantize them to.

pip install torch==2.13.0 safetensors bitsandbytes==0.50.2 hqq==0.2.8.post1     # in an environment of its own
python tests/checkpoints/make_fixtures.py

Names are `case.tensor`, the tensors of a case being called as in a checkpoint; `case.truth` is the library's, of the rows from
`case.first` on. HQQ's is computed in float64 from its 16-bit scales and zeros, so that it holds no rounding.
"""

from __future__ import annotations

from pathlib import Path

import bitsandbytes.functional as bnb
import torch
from hqq.core.quantize import HQQLinear, Quantizer
from safetensors.torch import save_file

HERE = Path(__file__).parent


def weight(n: int, k: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal weights with some of much larger size."""
    drawn = torch.randn(n, k) * 0.05
    drawn[:, ::17] *= 20
    return drawn.to(dtype)


def bitsandbytes_case(n: int, k: int, kind: str, nested: bool, block: int, dtype: torch.dtype, storage: torch.dtype, first: int):
    packed, state = bnb.quantize_4bit(
        weight(n, k, dtype), blocksize=block, quant_type=kind, compress_statistics=nested, quant_storage=storage
    )
    held = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    # as one long row: where a block crosses rows the CPU kernel of 0.50.2 takes other blocks' scales, unlike the other devices'
    state.shape = torch.Size([n * k])
    truth = bnb.dequantize_4bit(packed, state).reshape(n, k)
    return {"weight": packed, **held, "truth": truth[first:], "first": torch.tensor(first)}


def hqq_case(n: int, k: int, bits: float, group: int | None, axis: int, dtype: torch.dtype, as_float: bool):
    settings = {"nbits": bits, "group_size": group, "axis": axis, "channel_wise": True, "optimize": False}
    settings |= {"round_zero": False, "view_as_float": as_float}
    asked = {"weight_quant_params": settings, "scale_quant_params": None, "zero_quant_params": None, "offload_meta": False}
    layer = torch.nn.Linear(k, n, bias=True)
    layer.weight.data = weight(n, k)
    made = HQQLinear(layer, asked, compute_dtype=dtype, device="cpu")
    scales = {"scale": made.meta["scale"].to(dtype), "zero": made.meta["zero"].to(dtype)}
    exact = {**made.meta, **{name: each.double() for name, each in scales.items()}, "compute_dtype": torch.float64}
    truth = Quantizer.dequantize(made.W_q.data, exact)
    held = {name: each for name, each in made.state_dict().items() if isinstance(each, torch.Tensor)}
    return {**held, **scales, "W_q": made.W_q.data, "truth": truth}


def save(name: str, cases: dict[str, dict[str, torch.Tensor]]) -> None:
    tensors = {f"{case}.{key}": each.contiguous().clone() for case, held in cases.items() for key, each in held.items()}
    save_file(tensors, HERE / f"{name}.safetensors")


def main() -> None:
    torch.manual_seed(0)
    f32, f16, bf16, u8 = torch.float32, torch.float16, torch.bfloat16, torch.uint8
    bits = {
        "nf4": (6, 128, "nf4", False, 64, f32, u8, 0),
        "fp4": (6, 128, "fp4", False, 64, f32, u8, 0),
        "nf4_128": (4, 256, "nf4", False, 128, f32, u8, 0),
        "nf4_nested": (4, 192, "nf4", True, 64, f32, u8, 0),
        "fp4_nested": (4, 128, "fp4", True, 64, f32, u8, 0),
        "nf4_crossing": (6, 48, "nf4", False, 64, f32, u8, 0),
        "nf4_nested_crossing": (96, 176, "nf4", True, 64, f32, u8, 90),  # more than one block of 256 scales
        "nf4_odd": (5, 33, "nf4", False, 64, f32, u8, 0),
        "nf4_half": (4, 128, "nf4", True, 64, f16, u8, 0),
        "nf4_bf16": (4, 128, "nf4", False, 64, bf16, u8, 0),
        "nf4_in_bf16": (4, 128, "nf4", False, 64, bf16, bf16, 0),
        "nf4_in_f32": (4, 128, "nf4", True, 64, f32, f32, 0),
    }
    save("bitsandbytes", {name: bitsandbytes_case(*case) for name, case in bits.items()})
    hqq = {f"bits{bits}": (4, 64, bits, 32, 1, f16, False) for bits in (8, 6, 5, 4, 3, 2, 1.58, 1)}
    hqq |= {
        "rows": (4, 96, 4, None, 1, f16, False),
        "crossing": (4, 96, 4, 64, 1, f16, False),
        "bits3_parts": (7, 24, 3, 12, 1, bf16, False),  # 14 rows in ten parts
        "single": (4, 64, 4, 64, 1, f32, False),
        "as_float": (4, 64, 4, 32, 1, f16, True),
        "bits3_as_float": (4, 64, 3, 32, 1, f16, True),
        "axis0": (8, 64, 4, 32, 0, f16, False),
    }
    save("hqq", {name: hqq_case(*case) for name, case in hqq.items()})


if __name__ == "__main__":
    main()
