"""Whose order of columns may go to the rows in front: what a forward must look like, and which weights it works for."""

from __future__ import annotations

import pytest
import torch

import w4gen
from w4gen.checkpoints import rows


class Mlp(torch.nn.Module):
    """An MLP as decoders have it; the columns of its down_proj are in an order of their own."""

    def __init__(self, form: str = "int4_g32", activation: torch.nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate_proj, self.up_proj = (
            w4gen.Linear.from_float(torch.nn.Linear(64, 96, bias=bias), form) for bias in (True, False)
        )
        down = w4gen.Weight.from_float(torch.randn(64, 96), "uint4_g32_z")
        self.down_proj = w4gen.Linear(down, order=torch.randperm(96))
        self.act_fn = activation or torch.nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Spelt(Mlp):
    def forward(self, x):
        x = x * 2
        down = self.down_proj(self.up_proj(x) * self.act_fn(self.gate_proj(x)))
        return down + 1


class Shifted(Mlp):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).roll(1, -1))


class Twice(Mlp):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) + self.gate_proj(x).sum()


class Named(Mlp):
    def forward(self, x):
        product = self.gate_proj(x) * self.up_proj(x)
        return self.down_proj(product)


class Weighted(torch.nn.Module):
    """An activation that depends on the place of a value."""

    def forward(self, x):
        return x * torch.arange(x.shape[-1])


def hooked() -> Mlp:
    made = Mlp()
    made.up_proj.register_forward_hook(lambda *_: None)
    return made


def shared() -> torch.nn.Module:
    made = Mlp()
    made.other = made.up_proj
    return made


PUSHED = {
    "plain": Mlp,
    "spelt otherwise": Spelt,
    "one scale a row": lambda: Mlp("nf4_row"),
    "gelu": lambda: Mlp(activation=torch.nn.GELU()),
}
LEFT = {
    "a shift between": Shifted,
    "a use elsewhere": Twice,
    "a name between": Named,
    "an activation that knows places": lambda: Mlp(activation=Weighted()),
    "an activation that learned": lambda: Mlp(activation=torch.nn.PReLU(96)),
    "hooks": hooked,
    "another name": shared,
    "a scale for all": lambda: Mlp("nvfp4"),
    "no order": lambda: [made := Mlp(), setattr(made.down_proj, "order", None)][0],
}


@pytest.mark.parametrize("kind", PUSHED)
def test_the_order_goes_to_the_rows_in_front(kind):
    model = torch.nn.Sequential(PUSHED[kind]())
    x, order = torch.randn(3, 64), model[0].down_proj.order
    before, rows_before = model(x), model[0].up_proj.weight.dequantize()
    assert rows.push(model) == ["0.down_proj"]
    assert model[0].down_proj.order is None
    assert torch.equal(model[0].up_proj.weight.dequantize(), rows_before[order])
    assert torch.allclose(model(x), before, atol=1e-4)
    assert rows.push(model) == []


@pytest.mark.parametrize("kind", LEFT)
def test_where_it_is_not_certain_the_gather_stays(kind):
    model = torch.nn.Sequential(LEFT[kind]())
    x, order = torch.randn(3, 64), model[0].down_proj.order
    before = model(x)
    assert rows.push(model) == []
    assert model[0].down_proj.order is order
    assert torch.equal(model(x), before)
