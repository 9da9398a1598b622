"""What is known of devices, captures and threads without a GPU: who is refused, and who waits for whom."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import cases
import pytest
import torch

import w4gen
from w4gen.errors import ShapeError, W4Error
from w4gen.runtime import launch, ops
from w4gen.runtime.ops import VERSION


def in_threads(call: Callable[[], object], count: int = 8) -> list[object]:
    """What each thread got from `call`, all of them let go at once."""
    start, found = threading.Barrier(count), []
    threads = [threading.Thread(target=lambda: (start.wait(), found.append(call()))) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == count
    return found


@pytest.mark.parametrize("moved", ["codes", "scale", "zero", "bias"])
def test_the_op_itself_names_the_device_of_each_tensor(moved: str) -> None:
    case = cases.call("uint4_g128_z", 2, 16, 256, bias=True)
    given = {**dict(zip(case.w.names, case.w.buffers)), "bias": case.bias}
    given[moved] = given[moved].to("meta")
    *weight, bias = given.values()
    places = ", ".join(f"{name} on {'meta' if name == moved else 'cpu'}" for name in given)
    with pytest.raises(ShapeError, match=f"x is on cpu, {places}: move all of them to one device"):
        torch.ops.w4gen.linear(case.x, weight, bias, 16, str(case.w.format), str(case.w.layout), False, "", None, VERSION)


def test_a_call_that_a_capture_cannot_hold_is_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases.call("int4_g128", 2, 16, 256)
    x = case.x.requires_grad_()
    y = w4gen.linear(x, case.w)
    monkeypatch.setattr(ops, "capturing", lambda device: True)
    with pytest.raises(
        W4Error, match=r"\[2, 256\] of torch.float16 on cpu inside the capture .* dequantizes .*: call it outside"
    ):
        w4gen.linear(case.x, case.w)
    with pytest.raises(W4Error, match=r"inside the capture .* is a gradient, which dequantizes the weight"):
        y.sum().backward()


def test_a_first_call_inside_a_capture_names_the_call_to_make_and_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case, loaded = cases.call("int4_g128", 2, 16, 256), []
    call = case.x, list(case.w.buffers), None, case.w.n, str(case.w.format), str(case.w.layout)
    monkeypatch.setattr(ops, "LAUNCHES", {})
    monkeypatch.setattr(ops, "launcher", lambda *_: loaded.append(1) or (lambda *_: None))
    monkeypatch.setattr(ops, "capturing", lambda device: True)
    with pytest.raises(
        W4Error, match=r"call layer\(torch.zeros\(2, 256, dtype=torch.float16, device='cpu'\)\) once before the capture"
    ):
        ops.on_gpu(*call)
    assert not loaded
    monkeypatch.setattr(ops, "capturing", lambda device: False)
    ops.on_gpu(*call)
    monkeypatch.setattr(ops, "capturing", lambda device: True)
    ops.on_gpu(*call)
    assert loaded == [1], "a call that was made before is captured"


def test_nothing_is_captured_on_a_cpu() -> None:
    assert not launch.capturing(torch.device("cpu"))


@pytest.mark.parametrize("current", [0, 1])
def test_a_launch_is_made_on_its_own_device(current: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    @contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        seen.append(wanted)
        yield
        seen.append("back")

    monkeypatch.setattr(launch, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(launch.Launch, "_here", lambda self, call: seen.append(call))
    launch.Launch(None, torch.device("cuda:1"), 0, {}, (), ())(1, 2)
    assert seen == ([(1, 2)] if current == 1 else [torch.device("cuda:1"), (1, 2), "back"])


def test_threads_that_miss_together_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def slow(key: object, device: object) -> Callable[..., None]:
        time.sleep(0.05)
        made.append(key)
        return lambda *call: None

    monkeypatch.setattr(ops, "LAUNCHES", {})
    monkeypatch.setattr(ops, "_launch", slow)
    found = in_threads(lambda: ops._first(("a key",), torch.zeros(1, 8)))
    assert made == [("a key",)]
    assert set(found) == {ops.LAUNCHES["a key",]}


def test_the_switch_of_exact_sums_is_set_back_by_the_last_of_many_threads() -> None:
    matmul = torch.backends.cuda.matmul
    before, inside = matmul.allow_fp16_reduced_precision_reduction, []

    def call() -> None:
        for _ in range(20):
            with launch._exactly():
                time.sleep(0.0005)
                inside.append(bool(matmul.allow_fp16_reduced_precision_reduction))

    assert before
    in_threads(call)
    assert not any(inside)
    assert matmul.allow_fp16_reduced_precision_reduction == before
