"""Transformers' quantization method `w4gen`: importing this file registers it.

model = AutoModelForCausalLM.from_pretrained(path, quantization_config=w4gen.W4GenConfig("nf4_g64"))
model.save_pretrained(out)  # files of w4gen's own, which from_pretrained and w4gen.load read
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from w4gen.checkpoints import dialects, own
from w4gen.checkpoints.experts import make_room
from w4gen.errors import CheckpointError
from w4gen.ir.types import Format
from w4gen.patterns import by_pattern, check_matched, chosen, matches, patterns
from w4gen.runtime.gated import NAMES, Pair
from w4gen.runtime.linear import Linear
from w4gen.runtime.weight import Weight


@register_quantization_config(own.NAME)
class W4GenConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The format that linear layers are rounded to as they are loaded, or formats by pattern, as `w4gen.convert` takes them.

    `formats` and `ordered` are of a model that is quantized already (see `own`). Raises `FormatError` for an unknown format.
    """

    def __init__(
        self,
        format: str | Format | Mapping[str, str | Format] = "int4_g128",
        exclude: str | Iterable[str] = (),
        formats: Mapping[str, str] | None = None,
        ordered: Iterable[str] = (),
        **_: Any,
    ) -> None:
        self.quant_method, self.ordered = own.NAME, list(ordered)
        self.format = {pattern: str(form) for pattern, form in by_pattern(format).items()}
        self.exclude, self.formats = list(patterns(exclude)), dict(formats or {})

    def to_dict(self) -> dict[str, Any]:
        """What config.json says of a model: each layer's format once they are known."""
        known, asked = {"formats": self.formats, "ordered": self.ordered}, {"format": self.format, "exclude": self.exclude}
        found: dict[str, Any] = json.loads(json.dumps({"quant_method": self.quant_method, **(known if self.formats else asked)}))
        return found


class Stored(torch.nn.Module):
    """A layer while it is loaded: the tensors of w4gen's own files, which become a `Linear` when all are there."""

    def __init__(self, module: torch.nn.Linear, form: Format, ordered: bool) -> None:
        super().__init__()
        for name, (kind, shape) in own.shapes(form, module.out_features, module.in_features, ordered).items():
            self.register_buffer(name, torch.empty(shape, dtype=kind, device="meta"))
        self.bias = module.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise CheckpointError("the layer was not loaded to the end: from_pretrained makes a w4gen.Linear of it")


class Rounded(ConversionOps):  # type: ignore[misc]
    """Rounds a weight as it is loaded, and puts a `Linear` in its layer's place."""

    def __init__(self, choose: Mapping[str, Format]) -> None:
        self.choose = choose

    def convert(
        self, input_dict: dict[str, Any], model: Any, full_layer_name: str, missing_keys: set[str], **_: Any
    ) -> dict[str, torch.Tensor]:
        """Nothing is left to put into the model: the layer holds its weight."""
        (value,) = input_dict.values()
        value = value[0] if isinstance(value, list) else value
        name = full_layer_name.removesuffix(".weight")
        form = chosen([name], self.choose)
        if form is not None:
            model.set_submodule(name, Linear(Weight.from_float(value, form), model.get_submodule(name).bias))
            missing_keys.discard(full_layer_name)
        return {}


@register_quantizer(own.NAME)
class W4GenQuantizer(HfQuantizer):  # type: ignore[misc]
    """Rounds the layers of a plain checkpoint while it is loaded, or takes those of w4gen's own files as they are."""

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        """Whether a parameter is the weight of a linear layer that is to be rounded."""
        name, _dot, parameter = param_name.rpartition(".")
        said = self.quantization_config
        tied = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
        if self.pre_quantized or parameter != "weight" or param_name in tied or matches([name], said.exclude):
            return False
        return type(model.get_submodule(name)) is torch.nn.Linear and chosen([name], by_pattern(said.format)) is not None

    def get_quantize_ops(self) -> Rounded:
        return Rounded(by_pattern(self.quantization_config.format))

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        said = self.quantization_config
        formats = said.formats if self.pre_quantized else {}
        if not self.pre_quantized:
            layers = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]
            check_matched(type(model).__name__, layers, *said.format, *said.exclude)
        make_room(model, formats)
        for name, text in formats.items():
            module = model.get_submodule(name)
            if type(module) is not torch.nn.Linear:
                raise CheckpointError(f"{name} is no linear layer of {type(model).__name__}: config.json may be of another model")
            model.set_submodule(name, Stored(module, Format.parse(text), name in said.ordered))

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        for name in [name for name, module in model.named_modules() if isinstance(module, Stored)]:
            tensors = model.get_submodule(name).state_dict()
            layer = dialects.read(own, tensors, {"formats": self.quantization_config.formats}, name)
            model.set_submodule(name, layer.linear().to(layer.parts["codes"].device))
        _tell(model, self.quantization_config)

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """The tensors of w4gen's own files, with all that is not quantized."""
        layers = _layers(model)
        under = tuple(f"{name}." for name in layers)
        state = {key: tensor for key, tensor in model.state_dict().items() if not key.startswith(under)}
        for name, held in layers.items():
            layer = held.layers()[name.rpartition(".")[2]] if isinstance(held, Pair) else held
            state |= {f"{name}.{each}": tensor for each, tensor in own.write(layer.weight, layer.order, layer.bias).items()}
        _tell(model, self.quantization_config)
        return state, own.metadata(state, self.quantization_config.formats)

    def is_serializable(self, **_: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True


def _layers(model: Any) -> dict[str, Linear]:
    """The w4gen layers of a model by the names that they are saved under: of gate and up as one, both have it."""
    found = dict[str, Linear]()
    for name, module in model.named_modules():
        if isinstance(module, Pair):
            found |= {f"{name.rpartition('.')[0]}.{each}": module for each in NAMES}
        elif isinstance(module, Linear):
            found[name] = module
    return found


def _tell(model: Any, said: W4GenConfig) -> None:
    """Say the formats of a model's layers as they are now."""
    layers = _layers(model)
    said.formats = {name: str(layer.format) for name, layer in layers.items()}
    said.ordered = [name for name, layer in layers.items() if layer.order is not None]


def foreign(model: Any) -> bool:
    """Whether a model says that it is of another quantization method."""
    said = getattr(model.config, "quantization_config", None) or {}
    return (said.get("quant_method") if isinstance(said, Mapping) else said.quant_method) not in (None, own.NAME)


def keep(model: Any) -> None:
    """Make a model that holds w4gen's layers one of this method, so that `save_pretrained` writes them.

    Transformers refuses `half()` and `float()` of what it calls quantized; w4gen's layers take them.
    """
    said = W4GenConfig()
    _tell(model, said)
    model.config.quantization_config = said
    model.hf_quantizer, model.is_quantized, model.quantization_method = W4GenQuantizer(said), False, own.NAME
