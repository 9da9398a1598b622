"""Layers that read the same x, launched as one: each keeps its name and its state, its buffers being rows of the whole's."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch

from w4gen.errors import ShapeError
from w4gen.runtime.linear import Linear
from w4gen.runtime.ops import stored_for
from w4gen.runtime.weight import Weight


class Fan:
    """Layers in the order in which they are called with one x, and the layer that has all their rows.

    The first of them is called for all, and the others take what it left for them: where x is the same tensor, not written to in
    between. In any other case each answers for itself. So it does where a buffer is no longer a part of the whole's: moved,
    assigned, swapped.
    """

    def __init__(self, parts: tuple[Linear, ...]) -> None:
        self.parts = parts
        self._apart()
        self.left: tuple[torch.Tensor, int | None, bool, tuple[torch.Tensor, ...]] | None = None

    def _apart(self) -> None:
        self.whole: Linear | None = None
        self.held: list[tuple[dict[str, torch.Tensor | None], str, Any, int]] = []
        self.pending = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy makes its own whole, when it is first called."""
        return {"parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]
        self.pending = True

    def join(self) -> str:
        """Make the whole, whose buffers those of the parts become parts of; why not, where they are too unlike."""
        self._apart()
        problem = unlike(self.parts)
        if problem:
            return problem
        try:
            weight = Weight.stacked([part.weight for part in self.parts])
        except ShapeError as refused:
            return str(refused)
        bias = None if self.parts[0].bias is None else torch.cat([part.bias for part in self.parts])
        whole = Linear(stored_for(weight, weight.codes.device), bias, self.parts[0].batch_invariant)
        self.sizes, problem = [part.out_features for part in self.parts], self._take(whole)
        self.whole = None if problem else whole
        return problem

    def _take(self, whole: Linear) -> str:
        """Make the parts' buffers parts of a layer's, if they are in it one after the other; why not, where they are not."""
        rows: dict[str, torch.Tensor] = {
            name: each for name, each in whole._buffers.items() if each is not None and name not in whole.format.tables()
        }
        lengths = {name: [part._buffers[name].shape[0] for part in self.parts] for name in rows}  # type: ignore[union-attr]
        views = {name: each.split(lengths[name]) if each.shape[0] == sum(lengths[name]) else () for name, each in rows.items()}
        for name, each in views.items():
            if not each or not all(torch.equal(one, part._buffers[name]) for one, part in zip(each, self.parts, strict=True)):  # type: ignore[arg-type]
                return f"rows of {name} do not lie one after the other in the stored order"
            if any(one.data_ptr() % 16 for one in each):
                return f"{name} of a part would not begin at a multiple of 16 bytes"
        for place, part in enumerate(self.parts):
            for name, each in views.items():
                part._buffers[name] = each[place]
                self.held.append((part._buffers, name, ref(each[place]), each[place].data_ptr()))
        return ""

    def valid(self) -> bool:
        """Whether each buffer of each part is still a part of the whole's."""
        for buffers, name, known, place in self.held:
            each = buffers.get(name)
            if each is not known() or each is None or each.data_ptr() != place:
                return False
        return True

    def current(self) -> Linear | None:
        """The whole, if the parts are still its own."""
        if torch.compiler.is_dynamo_compiling():
            return self.whole  # addresses cannot be traced; what moves or assigns buffers makes another whole
        if self.pending:
            self.join()
        if self.whole is None or self.valid():
            return self.whole
        if any(known() is None for _, _, known, _ in self.held):
            self._apart()  # not for a while, as a functional call has it, but for good
        return None

    def answer(self, place: int, x: torch.Tensor) -> torch.Tensor | None:
        """y of one part; None where it is to answer for itself."""
        part, left = self.parts[place], self.left
        if place:
            if left is None or left[0] is not x or left[1] != version(x) or left[2] != part.batch_invariant:
                return None
            self.left = None if place == len(self.parts) - 1 else left
            return left[3][place]
        self.left, whole = None, self.current()
        if whole is None or (torch.is_grad_enabled() and any(learns(each.bias) for each in self.parts)):
            return None
        whole.batch_invariant = part.batch_invariant
        ys = whole.forward(x).split(self.sizes, -1)
        self.left = x, version(x), part.batch_invariant, ys
        return ys[0]


class Shared(Linear):
    """A `Linear` that is launched together with others that read the same x."""

    fan: Fan
    place: int

    @classmethod
    def of(cls, layer: Linear) -> Shared:
        """A layer like `layer`, as yet without others."""
        made = cls(layer.weight, layer.bias, layer.batch_invariant, layer.activation, layer.order)
        return made.train(layer.training)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        alone = residual is not None or bool(self.activation) or self._buffers.get("order") is not None
        y = None if alone else self.fan.answer(self.place, x)
        return super().forward(x, residual) if y is None else y

    @property
    def launched(self) -> Linear:
        """The layer whose kernels a call runs."""
        return self.fan.whole or self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._again()

    def _apply(self, fn: Any, recurse: bool = True) -> Linear:
        super()._apply(fn, recurse)
        self._again()
        return self

    def _again(self) -> None:
        """A new whole, where this layer's buffers are no longer the old one's."""
        if self.fan.whole is None or not self.fan.valid():
            self.fan.join()


def learns(bias: torch.Tensor | None) -> bool:
    """Whether a gradient of a bias is asked for: that of the whole's does not reach it."""
    return bias is not None and bias.requires_grad


def version(x: torch.Tensor) -> int | None:
    """How often x was written to, where that is counted and can be traced."""
    return None if torch.compiler.is_dynamo_compiling() or x.is_inference() else x._version


def shared(layers: tuple[Linear, ...]) -> tuple[Shared, ...] | str:
    """Layers in the place of `layers`, which must be called with one x in this order; or why there are none."""
    parts = tuple(map(Shared.of, layers))
    fan = Fan(parts)
    for place, part in enumerate(parts):
        part.fan, part.place = fan, place
    return fan.join() or parts


def unlike(layers: tuple[Linear, ...]) -> str:
    """Why layers cannot be one; empty where they can."""
    first = layers[0]
    facts = {
        "formats": {each.format for each in layers},
        "numbers of inputs": {each.in_features for each in layers},
        "devices": {each.codes.device for each in layers},
        "types of biases": {None if each.bias is None else each.bias.dtype for each in layers},
        "values of batch_invariant": {each.batch_invariant for each in layers},
    }
    differ = next((f"they have {len(found)} {name}" for name, found in facts.items() if len(found) > 1), "")
    if differ or first.codes.is_meta:
        return differ or "they are on the meta device: load the model first"
    if any(each.activation or each.order is not None for each in layers):
        return "one has an activation, or an order of columns, of its own"
    return ""
