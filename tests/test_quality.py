"""What the page of perplexities is worked out by, on a model of a few weights."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from w4gen.bench import quality, quality_report


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
    found = quality.perplexity(model, windows.split(2))["perplexity"]
    assert found == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)


def test_a_figure_states_what_a_quantizer_does():
    model, windows = Tiny(), torch.arange(24).reshape(2, 12) % 7
    parts = windows.split(2), windows.reshape(-1, 4).split(1)
    held = quality.subject(model, ["up"], quality.perplexity, parts, None, tokens=24)
    plain = held.shipped["perplexity"]
    assert held.shipped == {"tokens": 24, "layers": 1, **quality.perplexity(Tiny(), [windows])}
    exact = quality.figures(held, "int8_row_f32", "rounded")
    rounded, clipped = (quality.figures(held, "int2_g32", way) for way in ("rounded", "clipped"))
    assert exact["perplexity"] == pytest.approx(plain, rel=0.01)
    assert exact["error"] < 0.01 < clipped["error"] < rounded["error"]
    assert torch.equal(held.weights["up"], Tiny().up.weight)
    assert quality.put(model, held.weights, lambda weight: weight * 1.25) == pytest.approx(0.25)
    halves = quality.through_kernels(held, "int4_g32")
    assert halves["kernels"] == pytest.approx(halves["dense"], rel=0.002)
    assert halves["dense"] != rounded["perplexity"], "on shorter windows"
    assert isinstance(model.up, torch.nn.Linear)


def test_embeddings_are_means_over_tokens():
    rng = torch.Generator().manual_seed(0)
    states, mask = torch.randn(2, 5, 8, generator=rng), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    model = lambda **_: SimpleNamespace(last_hidden_state=states)  # noqa: E731
    found = quality.embeddings(model, [{"attention_mask": mask}])
    mean = states[0, :3].mean(0)
    assert torch.allclose(found[0], mean / mean.norm())
    assert quality.agreement(found, model, [{"attention_mask": mask}])["least"] == pytest.approx(1)
    assert quality.agreement(-found, model, [{"attention_mask": mask}])["cosine"] == pytest.approx(-1)


RESULTS = {
    "facts": {"python": "3.11", "torch": "2.13"},
    "language": {
        "shipped": {"tokens": 2048, "difference": 0.0, "layers": 2, "perplexity": 13.5},
        "formats": {
            "int4_g64": {"rounded": {"perplexity": 14.25, "error": 0.125}},
            "nf4_g64": {
                "rounded": {"perplexity": 15.0, "error": 0.25, "on": "cpu"},
                "halves": {"dense": 15.0, "kernels": 15.03, "on": "a GPU"},
            },
        },
    },
}


def test_the_page_tells_what_was_measured_and_what_was_not():
    lines = quality_report.page(RESULTS).splitlines()
    assert "| as shipped | 5.00 | 13.500 | 0 |  |  |" in lines
    assert "| int4_g64 | 4.25 | 14.250 | 0.1250 | not run | not run |" in lines
    assert "| nf4_g64 | 4.25 | 15.000 | 0.2500 | not run | not run |" in lines
    assert "| language | nf4_g64 | 15.0000 | 15.0300 | +0.20% |" in lines
    del RESULTS["language"]["formats"]["nf4_g64"]["halves"]
    assert "Kernels have not been compared" in quality_report.page(RESULTS)
