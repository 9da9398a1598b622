"""No register that a wgmma may still read is written: the hazard of docs/kernels.md, read off machine code."""

from __future__ import annotations

from dataclasses import replace

import pytest
import triton
from sass import hazards, walked

import w4gen
from w4gen import toolchain
from w4gen.codegen.render import Kernel
from w4gen.schedule.arch import ARCHES

HAZARDOUS = triton.__version__.startswith("3.6.")


def lines(kernel: Kernel) -> list[str]:
    return toolchain.build(kernel, ARCHES["sm_90"])["gemm"].text("sass").splitlines()


@pytest.mark.parametrize(
    ("shape", "form"), [("64x4096x4096", "int4_g128"), ("64x4096x4096", "mxfp4"), ("16x1024x512", "uint4_g32_m")]
)
def test_gemm_decodes_nothing_while_a_product_reads(shape: str, form: str) -> None:
    """Sums are scaled, or multiplied by a 1 that the compiler does not see: each product is waited for before it is added."""
    kernel = w4gen.compile(shape, form, arch="sm_90")
    assert kernel.name == "gemm"
    found = lines(kernel)
    assert any("HGMMA" in line for line in found)
    assert hazards(found) == []


@pytest.mark.skipif(not HAZARDOUS, reason="mended in Triton after 3.6")
def test_a_sum_carried_through_the_instruction_is_the_hazard() -> None:
    """The known-bad form: without the 1, Triton carries the sum, decodes the next step meanwhile, and this is seen."""
    kernel = w4gen.compile("64x4096x4096", "int4_g32", arch="sm_90")
    bad = kernel.source.replace("        part *= one\n", "")
    assert bad != kernel.source
    assert hazards(lines(replace(kernel, source=bad)))
    assert hazards(lines(kernel)) == []


LISTING = """
.L_x_0:
        /*0010*/ LOP3.LUT {wrote}, R1, 0xf, R2, 0xea, !PT ;
        /*0020*/ HGMMA.64x64x16.F32 R24, R56, gdesc[UR12], R24, gsb0 ;
        /*0030*/ WARPGROUP.DEPBAR.LE gsb0, {left} ;
        /*0040*/ @P5 BRA `(.L_x_0) ;
"""


@pytest.mark.parametrize(("wrote", "left", "seen"), [("R59", "0x1", 1), ("R59", "0x0", 0), ("R60", "0x1", 0), ("R24", "0x1", 0)])
def test_a_listing_is_walked_round_its_loops(wrote: str, left: str, seen: int) -> None:
    """A wait that lets one group go on is none, and what is decoded on the next turn is written while that group reads."""
    listing = LISTING.format(wrote=wrote, left=left).splitlines()
    assert len(hazards(listing)) == seen
    assert sum("HGMMA" in line for line in walked(listing)) == 2
