"""A model of Transformers from a GGUF file: its linear layers straight from the codes, all else as it is.

Transformers builds the modules, and knows how GGUF calls and reorders tensors; its own loader would dequantize all of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from w4gen.checkpoints import gguf
from w4gen.checkpoints.layer import UNREADABLE, Layer
from w4gen.errors import CheckpointError
from w4gen.models import Skipped
from w4gen.runtime.linear import Linear


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model, its layers that run from codes (name, format), what was dequantized and why, tensors that are unused, warnings."""

    model: torch.nn.Module
    layers: tuple[tuple[str, str], ...]
    dequantized: tuple[Skipped, ...]
    unused: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        formats = Counter(form for _, form in self.layers)
        lines = [f"{count} layers run from codes ({form})" for form, count in formats.items()]
        lines += [f"{each.name} was dequantized: {each.reason}" for each in self.dequantized]
        return "\n".join([*lines, *(f"{name} was not used" for name in self.unused), *self.notes])


def load(path: str | Path, dtype: torch.dtype = torch.float16) -> Loaded:
    """The model of a GGUF file, in `dtype` where it is not quantized. Raises `CheckpointError` where it would not be whole.

    A linear layer whose weight is quantized becomes a `Linear` over the stored codes. So does a head that is tied to the
    embedding, which is dequantized for itself.
    """
    file = gguf.read(path)
    if file.facts.get("split.count", 1) > 1:
        raise CheckpointError(
            f"{file.path}: it is one of {file.facts['split.count']} files: `llama-gguf-split --merge` joins them"
        )
    model, processor = _empty(file, dtype)
    sources, layers, dequantized, plain = _sources(file, model, processor), [], [], dict[str, torch.nn.Parameter]()
    for target, name in sources.items():
        owner, _, parameter = target.rpartition(".")
        module, form = model.get_submodule(owner), file.format(name)
        linear = parameter == "weight" and type(module) is torch.nn.Linear and form is not None
        order = _order(processor, file.entries[name]) if linear else None
        if order is not None:
            model.set_submodule(owner, _layer(file, name, order).linear())
            layers.append((owner, form.label))  # type: ignore[union-attr]
            model.config.tie_word_embeddings &= target not in model.all_tied_weights_keys
            continue
        if form is not None:
            reason = "its weight is more than reordered" if linear else f"it is of a module {type(module).__name__}"
            dequantized.append(Skipped(owner, f"{reason}, stored as {file.entries[name].kind}"))
        if name not in plain:
            plain[name] = torch.nn.Parameter(_processed(processor, file, name).to(dtype), requires_grad=False)
        setattr(module, parameter, plain[name].data if isinstance(module, Linear) else plain[name])
    return Loaded(model.eval(), tuple(layers), tuple(dequantized), tuple(sorted({*file.entries} - {*sources.values()})))


def _empty(file: gguf.File, dtype: torch.dtype) -> tuple[Any, Any]:
    """The model without weights, and what Transformers does to the tensors of its architecture."""
    try:
        from accelerate import init_empty_weights
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor
    except ImportError as error:
        raise CheckpointError(f"{file.path}: to build its model pip install transformers gguf accelerate ({error})") from error
    architecture = str(file.facts.get("general.architecture", "none"))
    try:
        stated = AutoConfig.from_pretrained(str(file.path.parent), gguf_file=file.path.name, trust_remote_code=False)
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(stated, dtype=dtype, trust_remote_code=False)
    except (*UNREADABLE, StrictDataclassError) as error:
        raise CheckpointError(f"{file.path}: Transformers builds no model of architecture {architecture!r}: {error}") from error
    return model, TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=stated.to_dict())


def _sources(file: gguf.File, model: Any, processor: Any) -> dict[str, str]:
    """Parameter of the model -> tensor of the file, in the model's order. A tied parameter has the tensor that it is tied to."""
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

    names = get_gguf_hf_weights_map(model, processor)
    found = {target: name for name, target in names.items() if name in file.entries}
    if model.config.tie_word_embeddings:
        tied = model.all_tied_weights_keys.items()
        found |= {target: found[other] for target, other in tied if target not in found and other in found}
    missing = [target for target in model.state_dict() if target not in found]
    if missing:
        raise CheckpointError(
            f"{file.path}: {len(missing)} parameters of {type(model).__name__} are not in the file, {missing[0]} the first: "
            "w4gen loads no part of a model, and no merged experts"
        )
    return {target: found[target] for target in model.state_dict()}


def _layer(file: gguf.File, name: str, order: torch.Tensor) -> Layer:
    """A weight of the file, its rows in another order."""
    parts = {each: part if len(part) != len(order) else part[order] for each, part in file.parts(name).items()}
    return Layer(f"{file.path}: {name}", f"GGUF {file.entries[name].kind}", file.format(name), parts)  # type: ignore[arg-type]


def _order(processor: Any, entry: gguf.Entry) -> torch.Tensor | None:
    """The rows of the file's weight in the model's order; None where it is not just another order."""
    n, k = entry.shape
    marks = [
        np.broadcast_to(np.arange(n, dtype=np.int32)[:, None], (n, k)),
        np.broadcast_to(np.arange(k, dtype=np.int32), (n, k)),
    ]
    made, columns = (np.asarray(processor.process(weights=mark, name=entry.name).weights) for mark in marks)
    if not np.array_equal(columns, marks[1]) or (made != made[:, :1]).any() or (np.sort(made[:, 0]) != marks[0][:, 0]).any():
        return None
    return torch.from_numpy(made[:, 0].astype(np.int64))


def _processed(processor: Any, file: gguf.File, name: str) -> torch.Tensor:
    """A tensor in float32, as the model has it."""
    return torch.from_numpy(np.ascontiguousarray(processor.process(weights=file.values(name).numpy(), name=name).weights))
