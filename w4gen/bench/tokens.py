"""Greedy tokens of a model with kernels, held against those of the same model without, token for token."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch

from w4gen.bench.decoder import Decoder, without_kernels


@dataclass(frozen=True, slots=True)
class Otherwise:
    """A token that was chosen otherwise: how far apart the f32 logits of the two choices are, and how exact those in 16 bits.

    `noise` is twice the largest error of a logit of the model without kernels: two of them may move towards each other.
    """

    place: int
    gap: float
    noise: float

    @property
    def tie(self) -> bool:
        """Whether rounding to 16 bits, with no kernel in it, may choose either."""
        return self.gap <= self.noise

    def __str__(self) -> str:
        return f"token {self.place}: f32 logits {self.gap:.1e} apart, which 16 bits move by up to {self.noise:.1e}"


@dataclass(frozen=True, slots=True)
class Followed:
    """What a model answers, and where the same model without kernels would have gone on otherwise; `str()` tells it."""

    tokens: tuple[int, ...]
    otherwise: tuple[Otherwise, ...]

    @property
    def same(self) -> bool:
        """Whether every token is the one chosen without kernels, but for near ties."""
        return all(each.tie for each in self.otherwise)

    def __str__(self) -> str:
        count, wrong = len(self.tokens), sum(not each.tie for each in self.otherwise)
        head = f"{count - len(self.otherwise)} of {count} tokens are those without kernels"
        told = f"{len(self.otherwise) - wrong} near ties, {wrong} wrong"
        return "\n".join([f"{head}, {told}", *map(str, self.otherwise)])


@torch.no_grad()
def followed(model: torch.nn.Module, prompt: torch.Tensor, count: int) -> Followed:
    """The `count` likeliest tokens after a prompt, i64[1, tokens], one by one; each also asked of the model without kernels.

    All go on with the token of the model with kernels, so that every token is compared, those after a near tie too.
    """
    plain = without_kernels(model)
    exact = torch.nn.Module.float(copy.deepcopy(plain))  # models of Transformers may refuse their own
    ours, *others = (Decoder.after(each, prompt, count) for each in (model, plain, exact))
    tokens, otherwise = [], []
    for place in range(count):
        _, theirs, exact = ((each.step() if place else each.prefill())[0].float() for each in (ours, *others))
        chosen, other = int(ours.token), int(theirs.argmax())
        if chosen != other:
            gap, noise = (exact[chosen] - exact[other]).abs(), 2 * (theirs - exact).abs().max()
            otherwise.append(Otherwise(place, float(gap), float(noise)))
        tokens.append(chosen)
        for each in others:
            each.token.copy_(ours.token)
    return Followed(tuple(tokens), tuple(otherwise))
