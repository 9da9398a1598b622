"""Whole models: which layers are converted, which are not and why, and that what is shared stays shared."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable

import pytest
import torch

import w4gen
from w4gen import models
from w4gen.errors import FormatError, ShapeError


class Block(torch.nn.Module):
    """An attention-like and an mlp-like part; 40 and 24 are no multiples of any group."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.ModuleDict({"k_proj": torch.nn.Linear(40, 24), "v_proj": torch.nn.Linear(40, 24, bias=False)})
        self.mlp = torch.nn.Sequential(torch.nn.Linear(40, 96), torch.nn.ReLU(), torch.nn.Linear(96, 40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kv = self.attention["k_proj"](x) + self.attention["v_proj"](x)
        return x + self.mlp(x) * kv.mean(-1, keepdim=True)


class Model(torch.nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(50, 40)
        self.layers = torch.nn.ModuleList(Block() for _ in range(3))
        self.lm_head = torch.nn.Linear(40, 50, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


IDS = torch.arange(10)[None]


def kinds(model: torch.nn.Module) -> dict[str, str]:
    """Name -> format of every linear layer; `float` where it is not converted."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | w4gen.Linear)}
    return {name: each.format.label if isinstance(each, w4gen.Linear) else "float" for name, each in found.items()}


def converted(report: models.Report) -> set[str]:
    return {each.name for each in report.converted}


def reasons(report: models.Report) -> dict[str, str]:
    return {each.name: each.reason for each in report.skipped}


def test_every_layer_is_converted_in_place_and_the_model_still_answers() -> None:
    model = Model().eval()
    before = model(IDS)
    report = w4gen.convert(model, "int4_g32")
    assert converted(report) == {name for name in kinds(model) if name != "lm_head"}
    assert len(report.converted) == 12
    assert kinds(model)["layers.2.mlp.2"] == "int4_g32"
    assert not any(module.training for module in model.modules())
    assert ((model(IDS) - before).norm() / before.norm()).item() < 0.2


def test_the_report_says_what_each_layer_was_and_is() -> None:
    model = Model()
    weight = model.layers[0].attention["k_proj"].weight.detach().clone()
    report = w4gen.convert(model, "nf4_g64")
    first, layer = report.converted[0], model.layers[0].attention["k_proj"]
    assert (first.name, first.n, first.k, first.format) == ("layers.0.attention.k_proj", 24, 40, "nf4_g64")
    assert (first.bytes_before, first.bytes_after) == (24 * 40 * 4, layer.weight.nbytes)
    assert first.error == pytest.approx(((layer.weight.dequantize() - weight).norm() / weight.norm()).item(), rel=1e-4)
    assert report.bytes_before == sum(each.bytes_before for each in report.converted)
    assert report.bytes_after < report.bytes_before / 4


def test_the_report_is_a_table_with_a_line_for_each_kind_of_layer() -> None:
    lines = str(w4gen.convert(Model(), "int4_g32", exclude=["*.mlp.0", "lm_haed"])).splitlines()
    assert re.split(" {2,}", lines[0]) == ["layer", "count", "out x in", "format", "bytes before", "bytes after", "largest error"]
    assert re.split(" {2,}", lines[1])[:4] == ["layers.*.attention.k_proj", "3", "24 x 40", "int4_g32"]
    assert "9 layers converted: 69,120 -> " in str(lines)
    assert "skipped layers.*.mlp.* (3): excluded" in lines
    assert "skipped lm_head (1): its weight is shared with embed.weight" in lines
    assert lines[-1] == "no linear layer matches 'lm_haed'"


class Experts(torch.nn.Module):
    """Weights of all experts in one tensor, as Transformers holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.zeros(4, 96, 40))
        self.scale = torch.nn.Parameter(torch.zeros(40))


def test_weights_that_are_in_no_linear_layer_are_counted_once_and_told() -> None:
    model = Model()  # its head is tied to the embedding
    model.experts, model.again = Experts(), torch.nn.Embedding(50, 40)
    model.again.weight = model.embed.weight
    report = w4gen.convert(model, "int4_g32")
    assert report.others == (("Experts", 4 * 96 * 40 * 4), ("Embedding", 50 * 40 * 4))
    assert str(report).splitlines()[-1] == "other weights stay as they are, 69,440 bytes: Experts 61,440, Embedding 8,000"
    assert w4gen.convert(torch.nn.Sequential(torch.nn.Linear(40, 24)), "int4_g32").others == ()


@pytest.mark.parametrize(
    ("include", "exclude", "count"),
    [
        ((), (), 13),
        ("*.mlp.*", (), 6),
        (["*.mlp.*"], ["layers.0.*"], 4),
        ((), "lm_head", 12),
        (["lm_head"], (), 1),
        ("none", (), 0),
    ],
)
def test_patterns_choose_layers(include: object, exclude: object, count: int) -> None:
    report = w4gen.convert(Model(tied=False), "int4_g32", include=include, exclude=exclude)  # type: ignore[arg-type]
    assert len(report.converted) == count
    assert len(report.converted) + len(report.skipped) == 13


def test_formats_may_differ_by_pattern_and_the_first_counts() -> None:
    model = Model(tied=False)
    report = w4gen.convert(model, {"*.k_proj": "nf4_g64", "layers.*": "int4_g32"})
    found = kinds(model)
    assert (found["layers.1.attention.k_proj"], found["layers.1.mlp.0"], found["lm_head"]) == ("nf4_g64", "int4_g32", "float")
    assert reasons(report) == {"lm_head": "no pattern of formats matches it"}


def test_a_second_time_converts_nothing_and_says_so() -> None:
    model = Model()
    w4gen.convert(model, "int4_g32")
    before = {name: id(module) for name, module in model.named_modules()}
    report = w4gen.convert(model, "nf4_g64")
    assert report.converted == ()
    assert reasons(report)["layers.0.mlp.0"] == "it is converted already (int4_g32)"
    assert before == {name: id(module) for name, module in model.named_modules()}


def test_a_tied_weight_stays_tied() -> None:
    model = Model()
    report = w4gen.convert(model, "int4_g32")
    assert model.lm_head.weight is model.embed.weight
    assert reasons(report) == {"lm_head": "its weight is shared with embed.weight"}


def test_two_layers_with_one_weight_stay_as_they_are() -> None:
    """Also where they share the data without being one parameter."""
    for share in ("parameter", "data"):
        model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 40), torch.nn.Linear(40, 40))
        if share == "parameter":
            model[1].weight = model[0].weight
        else:
            model[1].weight.data = model[0].weight.data
        report = w4gen.convert(model, "int4_g32")
        assert reasons(report) == {
            "0": "its weight is shared with 1.weight",
            "1": "its weight is shared with 0.weight",
        }
        assert converted(report) == {"2"}


def test_a_layer_with_two_names_is_converted_once_and_stays_one() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(40, 24)})
    model["b"] = model["a"]
    report = w4gen.convert(model, "int4_g32")
    assert isinstance(model["a"], w4gen.Linear)
    assert model["a"] is model["b"]
    assert len(report.converted) == 1


def test_a_layer_with_two_names_is_excluded_by_either() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(40, 24)})
    model["b"] = model["a"]
    assert w4gen.convert(model, "int4_g32", exclude=["b"]).converted == ()


def hooked() -> torch.nn.Module:
    layer = torch.nn.Linear(40, 24)
    layer.register_forward_hook(lambda *_: None)
    return layer


def broken() -> torch.nn.Module:
    layer = torch.nn.Linear(40, 24)
    layer.weight.data[3, 5] = torch.nan
    return layer


ODD: dict[str, tuple[Callable[[], torch.nn.Module], str]] = {
    "subclass": (lambda: type("Lora", (torch.nn.Linear,), {})(40, 24), "it is a Lora, not a plain nn.Linear"),
    "hooks": (hooked, "it has hooks"),
    "meta": (lambda: torch.nn.Linear(40, 24, device="meta"), "its weight is on the meta device"),
    "nan": (broken, "weight[3, 5] is nan"),
}


@pytest.mark.parametrize("case", ODD)
def test_a_layer_that_cannot_be_converted_is_left_and_the_others_are_not(case: str) -> None:
    make, reason = ODD[case]
    model = torch.nn.Sequential(odd := make(), torch.nn.Linear(40, 24))
    report = w4gen.convert(model, "int4_g32")
    assert reason in reasons(report)["0"]
    assert model[0] is odd
    assert converted(report) == {"1"}


def test_what_is_asked_wrongly_changes_nothing() -> None:
    model = Model()
    with pytest.raises(FormatError, match="unknown format 'int44'"):
        w4gen.convert(model, {"*.mlp.*": "int4_g32", "*": "int44"})
    assert set(kinds(model).values()) == {"float"}
    with pytest.raises(ShapeError, match=r"use w4gen\.Linear\.from_float"):
        w4gen.convert(torch.nn.Linear(40, 24))


def test_a_layer_is_freed_before_the_next_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(4)))
    weights = [weakref.ref(layer.weight) for layer in model]
    alive = []
    plain = w4gen.Linear.from_float

    def counted(linear: torch.nn.Linear, form: w4gen.Format, clip: bool) -> w4gen.Linear:
        gc.collect()
        alive.append(sum(each() is not None for each in weights))
        return plain(linear, form, clip)

    monkeypatch.setattr(w4gen.Linear, "from_float", counted)
    w4gen.convert(model, "int4_g32")
    assert alive == [4, 3, 2, 1]


def test_a_bar_is_drawn_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    w4gen.convert(Model(), "int4_g32")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    w4gen.convert(Model(), "int4_g32", progress=False)
    assert capsys.readouterr() == ("", "")
    w4gen.convert(Model(), "int4_g32")
    assert "converting" in capsys.readouterr().err


def test_a_converted_model_saves_and_loads() -> None:
    first, second = Model(), Model(tied=False)
    for model in (first, second):
        w4gen.convert(model, "int4_g32", exclude="lm_head")
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(IDS), second(IDS))
