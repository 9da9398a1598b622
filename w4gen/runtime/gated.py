"""An MLP whose gate and up are one layer that multiplies them before it rounds, saved and loaded under their names."""

from __future__ import annotations

from typing import Any

import torch

from w4gen.errors import ShapeError
from w4gen.ir.problem import PAIRED
from w4gen.runtime.launch import stored_for
from w4gen.runtime.linear import Linear
from w4gen.runtime.shared import learns, unlike
from w4gen.runtime.weight import Weight

NAMES = ("gate_proj", "up_proj")
"""What the two layers are called in state dicts."""


class Pair(Linear):
    """Gate and up, their rows in turn, with `silu_mul`. It has no state of its own: `Gated` saves and loads it."""

    def _save_to_state_dict(self, *_: Any) -> None:
        pass

    def _load_from_state_dict(self, *_: Any) -> None:
        pass

    def layers(self) -> dict[str, Linear]:
        """Gate and up as layers of their own, copies of what is held here."""
        biases = (None, None) if self.bias is None else (self.bias[0::2], self.bias[1::2])
        weights = self.weight.unpaired()
        return {
            name: Linear(stored_for(weight, self.codes.device), bias, self.batch_invariant)
            for name, weight, bias in zip(NAMES, weights, biases, strict=True)
        }


class Gated(torch.nn.Module):
    """`down_proj(silu(gate_proj(x)) * up_proj(x))` in two launches. Its state dict is that of the three layers by name."""

    def __init__(self, gate: Linear, up: Linear, down: torch.nn.Module) -> None:
        super().__init__()
        self.gate_up = Pair(Weight.paired(gate.weight, up.weight), together(gate, up), gate.batch_invariant, PAIRED)
        self.down_proj = down
        self.train(down.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_up(x))  # type: ignore[no-any-return]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, layer in self.gate_up.layers().items():
            layer._save_to_state_dict(destination, f"{prefix}{name}.", keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load gate and up, each of any layout; buffers of the same format stay where they are in memory."""
        layers, errors = self.gate_up.layers(), rest[-1]
        for name, layer in layers.items():
            layer._load_from_state_dict(state_dict, f"{prefix}{name}.", *rest)
        gate, up = layers.values()
        problem = refusal(gate, up)
        if problem:
            errors.append(f"{prefix}{NAMES[0]} and {NAMES[1]} no longer make pairs of rows: {problem}")
            return
        state = Linear(Weight.paired(gate.weight, up.weight), together(gate, up)).state_dict()
        Linear._load_from_state_dict(self.gate_up, state, "", {}, True, [], [], errors)


def together(gate: Linear, up: Linear) -> torch.Tensor | None:
    """The biases of two layers in turn."""
    return None if gate.bias is None or up.bias is None else torch.stack([gate.bias, up.bias], 1).flatten()


def refusal(gate: Linear, up: Linear) -> str:
    """Why two layers cannot be one that multiplies them; empty where they can."""
    problem = unlike((gate, up))
    if problem or any(learns(each.bias) for each in (gate, up)):
        return problem or "a bias of theirs learns, and would not be reached"
    try:
        Weight.paired(gate.weight, up.weight)
    except ShapeError as refused:
        return str(refused)
    return ""
