"""GPTQ layers, written here by loops of their own: the zeros of both versions, and columns in any order."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch

from w4gen.checkpoints import gptq
from w4gen.checkpoints.layer import Layer
from w4gen.errors import CheckpointError

N, K, GROUP = 32, 96, 32


def written(
    rng: np.random.Generator, bits: int, index: np.ndarray, version: str, zeros: np.ndarray | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, object], np.ndarray]:
    """The tensors of a layer as GPTQ stores them, what its quantization_config says, and the weight f64[N, K]."""
    groups = int(index.max()) + 1
    codes = rng.integers(0, 2**bits, (N, K))
    zeros = rng.integers(1, 2**bits, (groups, N)) if zeros is None else zeros
    scales = rng.uniform(0.01, 0.02, (groups, N)).astype(np.float16)
    stored = zeros if version == "gptq_v2" else (zeros - 1) % 2**bits
    tensors = {
        "qweight": torch.from_numpy(oracle.stream(codes, bits).view(np.int32).T.copy()),
        "qzeros": torch.from_numpy(oracle.stream(stored, bits).view(np.int32)),
        "scales": torch.from_numpy(scales),
        "g_idx": torch.from_numpy(index.astype(np.int32)),
    }
    w = np.array([[(codes[n, k] - zeros[index[k], n]) * float(scales[index[k], n]) for k in range(K)] for n in range(N)])
    said = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "checkpoint_format": version}
    return tensors, said, w


def dense(layer: Layer) -> np.ndarray:
    """The weight that a layer stands for, with its columns in the order of x."""
    w = layer.weight.dequantize(torch.float64)
    if layer.order is not None:
        w = torch.empty_like(w).index_copy_(1, layer.order, w)
    return w.numpy()


IN_ORDER = np.arange(K) // GROUP


@pytest.mark.parametrize("bits", gptq.BITS)
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_codes_and_zeros(bits: int, version: str, rng: np.random.Generator) -> None:
    tensors, said, w = written(rng, bits, IN_ORDER, version)
    layer = gptq.read(tensors, said, "q_proj")
    assert layer.order is None
    assert layer.format.label == f"uint{bits}_g{GROUP}_z"
    assert np.array_equal(dense(layer), w)


def test_zeros_in_the_middle_need_not_be_stored(rng: np.random.Generator) -> None:
    tensors, said, w = written(rng, 4, IN_ORDER, "gptq", np.full((3, N), 8))
    layer = gptq.read(tensors, said, "q_proj")
    assert layer.format.label == f"int4_g{GROUP}"
    assert np.array_equal(dense(layer), w)


@pytest.mark.parametrize("bits", gptq.BITS)
def test_a_zero_of_zero_wraps_in_its_own_field_with_a_note(bits: int, rng: np.random.Generator) -> None:
    zeros = rng.integers(1, 2**bits, (3, N))
    zeros[1, 5] = zeros[2, 7] = 0
    tensors, said, w = written(rng, bits, IN_ORDER, "gptq", zeros)
    layer = gptq.read(tensors, said, "q_proj")
    assert np.array_equal(dense(layer), w)
    assert [note.split(":")[0] for note in layer.notes] == ["q_proj"]
    assert "2 stored zeros" in layer.notes[0]


@pytest.mark.parametrize("sizes", [(32, 32, 32), (48, 16, 32), (31, 33, 32), (96, 0, 0)])
def test_columns_in_any_order(sizes: tuple[int, ...], rng: np.random.Generator) -> None:
    index = rng.permutation(np.repeat(np.arange(3), sizes))
    index = np.append(index[:-1], 2) if sizes[1] == 0 else index
    tensors, said, w = written(rng, 4, index, "gptq")
    layer = gptq.read(tensors, said, "q_proj")
    assert np.array_equal(dense(layer), w)
    x = torch.from_numpy(rng.standard_normal((3, K)).astype(np.float32))
    y = layer.linear()(x)
    assert np.allclose(y.numpy(), x.numpy() @ w.T, atol=1e-5)


def test_groups_in_order_but_unequal_need_no_order_of_columns(rng: np.random.Generator) -> None:
    tensors, said, w = written(rng, 4, np.repeat(np.arange(3), (48, 16, 32)), "gptq")
    layer = gptq.read(tensors, said, "q_proj")
    assert layer.order is None
    assert layer.format.group == 16
    assert np.array_equal(dense(layer), w)


def test_one_group_for_the_row(rng: np.random.Generator) -> None:
    tensors, said, w = written(rng, 4, np.zeros(K, int), "gptq")
    assert np.array_equal(dense(gptq.read(tensors, {**said, "group_size": -1}, "q_proj")), w)


def test_a_pattern_has_settings_of_its_own(rng: np.random.Generator) -> None:
    tensors, said, w = written(rng, 8, IN_ORDER, "gptq")
    said = {**said, "bits": 4, "dynamic": {"+:.*q_proj": {"bits": 8}, "-:.*o_proj": {}}}
    assert np.array_equal(dense(gptq.read(tensors, said, "layers.0.q_proj")), w)
    with pytest.raises(CheckpointError, match="leaves this layer out"):
        gptq.read(tensors, said, "layers.0.o_proj")


BAD = {
    "another width": ({}, {"bits": 8}, r"scales: has shape \[3, 32\], \[2, 32\] is needed; bits or group_size"),
    "no such width": ({}, {"bits": 9}, "bits=9"),
    "another group": ({}, {"group_size": 16}, r"scales: has shape \[3, 32\], \[6, 32\] is needed"),
    "a version to come": ({}, {"checkpoint_format": "gptq_v9"}, "gptq_v9"),
    "no scales": ({"scales": None}, {}, r"scales: missing, .*a shard may be missing"),
    "no index": ({"g_idx": None}, {"desc_act": True}, "g_idx: missing"),
    "a group too many": ({"g_idx": torch.full((K,), 3)}, {}, r"g_idx: names groups 3…3 of 3"),
    "a group below 0": ({"g_idx": torch.full((K,), -1)}, {}, r"g_idx: names groups -1"),
    "a short index": ({"g_idx": torch.zeros(5)}, {}, r"g_idx: has shape \[5\], \[96\]"),
    "zeros of another width": ({"qzeros": torch.zeros(3, 5, dtype=torch.int32)}, {}, "qzeros: has shape"),
    "scales that are no numbers": ({"scales": torch.full((3, N), torch.nan)}, {}, "do not hold a weight"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_layer_that_contradicts_itself_is_named(kind: str, rng: np.random.Generator) -> None:
    changes, settings, told = BAD[kind]
    tensors, said, _ = written(rng, 4, IN_ORDER, "gptq")
    tensors = {name: tensor for name, tensor in {**tensors, **changes}.items() if tensor is not None}
    with pytest.raises(CheckpointError, match=told) as caught:
        _ = gptq.read(tensors, {**said, **settings}, "model.q_proj").weight
    assert "model.q_proj" in str(caught.value)
