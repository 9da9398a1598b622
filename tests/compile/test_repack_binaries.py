"""The kernel that repacks codes, compiled with no GPU present."""

from __future__ import annotations

import re

import pytest

from w4gen import toolchain
from w4gen.codegen import repack
from w4gen.formats import named
from w4gen.ir import layout as layouts
from w4gen.schedule.arch import ARCHES
from w4gen.schedule.stored import layout_for

N, K = 8192, 28672


@pytest.mark.parametrize(("arch", "label"), [("sm_90", "int4_g128"), ("gfx942", "uint2_g128_z")])
def test_it_compiles_without_spills(arch: str, label: str) -> None:
    form = named(label)
    kernel = repack.kernel(layouts.dense(N, K, form.bits), layout_for(form, ARCHES[arch], N, K), N, K)
    (binary,) = toolchain.build(kernel, ARCHES[arch]).values()
    assert (binary.spills, binary.shared_bytes) == (0, 0)


def test_it_costs_little_beside_memory() -> None:
    """A thread of an H200 makes four words: the instructions of so many fill a quarter of a millisecond for this layer."""
    form = named("int4_g128")
    kernel = repack.kernel(layouts.dense(N, K, 4), layout_for(form, ARCHES["sm_90"], N, K), N, K)
    (binary,) = toolchain.build(kernel, ARCHES["sm_90"]).values()
    sass = re.findall(r"/\*[0-9a-f]{4}\*/ +(?:@!?U?P\w+ +)?([A-Z][A-Z0-9.]*)", binary.text("sass"))
    assert sum(name.startswith("LDG") for name in sass) == repack.BLOCK // 128 * 8
    assert len(sass) < 640
