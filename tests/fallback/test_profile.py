"""Profiles without a GPU: its clocks are made up; the model, its layers, their rows and what is worked out are not."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import w4gen
from w4gen.bench import decoder, end_to_end, profile, quantizers, report
from w4gen.bench.peers import PeerError
from w4gen.cli import cli
from w4gen.errors import ShapeError, W4Error
from w4gen.runtime.timer import Timing

CPU = torch.device("cpu")


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is made up: a layer takes 2 us where it is quantized, else 6 us; reading takes 1 us, events say 3 us."""
    pytest.importorskip("transformers")

    def alone(layer: torch.nn.Module, m: int, nbytes: int, x: torch.Tensor) -> tuple[float, float]:
        assert (x.shape, x.dtype) == ((m, layer.in_features), torch.bfloat16)
        layer(x)
        return (6.0 if type(layer) is torch.nn.Linear else 2.0), 0.01

    monkeypatch.setattr(profile, "here", lambda: torch.device("cpu"))
    monkeypatch.setattr(profile, "alone", alone)
    monkeypatch.setattr(profile, "floor", lambda *_: Timing(1.0, 0.0))
    monkeypatch.setattr(profile, "event_us", lambda layers, run: dict.fromkeys(profile.seen(layers, run), 3.0))
    monkeypatch.setattr(profile, "in_graph", lambda decoder, call, calls: (200.0, call))
    monkeypatch.setattr(profile, "warmup", lambda *_, **__: None)
    monkeypatch.setattr("w4gen.commands.profile.detected", lambda: "sm_90")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(end_to_end.TINY))
    return tmp_path


def test_both_phases_with_every_layer_and_its_rows(on_a_gpu: None) -> None:
    found = w4gen.profile(end_to_end.TINY, "int4_g64", "bfloat16", prompt=9)
    assert list(found["phases"]) == ["decode", "prefill"]
    for phase, m in (("decode", 1), ("prefill", 9)):
        layers = {each["name"]: each for each in found["phases"][phase]["layers"]}
        assert len(layers) == 8
        assert {each["m"] for name, each in layers.items() if name != "lm_head"} == {m}
        assert layers["lm_head"]["m"] == 1, "logits of the last token alone"
        down = layers["model.layers.*.mlp.down_proj"]
        assert (down["count"], down["k"], down["n"], down["stored"]) == (2, 128, 64, "int4_g64")
        assert down["bytes"] == 64 * 128 // 2 + 64 * 2 * 2, "codes and two scales a row"
        assert (down["us"], down["dense_us"], down["floor_us"], down["event_us"]) == (2.0, 6.0, 1.0, 3.0)
        assert down["tax"] == pytest.approx(1 / 3, abs=1e-4)
        assert down["share"] == pytest.approx(2 * 2 / 200)
        assert down["gain"] == pytest.approx(200 / (200 - 2 * (2 - 1)), abs=1e-4)
        assert down["host_us"] > 0
        head = layers["lm_head"]
        assert (head["stored"], head["tax"], head["bytes"]) == ("bfloat16", 1.0, 256 * 64 * 2)
        assert found["phases"][phase]["layers"][0]["name"] == "lm_head", "who pays most comes first"
        assert layers["model.layers.*.self_attn.q_proj"]["bytes"] == 64 * 64 // 2 + 64 * 2 + 64 * 2, "with a bias"
    assert found["skipped"] == ["lm_head: its weight is shared with model.embed_tokens.weight"]
    assert w4gen.profile(end_to_end.TINY, "int4_g64", "bfloat16", "none", prompt=3)["format"] == "16 bits"
    assert (found["quantizer"], found["format"], found["dtype"], found["prompt"]) == ("w4gen", "int4_g64", "bfloat16", 9)


def test_what_fell_back_is_told_once(on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = w4gen.Linear.forward

    def falls_back(self: Any, x: torch.Tensor) -> torch.Tensor:
        logging.getLogger("w4gen").warning("a layer %d -> %d has no kernel", self.in_features, self.out_features)
        return forward(self, x)

    monkeypatch.setattr(w4gen.Linear, "forward", falls_back)
    told = w4gen.profile(end_to_end.TINY, "int4_g64", "bfloat16", prompt=3)["fallbacks"]
    assert sorted(told) == sorted(set(told))
    assert "a layer 128 -> 64 has no kernel" in told
    before = list(logging.getLogger("w4gen").handlers)
    assert not [each for each in before if each.level == logging.WARNING], "nothing listens any more"


def test_hooks_are_gone_afterwards_and_time_is_of_the_layer_alone() -> None:
    slow, fast = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    slow.forward = lambda x: time.sleep(0.004) or x  # type: ignore[method-assign]
    spent = profile.host_us({"slow": slow, "fast": fast}, lambda: (slow(torch.zeros(2, 4)), fast(torch.zeros(2, 4))))
    assert spent["slow"] > 4000 > spent["fast"]
    assert not slow._forward_hooks
    assert not slow._forward_pre_hooks
    with pytest.raises(ZeroDivisionError), profile.watched({"fast": fast}, lambda *_: 1 / 0, print):
        fast(torch.zeros(1, 4))
    assert not fast._forward_pre_hooks


def test_events_begin_after_a_busy_gpu_and_an_empty_interval_is_subtracted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is made up runs what is in its queue; the host is slow, and is not seen."""
    clock, queue = [0.0], list[tuple[str, Any]]()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            clock[0] += 0.5  # what recording costs the GPU
            self.at = clock[0]
            queue.append(("event", self))

        def elapsed_time(self, other: Event) -> float:
            return (other.at - self.at) / 1e3

    def run() -> None:
        layer(torch.zeros(3, 4))

    def forward(x: torch.Tensor) -> torch.Tensor:
        clock[0] += 7.0
        queue.append(("layer", None))
        return x

    layer = torch.nn.Linear(4, 4)
    layer.forward = forward  # type: ignore[method-assign]
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: queue.append(("busy", cycles)), raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert profile.event_us({"layer": layer}, run) == {"layer": pytest.approx(7.0)}
    assert [kind for kind, _ in queue[-4:]] == ["busy", "event", "layer", "event"]


def test_layers_that_are_alike_but_for_their_rows_are_apart() -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(3)])

    def run() -> None:
        for each, rows in zip(model, (1, 2, 2), strict=True):
            each(torch.zeros(1, rows, 4))

    assert [each.m for each in profile.seen(profile.linears(model), run).values()] == [1, 2, 2]


def test_bitsandbytes_takes_the_layers_that_w4gen_takes() -> None:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("transformers")
    with torch.no_grad():
        model = decoder.built(end_to_end.TINY, torch.bfloat16, CPU, 16)
        assert quantizers.known("bitsandbytes").convert(model, None) == ["lm_head: its weight is another module's too"]
        layer = profile.Seen(model.model.layers[0].mlp.down_proj, 1)
        assert layer.stored == "Linear4bit"
        assert layer.bytes >= 64 * 128 // 2 + 64 * 128 // 64 * 4
        assert len(profile.seen(profile.linears(model), lambda: model(torch.zeros(1, 3, dtype=torch.int64)))) == 15


def test_a_quantizer_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PeerError, match="nobody called 'gptq' quantizes models here: give one of w4gen, bitsandbytes, none"):
        quantizers.known("gptq")
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(PeerError, match=r"bitsandbytes is not here \(.*\): pip install bitsandbytes"):
        quantizers.known("bitsandbytes")
    model = SimpleNamespace()
    assert quantizers.known("none").convert(model, None) == []  # type: ignore[arg-type]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli, ["profile", *arguments], standalone_mode=False)


def test_the_command_prints_both_phases_and_writes_json(on_a_gpu: None, tiny: Path) -> None:
    out = tiny / "results" / "profile-tiny.json"
    done = run(str(tiny), "--format", "int4_g64", "--dtype", "bfloat16", "--prompt", "5", "--out", str(out))
    assert done.exception is None
    told = " ".join(done.output.split())
    assert "decode 200.0 us in a CUDA graph; in bfloat16 200.0 us (1.00 x) layer count M K->N" in told
    assert "model.layers.*.mlp.down_proj 2 5 128->64 int4_g64 2.00 50% 3.00" in told
    assert "6.00 0.33 2.0% 1.010 x" in told
    assert "left as it was: lm_head: its weight is shared" in told
    facts = json.loads(out.read_text())
    assert facts["model"] == str(tiny)
    page = report.section(out)
    assert f"{tiny.name} in int4_g64 by w4gen, x in bfloat16, a prompt of 5 tokens; weights: random." in page
    assert "| model.layers.*.mlp.down_proj | 2 | 1 | 128 → 64 | int4_g64 | 2.00 | 50% | 3.00 |" in page


def test_the_weights_of_a_folder_are_taken(on_a_gpu: None, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is multiplied by is what was saved; without weights, and of a config.json, they are random."""
    saved = decoder.built(end_to_end.TINY, torch.bfloat16, CPU, 16)
    expected = saved.model.layers[1].mlp.up_proj.weight.detach().fill_(0.125).clone()
    about = json.loads((tiny / "config.json").read_text())
    seen: list[Any] = []
    convert = quantizers.known("w4gen").convert

    def converted(model: torch.nn.Module, form: Any) -> list[str]:
        seen.append(model.model.layers[1].mlp.up_proj.weight.detach().clone())
        return convert(model, form)

    monkeypatch.setattr(profile, "known", lambda name: SimpleNamespace(convert=converted, only=""))
    asked = ("--format", "int4_g64", "--dtype", "bfloat16", "--prompt", "5")
    assert run(str(tiny), *asked).stdout.splitlines()[0] == "weights: random"
    saved.save_pretrained(tiny)
    assert run(str(tiny), *asked).stdout.splitlines()[0] == f"weights: {tiny}"
    assert run(str(tiny / "config.json"), *asked).stdout.splitlines()[0] == "weights: random"
    assert [torch.equal(each, expected) for each in seen] == [False, True, False]
    (tiny / "config.json").write_text(json.dumps(about | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ShapeError, match=r"holds weights that are quantized: give one of plain weights, or a config\.json"):
        raise run(str(tiny), *asked).exception


def test_a_layer_that_beats_its_floor_is_told(on_a_gpu: None, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "floor", lambda *_: Timing(2.1, 0.0))
    told = run(str(tiny), "--format", "int4_g64", "--dtype", "bfloat16", "--prompt", "5").output
    line = "MEASURING ERROR: decode, model.layers.*.mlp.down_proj in 2.00 us beats its floor of 2.10 us by more than noise (1.0%)"
    assert line in told.splitlines()


def test_without_a_gpu_bounds_and_predictions_are_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("w4gen.commands.profile.detected", lambda: "portable")
    with pytest.raises(W4Error, match=r"run w4gen profile where one is; w4gen roofline --model Qwen2\.5-1\.5B"):
        raise run("Qwen2.5-1.5B").exception
    with pytest.raises(ShapeError, match=r"is no config\.json"):
        raise run("nowhere").exception
