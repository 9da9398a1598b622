"""What a launch knows of the weights that it may read early. No GPU is needed to know it."""

from __future__ import annotations

import copy
import io
import types

import cases
import pytest
import torch

import w4gen
from w4gen import toolchain
from w4gen.runtime import launch
from w4gen.runtime.launch import unwritten
from w4gen.schedule.arch import ARCHES


def layer(form: str = "uint4_g128_z") -> w4gen.Linear:
    made = w4gen.Linear(cases.call(form, 1, 16, 256).w)
    assert not unwritten(made.weight.buffers), "nothing was known of them"
    assert unwritten(made.weight.buffers)
    return made


def test_buffers_stay_unwritten_until_they_are_written() -> None:
    made = layer()
    assert all(unwritten(made.weight.buffers) for _ in range(3))


@pytest.mark.parametrize("name", ["codes", "scale", "zero"])
def test_a_write_to_any_buffer_is_seen_once(name: str) -> None:
    made = layer()
    held = getattr(made.weight, name)
    held.copy_(held.clone())
    assert not unwritten(made.weight.buffers)
    assert unwritten(made.weight.buffers)


@pytest.mark.parametrize("write", ["zero_", "add_", "index", "out"])
def test_other_writes_are_seen_too(write: str) -> None:
    made = layer()
    scale = made.weight.scale
    match write:
        case "zero_":
            scale.zero_()
        case "add_":
            scale.add_(1)
        case "index":
            scale.reshape(-1)[0] = 1
        case _:
            torch.add(scale, 1, out=scale)
    assert not unwritten(made.weight.buffers)


def test_a_loaded_state_is_seen() -> None:
    made, other = layer(), w4gen.Linear(cases.call("uint4_g128_z", 1, 16, 256, seed=1).w)
    made.load_state_dict(other.state_dict())
    assert not unwritten(made.weight.buffers)
    assert torch.equal(made.weight.codes, other.weight.codes)


def test_a_copy_starts_anew() -> None:
    """What copies the buffers is a write to the copy, and may be running still."""
    made = layer()
    for other in (copy.deepcopy(made), copy.copy(made.weight).clone(), made.weight.to("cpu").clone()):
        assert not unwritten(getattr(other, "weight", other).buffers)
    assert unwritten(made.weight.buffers)


def test_another_tensor_in_the_place_of_one_is_seen() -> None:
    made = layer()
    codes, scale, *rest = made.weight.buffers
    assert not unwritten((codes, scale.clone(), *rest))


def test_a_layer_that_was_called_is_saved_and_loaded() -> None:
    made, file = layer(), io.BytesIO()
    torch.save(made.state_dict(), file)
    file.seek(0)
    made.load_state_dict(torch.load(file, weights_only=True))
    assert not unwritten(made.weight.buffers)


def test_nothing_is_known_of_inference_tensors() -> None:
    with torch.inference_mode():
        made = w4gen.Linear(cases.call("int4_g128", 1, 16, 256).w)
        w = made.weight.clone()
    assert w.codes.is_inference()
    assert not any(unwritten(w.buffers) for _ in range(3))


def test_a_weight_of_two_layers_is_known_by_both() -> None:
    made = layer()
    other = w4gen.Linear(made.weight)
    made.weight.codes.add_(0)
    assert not unwritten(made.weight.buffers)
    assert unwritten(other.weight.buffers) == (other.weight.codes is made.weight.codes)


def loaded(scratch: int = 0) -> types.SimpleNamespace:
    """A kernel as Triton loads it; what launches it gives back what it was given."""
    run = types.SimpleNamespace(
        launch=lambda *call: ("in C", *call), launch_cooperative_grid=False, launch_pdl=True,
        global_scratch_size=scratch, profile_scratch_size=0,
    )  # fmt: skip
    return types.SimpleNamespace(run=run, function=1234, packed_metadata=(4, 1, 0))


def test_a_kernel_is_started_by_what_triton_wrote_in_c() -> None:
    """As many arguments as it reads before those of the kernel, of the types that it reads."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    start, flags = toolchain.starter(loaded(), ARCHES["sm_90"])
    if not toolchain.version().startswith("3.6."):
        pytest.skip("another release of Triton")
    called, *given = start(1, 2, 3, 77, *flags)
    assert called == "in C"
    for kind, each in zip(driver._BASE_ARGS_FORMAT, given, strict=True):
        assert isinstance(each, {"i": int, "K": int, "p": bool, "O": tuple | None}[kind])
    assert given[3:7] == [77, 1234, False, True]


@pytest.mark.parametrize(("arch", "scratch"), [("sm_90", 64), ("gfx942", 0)])
def test_other_kernels_are_started_by_tritons_python(arch: str, scratch: int) -> None:
    made = loaded(scratch)
    start, flags = toolchain.starter(made, ARCHES[arch])
    assert start is made.run
    assert flags == (1234, (4, 1, 0), None, None, None)


def test_a_start_gives_addresses_on_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "current_device", lambda: 3)
    monkeypatch.setattr(launch, "current_stream", lambda device: 100 + device)
    seen, y = [], torch.zeros(4)
    launch.Start(lambda *call: seen.append(call), ("flags",))((1, 2, 3), [y, y[2:], 7])
    assert seen == [(1, 2, 3, 103, "flags", y.data_ptr(), y.data_ptr() + 8, 7)]


def test_a_bound_kernel_on_a_cpu_says_where_it_runs() -> None:
    call = w4gen.bind(w4gen.compile("1x64x32", "int4_g64", arch="sm_90"))
    w = w4gen.Weight.from_float(torch.ones(32, 64), "int4_g64")
    with pytest.raises(w4gen.W4Error, match=r"x is on a CPU and a kernel runs on a GPU: .* or call w4gen\.linear"):
        call(torch.ones(1, 64, dtype=torch.float16), w)
