"""Measurements, as far as they run without a GPU: what they call, what they write, and what they refuse."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import w4gen
from w4gen.bench import decoder, end_to_end, end_to_end_report, host, invariant, limits, report, results, spans, tokens
from w4gen.bench import facts as about
from w4gen.runtime.timer import Timing


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Small tensors, one thread: several wait for each other longer than they compute where a machine has other work too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_turn_is_of_every_call_in_each_round() -> None:
    seen: list[str] = []
    us = host.turns({"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, 2, lambda: seen.append("wait"))
    turn = ["wait", *["a"] * host.TURN, "wait", *["b"] * host.TURN]
    assert seen == [*turn * 3, "wait"]
    assert us.keys() == {"a", "b"}
    assert min(us.values()) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_host_time_is_not_measured_without_a_gpu(tmp_path: Path) -> None:
    done = click.testing.CliRunner().invoke(host.main, ["--out", str(tmp_path / "host.json")])
    assert done.exit_code == 1
    assert "there is none here" in done.output
    assert not (tmp_path / "host.json").exists()


def test_a_run_says_which_code_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit of its own checkout, and not of a repository around it; the driver where its tool is."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / "it.py").write_text("1")
    subprocess.run([*git, "add", "it.py"], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "x"], check=True)
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    monkeypatch.setattr(about, "CHECKOUT", tmp_path)
    assert about.revision() == f"{w4gen.__version__}, {commit}"
    (tmp_path / "it.py").write_text("2")
    assert about.revision() == f"{w4gen.__version__}, {commit}-dirty"
    monkeypatch.setattr(about, "CHECKOUT", tmp_path / "lib")
    assert re.fullmatch(rf"{w4gen.__version__}, sources [0-9a-f]{{7}}", about.revision())
    other, before = tmp_path / "w4gen", about.revision()
    other.mkdir()
    (other / "it.py").write_text("1")
    monkeypatch.setattr(about, "PACKAGE", other)
    assert before != (made := about.revision())
    (other / "it.py").write_text("2")
    assert about.revision() not in (before, made)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 580.1\necho 580.1\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = about.facts("w4gen.cli")
    assert (found["w4gen"], found["driver"]) == (about.revision(), "580.1")
    assert f"w4gen {about.revision()}, torch {torch.__version__}, Triton" in results.where(found)
    monkeypatch.setenv("PATH", "")
    assert about.facts("w4gen.cli")["driver"] == ""
    old = {"device": "a GPU", "torch": "2", "triton": "3", "cuda": "13", "date": "today"}
    assert results.where(old | {"command": "x --out /a/b/c.json --model d/e"}) == (
        "a GPU, torch 2, Triton 3, CUDA 13, today. `x --out c.json --model d/e`"
    )


def test_spans_that_overlap_count_once() -> None:
    """A linear kernel that starts early waits while the one in front still runs."""
    seen = [("vectorized", 0.0, 4.0), ("gemv_half", 3.0, 9.0), ("fmha", 9.0, 10.0), ("nvjet_sm90", 12.0, 14.0)]
    assert spans.busy([(0.0, 4.0), (3.0, 9.0), (1.0, 2.0), (12.0, 14.0)]) == 11
    found = spans.split(seen * 2, 1)
    assert (found["linears_us"], found["rest_us"], found["kernels"]) == (7, 5, 8)
    assert found["longest_us"]["gemv_half"] == 12
    assert found["sorts_us"] == {"pointwise": 8, "attention": 2}


@pytest.mark.parametrize(
    ("name", "sort"),
    [
        ("void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native:", "strided"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::Tenso", "copies"),
        ("elementwise_kernel<128, 4, gpu_kernel_impl_nocast<direct_copy_kernel_cuda", "strided"),
        ("vectorized_elementwise_kernel<8, CUDAFunctor_add<c10::BFloat16>", "pointwise"),
        ("reduce_kernel<512, 1, ReduceOp<float, MeanOps<float", "reductions"),
        ("cudnn_generated_fort_native_sdpa_sm80_flash_fprop_wmma_f16", "attention"),
        ("triton_red_fused_add_mm_pow_rsqrt_3", "fused by Inductor"),
    ],
)
def test_other_kernels_are_told_apart_by_name(name: str, sort: str) -> None:
    assert spans.sort_of(name) == sort
    assert spans.sorts({name: 2.04, "gemv_mma": 5.0}) == {sort: 2.0}


@pytest.mark.parametrize(
    "name",
    [
        "gemv_half",
        "gemm",
        "dequant",
        "add_parts",
        "gemvNSP_kernel",
        "cutlass_80_tensorop_f16_s16816gemm",
        "triton_tem_fused_mm_0",
    ],
)
def test_kernels_of_linear_layers_are_known_by_name(name: str) -> None:
    assert spans.LINEAR.match(name)


@pytest.mark.parametrize("name", ["triton_red_fused_add_mm_pow_rsqrt_3", "fmha_cutlassF_bf16", "void at::native::reduce_kernel"])
def test_what_inductor_fuses_beside_a_linear_layer_is_none(name: str) -> None:
    assert not spans.LINEAR.match(name)


def test_what_takes_too_long_or_fails_is_noted_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "AGAIN", 0.05)
    run = end_to_end.Run(tmp_path / "it.json", 4, 4, torch.device("cpu"), time.time() + 600, results={"variants": {}})

    def refuse() -> dict:
        raise RuntimeError("out of memory\nand more")

    def announce() -> dict:
        raise RuntimeError("the compiler raised:\n\n  TimeoutError: too long\nand more")

    def swallow() -> dict:
        with contextlib.suppress(TimeoutError):
            time.sleep(30)
        time.sleep(30)
        return {}

    def look() -> dict:
        return {"noted": json.loads((tmp_path / "it.json").read_text())["variants"]["a"]["noted"]["failed"]}

    run.take("a", "long", 0.05, lambda: time.sleep(30))
    run.take("a", "swallowed", 0.05, swallow)
    run.take("a", "refused", 60, refuse)
    run.take("a", "announced", 60, announce)
    run.take("a", "unlike", 60, lambda: torch.testing.assert_close(torch.zeros(1), torch.ones(1)))
    run.take("a", "noted", 60, look)
    run.take("a", "done", 60, lambda: {"is": 1})
    dataclasses.replace(run, ends=0).take("a", "late", 5, lambda: {"is": 1})
    told = json.loads((tmp_path / "it.json").read_text())["variants"]["a"]
    assert told["long"]["failed"] == "TimeoutError: not done in 0 s"
    assert told["long"]["took_s"] < 20
    assert told["swallowed"]["failed"] == "TimeoutError: not done in 0 s"
    assert told["refused"]["failed"] == "RuntimeError: out of memory"
    assert told["announced"]["failed"] == "RuntimeError: the compiler raised: TimeoutError: too long"
    assert told["unlike"]["failed"].startswith("AssertionError: ")
    assert told["noted"]["noted"] == "the process ended within it"
    assert told["done"]["is"] == 1
    assert "no time was left" in told["late"]["failed"]


def test_a_compile_leaves_time_to_those_that_come_later() -> None:
    assert [limits.share(200, later) for later in (2, 1, 0)] == [120, 160, 200]
    assert [limits.share(60, later) for later in (2, 1, 0)] == [20, 30, 60]


def test_a_process_that_waits_in_c_is_ended(tmp_path: Path) -> None:
    code = "import time; from w4gen.bench.limits import ended\nwith ended(0.2): time.sleep(900)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "Timeout" in done.stderr


def invoked(tmp_path: Path, *options: str) -> dict:
    pytest.importorskip("transformers")
    out = tmp_path / "end-to-end-tiny.json"
    done = click.testing.CliRunner().invoke(end_to_end.main, ["--model", "tiny", "--out", str(out), *options])
    assert done.exit_code == 0, done.output
    return json.loads(out.read_text())


def test_a_tiny_decoder_is_measured_on_a_cpu(tmp_path: Path) -> None:
    """Two layers of hidden size 64; what is written is what the page is made of."""
    found = invoked(
        tmp_path,
        "--format",
        "int4_g64",
        "--format",
        "int4_g64+merged",
        "--format",
        "int4_g64+gated",
        "--prompt",
        "9",
        "--new",
        "8",
        "--batch",
        "3",
        "--compile",
        "",
    )
    plain, ours = (found["variants"][name] for name in ("bf16", "int4_g64"))
    assert not [kind for each in (plain, ours) for kind in each.values() if "failed" in kind]
    assert {"memory", "graph", "eager", "prefill", "batch 3"} <= set(plain) & set(ours)
    assert ours["memory"]["layers"] == 14
    assert ours["memory"]["skipped"] == ["lm_head: its weight is shared with model.embed_tokens.weight"]
    assert ours["memory"]["bytes"] == ours["memory"]["stored_bytes"] < ours["memory"]["plain_bytes"] == plain["memory"]["bytes"]
    for how in ("merged", "gated"):
        other = found["variants"][f"int4_g64+{how}"]
        assert other["memory"]["merged"] == 4
        assert other["memory"]["bytes"] == ours["memory"]["bytes"]
        assert 0 <= other["logits"]["token_error"] < 1e-2
    assert 0 <= ours["logits"]["token_error"] < 1e-2
    page = end_to_end_report.document(tmp_path)
    assert "## tiny: a prompt of 9 tokens, 8 new ones" in page
    assert f"{ours['graph']['tokens_s']:,.0f} (" in page


def test_only_what_is_asked_for_is_measured(tmp_path: Path) -> None:
    found = invoked(tmp_path, "--format", "int4_g64", "--prompt", "3", "--new", "8", "--only", "prefill")
    assert [set(each) for each in found["variants"].values()] == [{"memory", "prefill"}] * 2


def test_a_step_gives_what_the_model_gives_without_a_cache() -> None:
    pytest.importorskip("transformers")
    with torch.no_grad():
        model = decoder.built(end_to_end.TINY, torch.float32, torch.device("cpu"), 16)
        answer = decoder.Decoder.started(model, 2, 7, 4)
        tokens = answer.prompt
        for _ in range(3):
            tokens = torch.cat([tokens, answer.token], 1)
            assert torch.allclose(answer.step(), model(tokens).logits[:, -1], atol=1e-5)
        answer.again()
        assert torch.equal(answer.prefill().argmax(-1, keepdim=True), tokens[:, 7:8])


@pytest.mark.parametrize(
    ("gated", "count"), [(None, 7), (False, 4), pytest.param(True, 4, marks=pytest.mark.slow)], ids=["apart", "merged", "gated"]
)
def test_a_compiled_step_is_one_graph_for_every_token(gated: bool | None, count: int) -> None:
    pytest.importorskip("transformers")
    torch._dynamo.reset()
    counted = CompileCounterWithBackend("aot_eager")
    with torch.no_grad():
        model = decoder.built(end_to_end.TINY, torch.bfloat16, torch.device("cpu"), 16)
        w4gen.convert(model, "int4_g64", progress=False)
        if gated is not None:
            w4gen.merge(model, gated)
        answer, twin = (decoder.Decoder.started(model, 2, 5, 8) for _ in range(2))
        compiled = answer.by(torch.compile(model, dynamic=False, fullgraph=True, backend=counted))
        for _ in range(5):
            assert torch.equal(compiled.step(), twin.step())
    assert counted.frame_count == 1
    nodes = [node for graph in counted.graphs for node in graph.graph.nodes if "w4gen" in str(node.target)]
    assert len(nodes) == 2 * count


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int4_g64", "int4_g64+merged"])
def test_a_tiny_decoder_is_compiled(form: str, tmp_path: Path) -> None:
    """By Inductor, for the CPU; a later token that would be compiled anew is refused."""
    found = invoked(tmp_path, "--format", form, "--prompt", "9", "--new", "8", "--only", "compiled", "--budget", "600")
    for each in found["variants"].values():
        assert each["compiled"]["graphs"] == 1
        assert each["compiled"]["tokens_s"] > 0


def test_logits_that_differ_are_told() -> None:
    """A layer that multiplies by another weight than it holds is seen in both errors."""
    pytest.importorskip("transformers")
    with torch.no_grad():
        model = decoder.built(end_to_end.TINY, torch.bfloat16, torch.device("cpu"), 16)
        w4gen.convert(model, "int4_g64", progress=False)
        run = end_to_end.Run(Path("none"), 7, 4, torch.device("cpu"), 0)
        assert max(end_to_end.compared(run, model)[f"{name}_error"] for name in ("prompt", "token")) < 1e-2
        layer = model.model.layers[0].mlp.down_proj
        plain = layer.forward
        layer.forward = lambda x: -plain(x)
        found = end_to_end.compared(run, model)
    assert min(found["prompt_error"], found["token_error"]) > 1e-2


def test_tokens_that_differ_are_told_from_near_ties() -> None:
    """The fallback answers what the model without kernels does; a layer with another weight does not."""
    pytest.importorskip("transformers")
    with torch.no_grad():
        model = decoder.built(end_to_end.TINY | {"initializer_range": 0.2}, torch.bfloat16, torch.device("cpu"), 16)
        w4gen.convert(model, "int4_g64", progress=False)
        prompt = torch.arange(5)[None]
        found = tokens.followed(model, prompt, 6)
        assert found.same
        assert len(set(found.tokens)) > 1
        layer = model.model.layers[0].mlp.down_proj
        plain = layer.forward
        layer.forward = lambda x: -plain(x)
        wrong = tokens.followed(model, prompt, 6)
    assert not wrong.same
    assert max(each.gap for each in wrong.otherwise) > 0.1


def test_a_near_tie_is_one_that_16_bits_cannot_tell() -> None:
    tie, wrong = tokens.Otherwise(3, 1e-3, 2e-3), tokens.Otherwise(5, 3e-3, 2e-3)
    assert tokens.Followed((1, 2, 3, 4), (tie,)).same
    assert str(tokens.Followed((1, 2, 3, 4), (tie,))).startswith("3 of 4 tokens are those without kernels, 1 near ties, 0 wrong")
    assert not tokens.Followed((1, 2, 3, 4), (tie, wrong)).same
    assert not tokens.Otherwise(0, float("nan"), 1.0).tie
    assert not tokens.Otherwise(0, 0.0, float("nan")).tie


MADE_UP = {
    "device": "a GPU", "torch": "2", "triton": "3", "cuda": "13", "date": "today", "command": "python -m w4gen.bench.end_to_end",
    "model": "some-1b", "prompt": 512, "new": 128,
    "variants": {
        "bf16": {
            "memory": {"bytes": 3_000_000_000}, "eager": {"tokens_s": 50.0, "token_us": 20000.0},
            "graph": {"tokens_s": 250.0, "token_us": 4000.0, "linears_us": 3000.0, "rest_us": 700.0},
            "compiled": {"failed": "TimeoutError: not done in 150 s"}, "floor": {"floor_us": 1500.0}, "prefill": {"ms": 10.0},
        },
        "int4_g128": {
            "memory": {"bytes": 1_050_000_000, "stored_bytes": 1_000_000_000, "peak_more_bytes": 0, "largest_layer_bytes": 2**20},
            "eager": {"tokens_s": 60.0, "token_us": 16666.0}, "logits": {"prompt_error": 0.001, "token_error": 0.002},
            "graph": {
                "tokens_s": 500.0, "token_us": 2000.0, "linears_us": 1000.0, "rest_us": 700.0, "kernels": 90,
                "longest_us": {"gemv_mma": 900.0, "void at::native::reduce_kernel<512": 300.0, "fmha": 250.0},
            },
            "floor": {"floor_us": 800.0}, "batch 16": {"tokens_s": 4000.0},
            "prefill": {
                "ms": 11.0, "linears_us": 8000.0, "rest_us": 2000.0, "kernels": 80,
                "longest_us": {"triton_red": 5.0}, "sorts_us": {"fused by Inductor": 2000.0},
            },
        },
    },
}  # fmt: skip


def test_the_page_explains_where_the_time_of_a_token_goes(tmp_path: Path) -> None:
    (tmp_path / "end-to-end-made-up.json").write_text(json.dumps(MADE_UP))
    us = {"nn.Linear": 15.0, "w4gen.Linear": 7.5, "op": 12.0, "bound kernel": 13.0}
    row = {"m": 1, "k": 8, "n": 4, "format": "f", "dtype": "float16", "us": us, "share": 0.5, "spent_us": {"look-up": 0.3}}
    (tmp_path / "host-made-up.json").write_text(json.dumps({**MADE_UP, "rows": [row]}))
    page = end_to_end_report.document(tmp_path)
    assert "| int4_g128 | 60 (1.20 ×) | 500 (2.00 ×) |  | 4,000 |" in page
    assert "| int4_g128 | 800.0 | 200.0 | 700.0 | 300.0 | 14,666.0 | 80% |" in page
    assert "| int4_g128, graph | 90 | 300.0 | 250.0 |  | 150.0 |" in page
    assert "| int4_g128, prefill | 80 |  |  | 2,000.0 | 0.0 |" in page
    assert "| int4_g128 | 11.00 | 1.10 | 8.00 | 1,050 | 1.05 | 0 | 1 | 1.0e-03 | 2.0e-03 |" in page
    assert "- bf16, compiled: TimeoutError: not done in 150 s" in page
    assert "| 8 → 4 | 1 | f | float16 | 15.0 | 7.5 | 12.0 | 13.0 | 0.50 |" in page
    assert "look-up 0.30" in page


def test_no_results_make_no_page(tmp_path: Path) -> None:
    assert end_to_end_report.document(tmp_path) == ""


def test_the_cost_of_batch_invariance_is_measured_and_rows_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with made-up times: which calls are timed, that rows that differ are told, and the page."""
    timed: list[int] = []

    def time_calls(calls: list[Any]) -> Timing:
        timed.append(len([call() for call in calls]))
        return Timing(3.0 if len(timed) % 2 else 6.0, 0.01)

    monkeypatch.setattr(invariant, "time_calls", time_calls)
    monkeypatch.setattr(invariant, "copies_for", lambda nbytes, device: 2)
    row = invariant.measure(4, 128, 64, "int4_g64", torch.float16, torch.device("cpu"))
    assert timed == [2] * 6
    assert (row["us"], row["invariant_us"], row["cost"], row["alike"]) == (3.0, 6.0, 2.0, True)
    assert row["error"] < 1e-3
    assert "batch-invariant 6.00 (2.00 x), rows alike" in invariant.told(row)
    w = w4gen.Weight.from_float(torch.randn(64, 128), "int4_g64")
    x = torch.randn(4, 128).half()
    y = w4gen.linear(x, w, batch_invariant=True)
    assert invariant.alike(x, w, y)
    for wrong in (0, 2, 3):
        assert not invariant.alike(x, w, y.index_fill(0, torch.tensor(wrong), 0.0))
    about = {
        "device": "H200",
        "torch": "2",
        "triton": "3.6.0",
        "cuda": "13",
        "date": "today",
        "command": "w4gen.bench.invariant ",
    }
    (tmp_path / "it.json").write_text(json.dumps(about | {"invariant": [row]}))
    page = report.section(tmp_path / "it.json")
    assert "takes 2.00 times as long." in page
    assert "| 128 → 64 | 4 | int4_g64 | f16 | 3.00 | 6.00 | 2.00 | ±1.0% |" in page
    assert page.endswith("| yes |")
