"""What the page of perplexities is worked out by, on a model of a few weights."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from w4gen.bench import quality


class Tiny(torch.nn.Module):
    """Logits of the next word of 7, from the last word alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up, self.head = torch.nn.Embedding(7, 32), torch.nn.Linear(32, 64, bias=False), torch.nn.Linear(64, 7)

    def forward(self, ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(torch.relu(self.up(self.embed(ids)))))


def test_perplexity_is_that_of_a_plain_loop():
    model, windows = Tiny(), torch.arange(5 * 12).reshape(5, 12) ** 2 % 7
    losses = []
    for window in windows.tolist():
        for word, following in itertools.pairwise(window):
            chances = torch.softmax(model(torch.tensor([[word]])).logits[0, 0].double(), 0)
            losses.append(-math.log(chances[following].item()))
    assert quality.perplexity(model, windows) == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)


def test_a_row_states_what_each_quantizer_does():
    model, windows = Tiny(), torch.arange(24).reshape(2, 12) % 7
    shipped = {"up": model.up.weight.detach().clone()}
    plain = quality.perplexity(model, windows)
    (exact, coarse) = quality.rows(model, shipped, windows, ["int8_row_f32", "int2_g32"])
    assert exact[:2] == ["int8_row_f32", "8.06"]
    assert [float(exact[2]), float(exact[4])] == pytest.approx([plain, plain], rel=0.01)
    assert float(exact[3]) < 0.01 < float(coarse[5]) < float(coarse[3])
    assert torch.equal(shipped["up"], Tiny().up.weight)
    assert quality.dense(model, shipped, lambda weight: weight * 1.25) == pytest.approx(0.25)
