"""w4gen's own files: weight_packed i32[N, words], a stream along K; `weight_` and its name for each other part; weight_shape.

A slice of all tensors of two dimensions, by rows or by columns at a whole word and group, is a layer: weight_shape may stay.

weight_order i64[K], where columns are not in the order of x: column j multiplies `x[..., order[j]]`.

`formats` of the quantization_config has the format of each layer, as `str` writes it; `ordered` lists those with a weight_order.
The metadata of each file has `formats` too, of the layers in it (of all, where Transformers writes it).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from w4gen.checkpoints.layer import Layer, Tensors, bitstream, expect, need, refuse
from w4gen.errors import FormatError
from w4gen.ir import layout as layouts
from w4gen.ir.types import Format
from w4gen.runtime.dtypes import stored_as
from w4gen.runtime.weight import Weight

NAME = "w4gen"
MARKS = (".weight_packed",)
CAUSE = "the format in config.json may not be that of this layer"


def claims(quantization: Mapping[str, Any]) -> bool:
    return quantization.get("quant_method") == NAME


def write(weight: Weight, order: torch.Tensor | None = None, bias: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a layer."""
    parts, fixed = weight.parts(), weight.format.tables()
    codes, layout = parts.pop("codes"), layouts.dense(weight.n, weight.k, weight.format.bits)
    padded = torch.nn.functional.pad(codes, (0, layout.size("k") - weight.k))
    words = layouts.pack(layout, padded, torch).reshape(weight.n, -1)[:, : -(-weight.k * weight.format.bits // 32)]
    held = {"weight_packed": words, "weight_shape": torch.tensor([weight.n, weight.k])}
    held |= {_called(part): tensor for part, tensor in parts.items() if part not in fixed}
    held |= {name: each for name, each in (("weight_order", order), ("bias", bias)) if each is not None}
    return {each: tensor.contiguous() for each, tensor in held.items()}


def shapes(form: Format, n: int, k: int, ordered: bool) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """What the tensors of a layer are, but for its bias."""
    kinds = {_called(part): each for part, each in form.parts(n, k).items() if part != "codes" and part not in form.tables()}
    rest = {each: (stored_as(kind), shape) for each, (kind, shape) in kinds.items()}
    words = -(-k * form.bits // 32)
    rest |= {"weight_order": (torch.int64, (k,))} if ordered else {}
    return {"weight_packed": (torch.int32, (n, words)), "weight_shape": (torch.int64, (2,)), **rest}


def _here(words: torch.Tensor, whole: tuple[int, int], bits: int) -> tuple[int, int]:
    """The size [N, K] of these words, all of a weight or a slice of it."""
    (rows, width), (n, k) = words.shape, whole
    return min(rows, n), min(k, width * 32 // bits)


def metadata(tensors: Iterable[str], formats: Mapping[str, str]) -> dict[str, str]:
    """What a file of such tensors says of itself: the format of each layer in it, beside what Transformers looks for."""
    layers = (name.removesuffix(MARKS[0]) for name in tensors if name.endswith(MARKS))
    here = {name: formats[name] for name in layers if name in formats}
    return {"format": "pt", **({"formats": json.dumps(here)} if here else {})}


def _called(part: str) -> str:
    return f"weight_{part}".replace("zero", "zero_point").replace(".", "_")


def read(tensors: Tensors, quantization: Mapping[str, Any], name: str) -> Layer:
    text = (quantization.get("formats") or {}).get(name)
    if text is None:
        refuse(name, "weight_packed", "config.json states no format for it", "the two may be of different models")
    try:
        form = Format.parse(text)
    except FormatError as error:
        refuse(name, "weight_packed", str(error), "config.json may be of a later version")
    shape = need(tensors, "weight_shape", name).tolist()
    if len(shape) != 2 or min(shape) < 1:
        refuse(name, "weight_shape", f"is {shape}, [N, K] is needed", "the file may be damaged")
    words = need(tensors, "weight_packed", name, 2, torch.int32)
    n, k = _here(words, (shape[0], shape[1]), form.bits)
    expect(words, (n, -(-k * form.bits // 32)), "weight_packed", name, CAUSE)
    rest = [part for part in form.parts(n, k) if part != "codes" and part not in form.tables()]
    parts = {"codes": bitstream(words, form.bits, 1, k)} | {part: need(tensors, _called(part), name) for part in rest}
    return Layer(name, NAME, form, parts, tensors.get("bias"), tensors.get("weight_order"))
