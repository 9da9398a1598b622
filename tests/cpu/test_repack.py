"""The kernel that repacks codes, under the interpreter: bit for bit where the digits of a layout say, and as PyTorch does it."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from w4gen.codegen import repack as permute
from w4gen.errors import ToolchainError
from w4gen.formats import named
from w4gen.ir import layout as layouts
from w4gen.ir.interpret import offline
from w4gen.ir.layout import Digit, Layout
from w4gen.runtime import repack
from w4gen.schedule.arch import ARCHES, M16K16
from w4gen.schedule.stored import fragment_order, layout_for


@pytest.fixture(autouse=True)
def few_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repack, "FEW", 0)


def stored(codes: np.ndarray, layout: Layout) -> torch.Tensor:
    """Each bit of each code where `address` says, one after the other."""
    bits = np.zeros(layout.length * layout.unit, np.uint8)
    for (n, k), code in np.ndenumerate(codes):
        for bit in range(min(layout.bits, 8)):
            bits[layout.address(bit, n=n, k=k)] = code >> bit & 1
    held = np.packbits(bits, bitorder="little")
    return torch.from_numpy(held.view(np.int32) if layout.unit == 32 else held)


def orders(bits: int, n: int, k: int) -> dict[str, Layout]:
    """Every order of whole words that weights come in or kernels read, and bytes."""
    form = named(f"int{bits}_g64")
    return {
        "bytes": layouts.matrix({"n": n, "k": k}, 8),
        "dense": layouts.dense(n, k, bits),
        "rows": layout_for(form, ARCHES["sm_75"], n, k),
        "fragments": fragment_order(form, M16K16, n, k),
        "columns": Layout((Digit("n", n, 32), Digit("k", 32 // bits, bits), Digit("k", -(-k * bits // 32), 32 * n)), bits),
    }


@pytest.mark.parametrize("label", ["int4_g64", "nf4_g64", "int2_g64", "int8_g64", "int1_g64"])
def test_every_order_is_made_of_every_other(label: str, rng: np.random.Generator) -> None:
    form, (n, k) = named(label), (21, 131)
    codes = rng.integers(0, 2**form.bits, (n, k), np.uint8)
    every = {**orders(form.bits, n, k), "lanes": fragment_order(form, M16K16, n, k)}
    held = {name: stored(codes, order) for name, order in every.items()}
    for source, origin in every.items():
        for target, order in every.items():
            made = repack.by_kernel(held[source], origin, order, n, k)
            assert torch.equal(made, held[target]), (source, target)
            graph = permute.kernel(origin, order, n, k).program
            assert torch.equal(offline(graph, {"from": held[source]}, torch)["to"].reshape(-1), made), (source, target)
            assert torch.equal(repack.repacked(held[source], origin, order, n, k), made), (source, target)


@st.composite
def blocks(draw: st.DrawFn, bits: int, n: int, k: int) -> Layout:
    """Any order of digits inside a block, then of blocks; [n, k] ends somewhere in the last ones."""
    inside, room, stride, digits = [], 32 // bits, bits, []
    while room > 1:
        inside.append(draw(st.sampled_from([size for size in (2, 4, 8, 16, 32) if room % size == 0])))
        room //= inside[-1]
    for size in [*inside, *draw(st.lists(st.sampled_from([1, 2, 4]), max_size=4))]:
        digits.append(Digit(draw(st.sampled_from("nk")), size, stride))
        stride *= size
    digits = draw(st.permutations(digits))
    for axis in draw(st.permutations("nk")):
        held = int(np.prod([digit.size for digit in digits if digit.axis == axis]))
        digits.append(Digit(axis, -(-(n if axis == "n" else k) // held), stride))
        stride *= digits[-1].size
    return Layout(tuple(digits), bits)


@hypothesis.settings(max_examples=40)
@hypothesis.given(data=st.data(), bits=st.sampled_from([1, 2, 4, 8]), n=st.integers(1, 20), k=st.integers(1, 70))
def test_any_order_of_blocks_is_made(data: st.DataObject, bits: int, n: int, k: int) -> None:
    source, target = (data.draw(blocks(bits, n, k)) for _ in range(2))
    codes = np.random.default_rng(n * k).integers(0, 2**bits, (n, k), np.uint8)
    made = repack.by_kernel(stored(codes, source), source, target, n, k)
    assert torch.equal(made, stored(codes, target))


def test_one_text_serves_layers_of_all_sizes() -> None:
    texts = set()
    for n, k in ((64, 128), (37, 1000), (8192, 28672), (1, 8)):
        form = named("int4_g128")
        texts.add(permute.kernel(layouts.dense(n, k, 4), fragment_order(form, M16K16, n, k), n, k).source)
    assert len(texts) == 1


@pytest.mark.parametrize("bits", [3, 5])
def test_what_has_planes_or_crosses_words_is_left_to_pytorch(bits: int, rng: np.random.Generator) -> None:
    n, k = 8, 250
    codes = rng.integers(0, 2**bits, (n, k), np.uint8)
    dense, planes = layouts.dense(n, k, bits), layouts.planes(n, k, bits)
    for source, target in ((dense, planes), (planes, dense)):
        assert repack.by_kernel(repack.packed(torch.from_numpy(codes), source), source, target, n, k) is None
    order = layouts.rows(n, k, bits)  # with a gap at the top of each word
    made = repack.by_kernel(torch.from_numpy(codes), layouts.matrix({"n": n, "k": k}, 8), order, n, k)
    assert torch.equal(made, stored(codes, order))


def test_a_kernel_is_made_for_many_codes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = layouts.dense(16, 128, 4), layouts.rows(16, 128, 4, 16)
    words = torch.zeros(source.length, dtype=torch.int32)
    monkeypatch.setattr(repack, "STARTS", {})
    monkeypatch.setattr(repack, "FEW", 16 * 128 + 1)
    assert repack.by_kernel(words, source, target, 16, 128) is None
    monkeypatch.setattr(repack, "FEW", 16 * 128)
    monkeypatch.setenv("W4GEN_JIT", "forbid")
    assert repack.by_kernel(words, source, target, 16, 128) is None
    monkeypatch.delenv("W4GEN_JIT")
    assert repack.by_kernel(words, source, target, 16, 128) is not None


def test_a_kernel_that_does_not_load_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    source, target = layouts.dense(16, 128, 4), layouts.rows(16, 128, 4, 16)
    words = torch.zeros(source.length, dtype=torch.int32)
    monkeypatch.setattr(repack, "STARTS", {})

    def refused(*_: object) -> None:
        raise ToolchainError("no compiler")

    monkeypatch.setattr(repack.launch, "loaded", refused)
    assert [repack.by_kernel(words, source, target, 16, 128) for _ in range(2)] == [None, None]
    assert [each.getMessage() for each in caplog.records] == ["codes are repacked by PyTorch, a few times slower: no compiler"]
