"""Experts that Transformers holds in one tensor for all, as linear layers of their own."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Experts(torch.nn.Module):
    """Each row of x goes through the experts that its router chose, `down_proj(gate(gate_up_proj(x)))`, weighted.

    `gate_up_proj` and `down_proj` hold a layer for each expert. The gate between them is that of the module that is replaced.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        for part in ("gate_up_proj", "down_proj"):
            count, k, n = getattr(module, part).shape
            made = (torch.nn.Linear(k, n, bias=hasattr(module, f"{part}_bias"), device="meta") for _ in range(count))
            setattr(self, part, torch.nn.ModuleList(made))
        for name in list(module._parameters):
            delattr(module, name)
        self.gate = module._apply_gate  # a method is no part of the model, and nothing of its module is left to load

    def forward(self, hidden_states: torch.Tensor, router_indices: torch.Tensor, routing_weights: torch.Tensor) -> torch.Tensor:
        """y[rows, N] for x[rows, K], the experts [rows, chosen] of each row and their weights [rows, chosen]."""
        y = torch.zeros_like(hidden_states)
        for expert in router_indices.unique().tolist():
            rows, place = torch.where(router_indices == expert)
            inner = self.gate(self.gate_up_proj[expert](hidden_states[rows]))  # type: ignore[operator, index]
            found = self.down_proj[expert](inner) * routing_weights[rows, place, None]  # type: ignore[index]
            y.index_add_(0, rows, found.to(y.dtype))
        return y


def make_room(model: torch.nn.Module, names: Iterable[str]) -> None:
    """Give every layer its module: `experts.down_proj.3` one of its own where a tensor [experts, K, N] is called down_proj."""
    for whole in {name.rpartition(".")[0] for name in names if name.rpartition(".")[2].isdigit()}:
        owner, _, part = whole.rpartition(".")
        try:
            module = model.get_submodule(owner)
        except AttributeError:
            continue
        if isinstance(getattr(module, part, None), torch.nn.Parameter) and hasattr(module, "_apply_gate"):
            model.set_submodule(owner, Experts(module))
