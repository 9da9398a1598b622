"""Checkpoints on a GPU: read there, packed for it, and what others loaded there."""

from __future__ import annotations

import pytest
import torch

import w4gen
from w4gen.checkpoints import derive
from w4gen.formats import named
from w4gen.ir import layout as layouts
from w4gen.runtime import repack
from w4gen.runtime.launch import arch_of
from w4gen.schedule.arch import M16K16
from w4gen.schedule.stored import fragment_order

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("few", [0, 2**62], ids=["by a kernel", "by PyTorch"])
@pytest.mark.parametrize("label", ["int4_g128", "uint2_g128_z", "int8_g128", "nf4_g64", "int1_g128"])
def test_codes_are_repacked_on_a_gpu_as_on_a_cpu_also_on_another_stream(label: str, few: int, monkeypatch) -> None:
    n, k, form = 273, 1000, named(label)
    monkeypatch.setattr(repack, "FEW", few)
    monkeypatch.setattr(repack, "STARTS", {})
    monkeypatch.setattr(repack.toolchain, "built", lambda *_: False)
    codes = torch.randint(0, 2**form.bits, (n, k), dtype=torch.uint8)
    source, target = layouts.dense(n, k, form.bits), fragment_order(form, M16K16, n, k)
    stored = repack.packed(codes, source)
    with torch.cuda.stream(torch.cuda.Stream()):
        held = stored.cuda(non_blocking=True)
        found = repack.repacked(held, source, target, n, k).cpu()
        again = repack.packed(codes.cuda(), target).cpu()
        apart = repack.packed(codes.T.contiguous().cuda().T, target).cpu()
    truth = repack.repacked(stored, source, target, n, k)
    assert all(torch.equal(each, truth) for each in (found, again, apart))
    assert len(repack.STARTS) == (0 if few else 2)


def test_a_model_is_read_on_the_gpu_and_packed_for_it(tmp_path, monkeypatch) -> None:
    pytest.importorskip("transformers")
    from test_load import written

    dense, ids = written(tmp_path / "m").cuda(), torch.arange(8, device="cuda")[None]
    model = w4gen.load(tmp_path / "m", device="cuda")
    truth = dense(ids).logits
    assert (model(ids).logits.float() - truth).norm() < 0.02 * truth.norm()
    assert {each.device.type for each in (*model.parameters(), *model.buffers())} == {"cuda"}
    derive.pack(tmp_path / "m", arch_of(torch.device("cuda")).name, progress=False)
    for name in ("repacked", "packed"):
        monkeypatch.setattr(repack, name, lambda *_: pytest.fail("codes were packed again"))
    assert torch.equal(w4gen.load(tmp_path / "m", device="cuda")(ids).logits, model(ids).logits)


def test_what_others_loaded_there_is_replaced_there() -> None:
    pytest.importorskip("transformers")
    from checkpoints.test_accelerate import loaded

    model, dense = (each.cuda() for each in loaded())
    done, ids = w4gen.accelerate(model), torch.arange(8, device="cuda")[None]
    assert len(done.replaced) == 14
    truth = dense(ids).logits
    assert (model.half()(ids).logits.float() - truth).norm() < 0.02 * truth.norm()
