"""A whole model: every `nn.Linear` that matches becomes a `w4gen.Linear`, one at a time, in place."""

from __future__ import annotations

import logging
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from w4gen.errors import FormatError, ShapeError
from w4gen.ir.types import Format
from w4gen.patterns import by_pattern, chosen, kind_of, matches, patterns, unmatched
from w4gen.progress import tracked
from w4gen.runtime.linear import Linear
from w4gen.runtime.reference import error

logger = logging.getLogger("w4gen")


@dataclass(frozen=True, slots=True)
class Converted:
    """One layer that was converted: its weight [n, k], the weight's bytes before and after, and its relative Frobenius error."""

    name: str
    n: int
    k: int
    format: str
    bytes_before: int
    bytes_after: int
    error: float


@dataclass(frozen=True, slots=True)
class Skipped:
    """One linear layer that was left as it was, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """What `convert` did, layer by layer. `str()` is a table, with layers that differ only in a number in one line.

    `unmatched` are the patterns that no linear layer's name matches: misspelt, perhaps. `others` are the bytes of weights of two
    or more dimensions in modules that are no linear layers, by the modules' type, largest first: they stay as they are.
    """

    converted: tuple[Converted, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    unmatched: tuple[str, ...] = ()
    others: tuple[tuple[str, int], ...] = ()

    @property
    def bytes_before(self) -> int:
        """Bytes of the weights that were converted, before."""
        return sum(each.bytes_before for each in self.converted)

    @property
    def bytes_after(self) -> int:
        """Bytes of the same weights now: codes, scales and the rest."""
        return sum(each.bytes_after for each in self.converted)

    def __str__(self) -> str:
        rows = [("layer", "count", "out x in", "format", "bytes before", "bytes after", "largest error")]
        rows += [_row(kind, layers) for kind, layers in _by_kind(self.converted)]
        widths = [max(map(len, column)) for column in zip(*rows)]
        left = (0, 3)  # names; the other columns hold numbers
        lines = [
            "  ".join(cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))).rstrip()
            for row in rows
        ] * bool(self.converted)
        times = f", {self.bytes_before / self.bytes_after:.2f} times smaller" if self.converted else ""
        count = f"{len(self.converted)} layers converted"
        lines.append(f"{count}: {self.bytes_before:,} -> {self.bytes_after:,} bytes of weights{times}")
        lines += reasons("skipped", self.skipped)
        if self.others:
            each = ", ".join(f"{kind} {size:,}" for kind, size in self.others)
            lines.append(f"other weights stay as they are, {sum(size for _, size in self.others):,} bytes: {each}")
        lines += [f"no linear layer matches {pattern!r}" for pattern in self.unmatched]
        return "\n".join(lines)


def reasons(verb: str, skipped: Iterable[Skipped]) -> list[str]:
    """A line for each kind of layer and reason: `skipped lm_head (1): excluded`."""
    counts = Counter((kind_of(each.name), each.reason) for each in skipped)
    return [f"{verb} {kind} ({count}): {reason}" for (kind, reason), count in counts.items()]


def _by_kind(layers: Iterable[Converted]) -> Iterable[tuple[str, list[Converted]]]:
    kinds = defaultdict(list)
    for each in layers:
        kinds[kind_of(each.name), each.n, each.k, each.format].append(each)
    return [(kind[0], same) for kind, same in kinds.items()]


def _row(kind: str, layers: list[Converted]) -> tuple[str, ...]:
    first, before, after = layers[0], sum(each.bytes_before for each in layers), sum(each.bytes_after for each in layers)
    worst = max(each.error for each in layers)
    return kind, str(len(layers)), f"{first.n} x {first.k}", first.format, f"{before:,}", f"{after:,}", f"{worst:.2%}"


def convert(
    model: torch.nn.Module,
    format: str | Format | Mapping[str, str | Format] = "int4_g128",
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    progress: bool = True,
    clip: bool = False,
) -> Report:
    """Replace every `nn.Linear` of `model` that matches by a `w4gen.Linear`, in place, rounding to nearest; say what was done.

    With `clip` groups are cut before, where that leaves less squared error.

    Patterns are those of `fnmatch` on the whole name of a layer (`"lm_head"`, `"*.mlp.*"`). A layer is converted if a pattern of
    `include` matches it (none given: every layer) and none of `exclude` does. `format` may be a dict of patterns to formats: the
    first that matches counts, and a layer that none matches is skipped. A module with several names is converted once, under all
    of them. Skipped with a reason: a weight that another module holds too (a tied embedding), as converting it would add memory
    and untie the two; subclasses of `nn.Linear` and layers with hooks, whose ways would be lost; weights that the format cannot
    hold. Layers are converted one at a time, where their weights are, so one layer's memory is needed besides the model's. A
    second call converts nothing. A model of Transformers is of the quantization method `w4gen` from then on: `save_pretrained`
    writes files of w4gen's own. Raises `W4Error`, before anything is changed, where `model` is a Linear or a format not valid.
    """
    if isinstance(model, torch.nn.Linear | Linear):
        raise ShapeError("the model is itself a linear layer, which has no place to be replaced in: use w4gen.Linear.from_float")
    choose = by_pattern(format)
    include, exclude = patterns(include), patterns(exclude)
    converted, skipped, layers, holders = [], [], _layers(model), _holders(model)
    for names in tracked(layers, len(layers), "converting", progress):
        module = model.get_submodule(names[0])
        form = chosen(names, choose)
        reason = _refusal(module, names, include, exclude) or _sharer(module, names, holders)
        if form is None or reason:
            skipped.append(Skipped(names[0], reason or "no pattern of formats matches it"))
            continue
        try:
            converted.append(_replace(model, names, module, form, clip))
        except (FormatError, ShapeError) as refused:
            skipped.append(Skipped(names[0], str(refused)))
    if converted:
        _keep(model)
    every = [name for names in layers for name in names]
    return Report(tuple(converted), tuple(skipped), unmatched(every, *choose, *include, *exclude), _others(model))


def of_transformers(model: Any) -> bool:
    """Whether a model is of Transformers, which then is imported already: other models do not pay for its import."""
    theirs = sys.modules.get("transformers.modeling_utils")
    return theirs is not None and isinstance(model, theirs.PreTrainedModel)


def _keep(model: Any) -> None:
    """Have a model of Transformers saved with its w4gen layers; where that cannot be, say so."""
    if not of_transformers(model):
        return
    lost = "save_pretrained will lose the layers that were converted"
    try:
        from w4gen.checkpoints import quantizer
    except ImportError as error:
        logger.warning("%s: this release of Transformers is too old (%s)", lost, error)
        return
    if quantizer.foreign(model):
        logger.warning("%s: others quantized the model and save it their way; w4gen.accelerate(model) changes that", lost)
    else:
        quantizer.keep(model)


def _layers(model: torch.nn.Module) -> list[list[str]]:
    """All names of every linear layer, in the model's order. Modules themselves are not held, so that they can be freed."""
    names = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, torch.nn.Linear | Linear):
            names[id(module)].append(name)
    return list(names.values())


def _others(model: torch.nn.Module) -> tuple[tuple[str, int], ...]:
    """`Report.others`: a tensor that several modules hold counts once."""
    sizes, seen = Counter[str](), set[object]()
    for module in model.modules():
        for each in () if isinstance(module, torch.nn.Linear | Linear) else module.parameters(recurse=False):
            if each.dim() > 1 and _place(each) not in seen:
                seen.add(_place(each))
                sizes[type(module).__name__] += each.nbytes
    return tuple(sizes.most_common())


def _holders(model: torch.nn.Module) -> dict[object, list[str]]:
    """Where a tensor's data is -> the names of the parameters and buffers, one for each module, that hold it."""
    holders = defaultdict(list)
    for name, module in model.named_modules():
        for held, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                holders[_place(tensor)].append(f"{name}.{held}")
    return holders


def _place(tensor: torch.Tensor) -> object:
    """Equal for tensors that share their data."""
    return (tensor.device, tensor.data_ptr()) if tensor.numel() and not tensor.is_meta else id(tensor)


HOOKED = "it has hooks, which would be lost: remove them first"


def hooked(module: torch.nn.Module) -> bool:
    """Whether a call does more than the class says. A forward that compressed-tensors set, which sets a status too, does not."""
    forward = "forward" in vars(module) and not hasattr(module, "quantization_status")
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or forward)


def _refusal(module: torch.nn.Module, names: list[str], include: tuple[str, ...], exclude: tuple[str, ...]) -> str:
    """Why a layer stays as it is, but for what it shares; empty where it is to be converted."""
    if isinstance(module, Linear):
        return f"it is converted already ({module.format.label})"
    if matches(names, exclude):
        return "excluded"
    if include and not matches(names, include):
        return "not included"
    if type(module) is not torch.nn.Linear:
        return f"it is a {type(module).__name__}, not a plain nn.Linear"
    if hooked(module):
        return HOOKED
    if module.weight.is_meta:
        return "its weight is on the meta device: load the model first"
    return ""


def _sharer(module: torch.nn.Module, names: list[str], holders: dict[object, list[str]]) -> str:
    """Why a layer stays: another module holds its weight too. Empty where none does."""
    held = holders.get(_place(module.weight), []) if isinstance(module.weight, torch.Tensor) else []
    others = [other for other in held if other.rpartition(".")[0] not in names]
    return f"its weight is shared with {others[0]}" if others else ""


def _replace(model: torch.nn.Module, names: list[str], module: torch.nn.Module, form: Format, clip: bool) -> Converted:
    """Put a converted layer in the place of `module`. Raises `W4Error` where the format cannot hold the weight."""
    layer = Linear.from_float(module, form, clip).train(module.training)  # type: ignore[arg-type]
    before: torch.Tensor = module.weight.detach()  # type: ignore[assignment, operator]
    found = error(layer.weight.dequantize(), before)
    for name in names:
        model.set_submodule(name, layer)
    return Converted(names[0], *before.shape, form.label, before.nbytes, layer.weight.nbytes, found)
