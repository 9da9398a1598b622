"""A decoder of Transformers, its weights random or a folder's: a static cache, one step that a CUDA graph can hold."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from w4gen.errors import ShapeError
from w4gen.runtime.epilogue import finished
from w4gen.runtime.linear import Linear


def built(
    facts: Mapping[str, Any], kind: torch.dtype, device: torch.device, length: int, folder: Path | None = None
) -> torch.nn.Module:
    """The model of a config.json on `device`, with the weights that a folder holds, else with random ones.

    Raises `ShapeError` where Transformers is not installed, and where the weights are quantized.
    """
    if folder is not None and "quantization_config" in facts:
        raise ShapeError(
            f"{folder} holds weights that are quantized: give one of plain weights, or a config.json for random ones"
        )
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ShapeError(f"transformers, which builds the model, is not to be had ({error}): install w4gen[examples]") from error
    if folder is not None:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=kind, attn_implementation="sdpa").to(device).eval()
    about = {**facts, "max_position_embeddings": length, "attn_implementation": "sdpa"}
    asked = AutoConfig.for_model(about.pop("model_type"), **about)
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(asked, dtype=kind).eval()


class Cache:
    """Keys and values of up to `length` tokens for each of `batch` answers, in memory that stays where it is."""

    def __init__(self, model: torch.nn.Module, batch: int, length: int) -> None:
        about, first = model.config, next(model.parameters())
        size = getattr(about, "head_dim", None) or about.hidden_size // about.num_attention_heads
        shape = batch, about.num_key_value_heads, length, size
        depth, options = range(about.num_hidden_layers), {"dtype": first.dtype, "device": first.device}
        self.keys, self.values = ([torch.zeros(shape, **options) for _ in depth] for _ in range(2))
        self.count = torch.zeros(1, dtype=torch.int64, device=first.device)
        """Tokens that are in it."""

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in the keys and values of new tokens; all there are. Transformers calls it."""
        at = self.count + torch.arange(key.shape[2], device=key.device)
        return self.keys[layer].index_copy_(2, at, key), self.values[layer].index_copy_(2, at, value)

    def get_seq_length(self, layer: int = 0) -> torch.Tensor:
        """Tokens that are in it. Transformers may ask."""
        return self.count


def answered(model: Callable[..., Any], cache: Cache, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [batch, words] after `tokens` [batch, q], which come after those in the cache and are in it from then on."""
    at = cache.count + torch.arange(tokens.shape[1], device=tokens.device)
    seen = torch.arange(cache.keys[0].shape[2], device=tokens.device) <= at[:, None]
    held = {
        "cache"
        if "cache" in inspect.signature(getattr(model, "_orig_mod", model).forward).parameters
        else "past_key_values": cache
    }
    logits = model(
        input_ids=tokens, position_ids=at[None], attention_mask=seen[None, None], use_cache=True, logits_to_keep=1, **held
    ).logits
    cache.count.add_(tokens.shape[1])
    return logits[:, -1]


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model in the midst of an answer: `step` takes one token for each of the batch, and makes the next one."""

    model: torch.nn.Module
    cache: Cache
    prompt: torch.Tensor
    token: torch.Tensor

    @classmethod
    def started(cls, model: torch.nn.Module, batch: int, prompt: int, new: int) -> Decoder:
        """After a random prompt of `prompt` tokens, with room for `new` ones."""
        words = model.config.vocab_size
        return cls.after(model, torch.randint(0, words, (batch, prompt), generator=torch.Generator().manual_seed(0)), new)

    @classmethod
    def after(cls, model: torch.nn.Module, prompt: torch.Tensor, new: int) -> Decoder:
        """After a prompt, i64[batch, tokens], with room for `new` tokens."""
        device, (batch, tokens) = next(model.parameters()).device, prompt.shape
        token = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        made = cls(model, Cache(model, batch, tokens + new), prompt.to(device), token)
        made.prefill()
        return made

    def prefill(self) -> torch.Tensor:
        """Read the prompt, whatever was read before; the logits after it."""
        self.cache.count.zero_()
        logits = answered(self.model, self.cache, self.prompt)
        self.token.copy_(logits.argmax(-1, keepdim=True))
        return logits

    def again(self) -> None:
        """Go back to the end of the prompt."""
        self.cache.count.fill_(self.prompt.shape[1])

    def step(self) -> torch.Tensor:
        """One token more; the logits that it was chosen by."""
        logits = answered(self.model, self.cache, self.token)
        self.token.copy_(logits.argmax(-1, keepdim=True))
        return logits

    def by(self, model: torch.nn.Module) -> Decoder:
        """The same answer, gone on with by another model, or by a compiled one."""
        return Decoder(model, self.cache, self.prompt, self.token)


class Plain(torch.nn.Module):
    """What a `Linear` stands for, without its kernels: the weight dequantized in float32 in each call, and a matmul in it."""

    def __init__(self, layer: Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.layer.bias
        y = linear(x.float(), self.layer.weight.dequantize(), None if bias is None else bias.float())
        return finished(y, self.layer.activation, None).to(x.dtype)


def without_kernels(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of a model, its w4gen layers in `Plain`."""
    twin = copy.deepcopy(model)
    for name, layer in [each for each in twin.named_modules() if isinstance(each[1], Linear)]:
        twin.set_submodule(name, Plain(layer))
    return twin
