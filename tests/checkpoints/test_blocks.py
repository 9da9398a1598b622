"""bitsandbytes, HQQ and gpt-oss, against what their libraries say; `make_fixtures.py` made the files."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from w4gen.checkpoints import bitsandbytes, gpt_oss, hqq
from w4gen.errors import CheckpointError

HERE = Path(__file__).parent


def cases(file: str) -> dict[str, dict[str, torch.Tensor]]:
    found: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in load_file(HERE / f"{file}.safetensors").items():
        case, key = name.split(".", 1) if not name.startswith("bits1.58.") else ("bits1.58", name.removeprefix("bits1.58."))
        found[case][key] = tensor
    return found


BITSANDBYTES, HQQ = cases("bitsandbytes"), cases("hqq")
NORMAL = {"bitsandbytes": "nf4", "hqq": "bits4"}


@pytest.mark.parametrize("case", BITSANDBYTES)
def test_bitsandbytes(case):
    """Bit for bit in float32; of layers that were float16 or bfloat16 the library rounds once more, to that type."""
    held = dict(BITSANDBYTES[case])
    truth, first = held.pop("truth"), int(held.pop("first"))
    layer = bitsandbytes.read(held, {}, "a.b")
    form = layer.format
    assert torch.equal(layer.weight.dequantize()[first:].to(truth.dtype), truth)
    assert form.group == {"nf4_crossing": 16, "nf4_nested_crossing": 16, "nf4_odd": 1, "nf4_128": 128}.get(case, 64)


def test_the_stored_table_is_used():
    held = {name: each for name, each in BITSANDBYTES["nf4"].items() if name.startswith("weight")}
    held["weight.quant_map"] = held["weight.quant_map"].flip(0).contiguous()
    found = bitsandbytes.read(held, {}, "a.b").weight.dequantize()
    value = {code: held["weight.quant_map"][code] for code in range(16)}
    byte, absmax = held["weight"].reshape(-1)[40].item(), held["weight.absmax"][1]  # weights 80 and 81 of the first row
    assert found[0, 80] == value[byte >> 4] * absmax
    assert found[0, 81] == value[byte & 15] * absmax


@pytest.mark.parametrize("case", [case for case in HQQ if case != "axis0"])
def test_hqq(case):
    """Exact in float64: HQQ itself rounds to its compute type twice, after subtracting and after multiplying."""
    held = dict(HQQ[case])
    truth = held.pop("truth")
    layer = hqq.read(held, {}, "a.b")
    form = layer.format
    assert torch.equal(layer.weight.dequantize(torch.float64), truth)
    assert layer.bias is not None
    bits = {"bits8": 8, "bits6": 6, "bits5": 5, "bits3": 3, "bits2": 2, "bits1.58": 2, "bits1": 1}
    assert form.bits == bits.get(case.split("_")[0], 4)
    assert len(truth.unique()) > 8


def test_hqq_groups_down_the_columns_are_refused():
    told = r"a\.b\.scale: groups run down the columns \(axis=0\).* 32 bits beside each code; .*axis=1, or .*w4gen\.convert"
    with pytest.raises(CheckpointError, match=told):
        hqq.read(HQQ["axis0"], {}, "a.b")


def test_hqq_scales_that_are_codes_are_refused():
    held = {name: each for name, each in HQQ["bits4"].items() if name != "zero"}
    with pytest.raises(CheckpointError, match="quantized themselves"):
        hqq.read(held, {}, "a.b")


@pytest.mark.parametrize("file", ["bitsandbytes", "hqq"])
def test_a_weight_cut_short_is_refused(file):
    read, held, name = {
        "bitsandbytes": (bitsandbytes.read, dict(BITSANDBYTES["nf4"]), "weight"),
        "hqq": (hqq.read, dict(HQQ["bits4"]), "W_q"),
    }[file]
    held[name] = held[name][:-1]
    with pytest.raises(CheckpointError, match=rf"a\.b\.{name}: holds \d+ codes, \[\d+, \d+\] needs \d+; the file may be damaged"):
        read(held, {}, "a.b")


@pytest.mark.parametrize("file", ["bitsandbytes", "hqq"])
def test_scales_that_are_missing_or_too_few_are_refused(file):
    read, held, name = {
        "bitsandbytes": (bitsandbytes.read, dict(BITSANDBYTES["nf4"]), "weight.absmax"),
        "hqq": (hqq.read, dict(HQQ["bits4"]), "zero"),
    }[file]
    held[name] = held[name][:-1]
    with pytest.raises(CheckpointError, match=rf"a\.b\.{name}: \d+ scales for \[\d+, \d+\] in blocks of \d+; the file"):
        read(held, {}, "a.b")
    for missing in ("weight", "weight.quant_map") if file == "bitsandbytes" else ("W_q", "shape", "packing"):
        less = {each: tensor for each, tensor in held.items() if each != missing} | {name: cases(file)[NORMAL[file]][name]}
        with pytest.raises(CheckpointError, match=rf"a\.b\.{missing}: missing, there are .*shard"):
            read(less, {}, "a.b")


@pytest.mark.parametrize("change", [{"blocksize": 0}, {"shape": [6]}, {"shape": None}, {"shape": [-6, 128]}])
def test_facts_that_fit_no_weight_are_refused(change):
    held, name = dict(BITSANDBYTES["nf4"]), "weight.quant_state.bitsandbytes__nf4"
    stated = json.loads(bytes(held[name].tolist())) | change
    held[name] = torch.tensor(list(json.dumps(stated).encode()), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=rf"a\.b\.{name}: does not hold the facts of a weight"):
        bitsandbytes.read(held, {}, "a.b")


def test_facts_that_are_damaged_are_refused():
    held = dict(BITSANDBYTES["nf4"])
    name = "weight.quant_state.bitsandbytes__nf4"
    held[name] = held[name][:20]
    with pytest.raises(CheckpointError, match=rf"a\.b\.{name}: does not hold the facts of a weight"):
        bitsandbytes.read(held, {}, "a.b")


def test_gpt_oss():
    """Every expert, by plain loops over the published layout (openai/gpt-oss, `weights.py`)."""
    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 256, (3, 4, 2, 16), np.uint8)
    scales = generator.integers(0, 255, (3, 4, 2), np.uint8)
    scales[0, 0] = 0, 254
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    truth = np.zeros((3, 4, 64))
    for expert, row, block, at in np.ndindex(blocks.shape):
        for half in (0, 1):
            code = int(blocks[expert, row, block, at]) // 16**half % 16
            truth[expert, row, 32 * block + 2 * at + half] = table[code] * 2.0 ** (int(scales[expert, row, block]) - 127)
    bias = torch.arange(12.0).reshape(3, 4)
    stack = {"blocks": torch.from_numpy(blocks), "scales": torch.from_numpy(scales), "bias": bias}
    found = [gpt_oss.read({name: each[expert] for name, each in stack.items()}, {}, f"a.{expert}") for expert in range(3)]
    assert np.array_equal(np.stack([layer.weight.dequantize(torch.float64).numpy() for layer in found]), truth)
    assert torch.equal(found[2].bias, bias[2])


def test_gpt_oss_shapes_that_do_not_fit_are_refused():
    tensors = {"blocks": torch.zeros(4, 2, 8, dtype=torch.uint8), "scales": torch.zeros(4, 2, dtype=torch.uint8)}
    with pytest.raises(CheckpointError, match=r"a\.1\.blocks: has shape \[4, 2, 8\], \[N, K / 32, 16\] is needed"):
        gpt_oss.read(tensors, {}, "a.1")
    with pytest.raises(CheckpointError, match=r"a\.1\.scales: has shape \[4, 3\]"):
        gpt_oss.read({"blocks": torch.zeros(4, 2, 16), "scales": torch.zeros(4, 3)}, {}, "a.1")


def test_who_claims_what():
    assert bitsandbytes.claims({"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert not bitsandbytes.claims({"quant_method": "bitsandbytes", "load_in_8bit": True})
    assert hqq.claims({"quant_method": "hqq"})
    assert not hqq.claims({"quant_method": "gptq"})
    for dialect, held in ((bitsandbytes, BITSANDBYTES["nf4"]), (hqq, HQQ["bits4"])):
        assert sum(f".{tensor}" in dialect.MARKS for tensor in held) == 1
