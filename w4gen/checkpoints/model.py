"""A model of Transformers from a folder of safetensors: its quantized linear layers straight from the codes."""

from __future__ import annotations

import copy
from typing import Any

import torch

from w4gen.checkpoints import dialects, packed
from w4gen.checkpoints.experts import make_room
from w4gen.checkpoints.folder import Folder
from w4gen.checkpoints.gguf_model import Loaded
from w4gen.checkpoints.layer import UNREADABLE
from w4gen.checkpoints.rows import push
from w4gen.errors import CheckpointError


def empty(folder: Folder, dtype: torch.dtype | None) -> Any:
    """The model of config.json without weights."""
    _check_depth(folder)
    try:
        from accelerate import init_empty_weights
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise CheckpointError(f"{folder.path}: to build its model pip install transformers accelerate ({error})") from error
    try:
        stated = copy.deepcopy(AutoConfig.from_pretrained(str(folder.path), trust_remote_code=False))
        if hasattr(stated, "quantization_config"):
            del stated.quantization_config
        with init_empty_weights():
            return AutoModelForCausalLM.from_config(stated, dtype=dtype, trust_remote_code=False)
    except (*UNREADABLE, StrictDataclassError) as error:
        if "auto_map" in folder.stated:
            code = "its config.json asks for code of its own (auto_map), which is never run, and Transformers has no such model"
            raise CheckpointError(
                f"{folder.path}: {code}: read it, build the model, and give that to w4gen.convert or w4gen.accelerate"
            ) from error
        raise CheckpointError(f"{folder.path}: Transformers builds no model of its config.json: {error}") from error


DEPTHS = ("num_hidden_layers", "n_layer", "n_layers")
"""How config.json calls the number of layers, of which each may take long to build."""


def _check_depth(folder: Folder) -> None:
    """Raise `CheckpointError` where config.json states more layers than any name of a tensor counts."""
    told = (folder.stated, folder.stated.get("text_config"))
    stated = [said[key] for said in told if isinstance(said, dict) for key in DEPTHS if isinstance(said.get(key), int)]
    counted = 1 + max((int(part) for name in folder.entries for part in name.split(".") if part.isdecimal()), default=-1)
    if max(stated, default=0) > counted:
        problem = f"config.json says {max(stated)} layers, the names of its tensors count {counted}"
        raise CheckpointError(f"{folder.path}: {problem}: a shard may be missing, or the two are of different models")


def load(folder: Folder, dtype: torch.dtype | None, device: torch.device) -> Loaded:
    """The model, in `dtype` where it is not quantized. Layers are read one at a time, after all names and shapes were checked."""
    model = empty(folder, dtype)
    quantized = dialects.layers(folder)
    make_room(model, quantized)
    plain = _plain(folder, model, quantized)
    mapped = dtype is None or packed.claims(folder.quantization)
    found, notes = [], []
    for name in quantized:
        layer = dialects.layer(folder, name, device)
        module = model.get_submodule(name)
        if layer.shape != (module.out_features, module.in_features):
            told = f"{list(layer.shape)}, config.json says {[module.out_features, module.in_features]}"
            raise CheckpointError(f"{folder.path}: {name} is {told}: the two may be of different models")
        with dialects.placed(folder, name):
            made = layer.linear()
        model.set_submodule(name, made.to(device, dtype))
        found.append((name, layer.format.label))
        notes += layer.notes
    for target in plain:
        owner, _, parameter = target.rpartition(".")
        module, value = model.get_submodule(owner), _value(folder.tensor(target), dtype, device, mapped)
        if parameter in module._parameters:
            setattr(module, parameter, torch.nn.Parameter(value, requires_grad=False))
        else:
            module._buffers[parameter] = value
    push(model)
    if any(f"{name}.weight" in model.all_tied_weights_keys for name in quantized):
        model.config.tie_word_embeddings = False
    else:
        model.tie_weights()
    taken = {*plain, *dialects.used(folder)}
    unused = [name for name in folder.entries if name not in taken]
    model.to(device)  # what no file holds, as frequencies of rotary embeddings
    return Loaded(model.eval(), tuple(found), (), tuple(unused), tuple(notes))


def _value(tensor: torch.Tensor, dtype: torch.dtype | None, device: torch.device, mapped: bool) -> torch.Tensor:
    """A plain tensor; one that stays in the file, which must not change then, only where that is asked for."""
    found = tensor.to(device, dtype if tensor.is_floating_point() else None)
    return found if mapped or found is not tensor else tensor.clone()


def _plain(folder: Folder, model: Any, quantized: list[str]) -> list[str]:
    """The tensors that are taken as they are. Raises `CheckpointError` where folder and model do not hold the same."""
    for name in quantized:
        try:
            module = model.get_submodule(name)
        except AttributeError:
            module = None
        if type(module) is not torch.nn.Linear:
            raise CheckpointError(
                f"{folder.path}: {name} is no linear layer of {type(model).__name__}: it is called otherwise there"
            )
    held = model.state_dict()
    rest = [target for target in held if target.rpartition(".")[0] not in quantized]
    tied = {target for target, other in model.all_tied_weights_keys.items() if target not in folder.entries}
    for target in rest:
        if target in tied:
            continue
        if target not in folder.entries:
            raise CheckpointError(f"{folder.path}: {target} is missing: a shard may be, or config.json is of another model")
        shape = folder.entries[target].shape
        if shape != tuple(held[target].shape):
            told = f"has shape {list(shape)}, config.json says {list(held[target].shape)}"
            raise CheckpointError(f"{folder.entries[target].file}: {target} {told}: the two may be of different models")
    return [target for target in rest if target not in tied]
