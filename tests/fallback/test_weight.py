"""Weights: quantizing, packing and reading back, and what is refused. No kernel runs here."""

from __future__ import annotations

import cases
import numpy as np
import oracle
import pytest
import torch

import w4gen
from w4gen.errors import FormatError, ShapeError, W4Error
from w4gen.formats import FAMILIES, named
from w4gen.ir.layout import rows
from w4gen.runtime.weight import Weight
from w4gen.schedule.arch import ARCHES, M16K16
from w4gen.schedule.stored import fragment_order, layout_for

FORMATS = ["int4_g128", "nf4_g64", "int4_g50", "nf4_row", "int4_g32_f32", "nf4_g16_bf16", *cases.ZEROS, "e2m1_g32", "int8_g128"]
ASYMMETRIC = ["uint4_g128_z", "uint4_g128_m", "uint4_g128_zf", "int4_g50_z", "uint4_row_m", "int8_g64_z", "nf4_g64_m"]
OWN = [cases.CUBES, cases.UINT8, cases.UINT2]


@pytest.mark.parametrize("form", [*FORMATS, *OWN], ids=cases.ids)
@pytest.mark.parametrize(("n", "k"), [(8, 256), (5, 131), (1, 1)])
def test_dequantize_is_exact_in_f64(form: object, n: int, k: int) -> None:
    case = cases.call(form, 1, n, k)
    w = case.w.dequantize(torch.float64)
    assert w.shape == (n, k)
    assert np.array_equal(w.numpy(), case.true_w)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64"])
def test_dequantize_rounds_once(form: str, kind: torch.dtype) -> None:
    case = cases.call(form, 1, 8, 256)
    assert torch.equal(case.w.dequantize(kind), torch.from_numpy(case.true_w).to(torch.float32).to(kind))


@pytest.mark.parametrize("form", [*FORMATS, *OWN], ids=cases.ids)
def test_unpacking_gives_back_what_was_packed(form: object) -> None:
    case = cases.call(form, 1, 5, 131)
    codes, scales, zeros = case.w.unpack()
    assert torch.equal(codes, case.codes)
    assert torch.equal(scales, case.scales)
    assert zeros is case.zeros is None or torch.equal(zeros, case.zeros)


@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64", "int4_g50"])
@pytest.mark.parametrize(
    "layout", [rows(5, 131, 4, 16), rows(8, 300, 4, 8), fragment_order(named("int4"), M16K16, 5, 131)], ids=str
)
def test_repacking_changes_where_codes_are_and_nothing_else(form: str, layout: object) -> None:
    case = cases.call(form, 1, 5, 131)
    packed = case.w.packed_as(layout)
    assert packed.layout == layout
    assert np.array_equal(packed.dequantize(torch.float64).numpy(), case.true_w)
    again = packed.packed_as(case.w.layout)
    assert torch.equal(again.codes, case.w.codes)
    assert torch.equal(again.scale, case.w.scale)
    assert case.w.packed_as(case.w.layout) is case.w


def test_codes_are_stored_as_the_oracle_packs_them() -> None:
    case = cases.call("nf4_g64", 1, 5, 131)
    for run in (1, 16):
        stored = case.w.packed_as(rows(5, 131, 4, run)).codes
        assert stored.dtype == torch.int32
        assert np.array_equal(stored.numpy().view("u4").reshape(5, -1), oracle.pack_rows(case.codes.numpy(), 4, run))


def test_a_format_without_negative_values_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Half of all weights become 0 there; of weights that have no sign nothing is said."""
    form, w = w4gen.Format("counts", bits=4, group=64), torch.randn(8, 64)
    Weight.from_float(w.abs(), form)
    assert not caplog.records
    for _ in range(2):
        Weight.from_float(w, form)
    (told,) = caplog.messages
    assert told.startswith("counts_g64 has no values below 0 and no zeros: negative weights become 0 there; int4")


def test_types_may_be_those_of_torch() -> None:
    assert w4gen.supports(m=1, n=64, k=128, dtype=torch.bfloat16) == (True, "")
    assert w4gen.compile("1x128x64", dtype=torch.bfloat16).source == w4gen.compile("1x128x64", dtype="bfloat16").source


def test_a_weight_is_small() -> None:
    """Half a byte a code, two bytes a group of 128."""
    assert cases.call("int4_g128", 1, 64, 1024).w.nbytes == 64 * 512 + 64 * 8 * 2


def nearest(w: np.ndarray, scale: np.ndarray, group: int, values: list[float]) -> np.ndarray:
    """The least possible distance of each weight to a value under its scale."""
    distance = np.zeros(w.shape)
    for row in range(w.shape[0]):
        for column in range(w.shape[1]):
            each = scale[row, 0 if group == -1 else column // group]
            distance[row, column] = min(abs(w[row, column] - each * value) for value in values)
    return distance


@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64", "int4_g50", "nf4_row", "e2m1_g32", "uint4_g32"])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_from_float_takes_the_nearest_value(form: str, kind: torch.dtype, rng: np.random.Generator) -> None:
    w = torch.from_numpy(rng.standard_normal((6, 150)) * 0.02).to(kind)
    made, exact = Weight.from_float(w, form), w.double().numpy()
    found = np.abs(made.dequantize(torch.float64).numpy() - exact)
    best = nearest(exact, made.unpack()[1].double().numpy(), named(form).group, oracle.VALUES[named(form).name])
    assert np.allclose(found, best, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("form", ASYMMETRIC)
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shift", [0.0, 0.03, -1.0])
def test_from_float_with_zeros_takes_the_nearest_value(
    form: str, kind: torch.dtype, shift: float, rng: np.random.Generator
) -> None:
    """Under the scale and zero as stored, of which every code is tried."""
    w = torch.from_numpy(rng.standard_normal((6, 150)) * 0.02 + shift).to(kind)
    made, exact = Weight.from_float(w, form), w.double().numpy()
    _, scales, zeros = made.unpack()
    values = oracle.VALUES[named(form).name]
    every = np.stack(
        [
            oracle.dequantize(
                np.full(w.shape, code),
                scales.double().numpy(),
                named(form).group,
                values,
                zeros.double().numpy(),
                named(form).zero_mode,
            )
            for code in range(len(values))
        ]
    )
    best = np.abs(every - exact).min(0)
    found = np.abs(made.dequantize(torch.float64).numpy() - exact)
    assert np.allclose(found, best, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("form", "most"), [("uint4_g32_m", 0.02), ("uint4_g32_z", 0.04), ("uint4_g32_zf", 0.04)])
def test_a_minimum_follows_weights_far_from_zero(form: str, most: float, rng: np.random.Generator) -> None:
    """Half a step is 1/30 of the range: of the weights alone, or of the weights and 0."""
    w = torch.from_numpy(rng.uniform(1, 2, (8, 256)))
    assert oracle.error(Weight.from_float(w, form).dequantize(torch.float64).numpy(), w.numpy()) <= most


@pytest.mark.parametrize("form", ["uint4_g128_z", "uint4_g128_m", "uint4_g128_zf", "nf4_g128_m"])
def test_the_padding_of_a_last_group_widens_no_range(form: str, rng: np.random.Generator) -> None:
    w = torch.from_numpy(rng.uniform(1, 2, (4, 160)))
    whole, alone = Weight.from_float(w, form).unpack(), Weight.from_float(w[:, 128:], form).unpack()
    assert all(torch.equal(part[:, -each.shape[1] :], each) for part, each in zip(whole, alone, strict=True))


@pytest.mark.parametrize("value", [0.0, 1.0, -0.37, 3e-3, 2.0**-20])
@pytest.mark.parametrize("form", [*ASYMMETRIC, "int4_g128", "uint4_g32_m_bf16", "uint4_g32_z_f32"])
def test_equal_weights_are_kept_within_rounding(form: str, value: float) -> None:
    made = Weight.from_float(torch.full((3, 200), value), form).dequantize(torch.float64)
    unit = 2.0**-8 if form.endswith("bf16") else 2.0**-10
    subnormal = 2.0**-25 * 2 ** named(form).bits  # half the least f16, times the largest code
    assert (made - value).abs().max() <= abs(value) * unit + subnormal
    assert value != 0 or (made == 0).all()


@pytest.mark.parametrize("scale", ["bf16", "f32"])
@pytest.mark.parametrize("form", ["int4_g128", "uint4_g128_z", "uint4_g32_m", "uint4_g64_zf", "int8_g128", "e2m1_g32"])
def test_tiny_weights_in_bf16_are_quantized_as_others_are(form: str, scale: str, rng: np.random.Generator) -> None:
    w = torch.from_numpy(rng.standard_normal((4, 256))).bfloat16()
    large, tiny = (Weight.from_float(each, f"{form}_{scale}") for each in (w, w * 2.0**-110))
    assert tiny.dequantize(torch.float64).isfinite().all()
    assert torch.equal(large.dequantize(torch.float64) * 2.0**-110, tiny.dequantize(torch.float64))


@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64", "uint4_g128_z", "uint4_g128_m", "e2m1_g32"])
def test_from_float_has_a_small_error(form: str, rng: np.random.Generator) -> None:
    w = rng.standard_normal((32, 512))
    made = Weight.from_float(torch.from_numpy(w), form).dequantize(torch.float64).numpy()
    assert oracle.error(made, w) <= 0.13


def test_a_weight_of_the_format_survives_quantizing() -> None:
    case = cases.call("int4_g32_f32", 1, 8, 256)
    case.codes[:, ::32] = 0  # the extreme of every group
    w = Weight.from_codes(case.codes, case.scales, None, "int4_g32_f32").dequantize(torch.float64)
    assert torch.allclose(Weight.from_float(w, "int4_g32_f32").dequantize(torch.float64), w, rtol=1e-6)


@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64", "int4_row", "uint4_g32_z", "uint4_g50_zf", "int8_g128", "e2m1_g32"])
def test_groups_of_zeros_are_exact_zeros(form: str) -> None:
    w = torch.zeros(3, 300)
    w[1, 200:] = 1.0
    made = Weight.from_float(w, form).dequantize(torch.float64)
    assert (made[0] == 0).all()
    assert (made[2] == 0).all()
    assert (made[w == 0] == 0).all()
    assert made.isfinite().all()


@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64", "int4_g128_bf16", "nf4_g64_f32", *ASYMMETRIC, "uint4_g32_m_f32"])
@pytest.mark.parametrize("size", [1e-45, 1e-30, 1e-8, 1e-6, 1.0, 1e4])
def test_from_float_never_makes_nan(form: str, size: float, rng: np.random.Generator) -> None:
    w = torch.from_numpy(rng.standard_normal((4, 200)).astype(np.float32)) * size
    assert Weight.from_float(w, form).dequantize(torch.float64).isfinite().all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64"])
def test_weights_of_one_sign_are_quantized(form: str, sign: float, rng: np.random.Generator) -> None:
    w = torch.from_numpy(np.abs(rng.standard_normal((4, 256))) * sign + sign)
    assert oracle.error(Weight.from_float(w, form).dequantize(torch.float64).numpy(), w.numpy()) <= 0.1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused_with_its_index(bad: float) -> None:
    w = torch.zeros(4, 200)
    w[2, 137] = bad
    with pytest.raises(FormatError, match=rf"weight\[2, 137\] is {bad}"):
        Weight.from_float(w, "nf4_g64")


def test_a_scale_that_overflows_is_refused_with_the_way_out() -> None:
    w = torch.zeros(4, 256)
    w[3, 200] = 1e6
    with pytest.raises(FormatError, match=r"row 3, group 1 does not fit f16 \(max 6\.55e\+04\): .*int4_g128_f32"):
        Weight.from_float(w, "int4_g128")
    assert Weight.from_float(w, "int4_g128_f32").dequantize(torch.float64)[3, 200] == pytest.approx(1e6)


@pytest.mark.parametrize("w", [torch.zeros(4), torch.zeros(2, 3, 4), torch.zeros(4, 4, dtype=torch.int8)], ids=str)
def test_what_is_no_matrix_of_floats_is_refused(w: torch.Tensor) -> None:
    with pytest.raises(ShapeError, match=r"a weight is a float tensor \[N, K\]"):
        Weight.from_float(w, "int4_g128")


@pytest.mark.parametrize("shape", [(0, 8), (8, 0)])
def test_an_empty_weight_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(W4Error):
        Weight.from_float(torch.zeros(shape), "int4_g128")


CODES, SCALES = torch.zeros(4, 256, dtype=torch.uint8), torch.ones(4, 2, dtype=torch.float16)


def spoiled(at: tuple[int, int], code: int, kind: torch.dtype = torch.int64) -> torch.Tensor:
    codes = torch.zeros(4, 256, dtype=kind)
    codes[at] = code
    return codes


@pytest.mark.parametrize(
    ("codes", "scales", "zeros", "message"),
    [
        (spoiled((2, 7), 16), SCALES, None, r"code\[2, 7\] is 16: int4_g128 has codes 0…15"),
        (spoiled((3, 255), -1), SCALES, None, r"code\[3, 255\] is -1: int4_g128 has codes 0…15"),
        (spoiled((0, 0), 200, torch.uint8), SCALES, None, r"code\[0, 0\] is 200"),
        (CODES.float(), SCALES, None, r"codes are integers \[N, K\], not torch.float32"),
        (CODES.bool(), SCALES, None, r"codes are integers"),
        (CODES[0], SCALES, None, r"codes are integers \[N, K\], not torch.uint8\[256\]"),
        (CODES[:0], SCALES[:0], None, r"codes are integers \[N, K\]"),
        (CODES, SCALES[:, :1], None, r"scales have shape \[4, 1\]; int4_g128 codes \[4, 256\] need \[4, 2\]"),
        (CODES, SCALES[:3], None, r"scales have shape \[3, 2\]"),
        (CODES, SCALES.T.contiguous(), None, r"scales have shape \[2, 4\]"),
        (CODES, SCALES.int(), None, r"scales are torch.int32: give them as f16"),
        (CODES, SCALES.to("meta"), None, r"codes are on cpu, scales on meta"),
        (CODES, SCALES, SCALES, r"int4_g128 has no zero points: leave zeros out"),
        (CODES, SCALES * torch.nan, None, r"scale\[0, 0\] is nan"),
        (CODES, SCALES / 0, None, r"scale\[0, 0\] is inf"),
        (CODES, SCALES.float() * 1e5, None, r"a scale of 1e\+05 does not fit f16: use int4_g128_f32"),
    ],
)
def test_from_codes_names_what_does_not_fit(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(W4Error, match=message) as caught:
        Weight.from_codes(codes, scales, zeros, "int4_g128")
    assert "\n" not in str(caught.value)


ZEROS = torch.full((4, 2), 7.0, dtype=torch.float16)


@pytest.mark.parametrize(
    ("form", "zeros", "message"),
    [
        ("uint4_g128_z", None, r"uint4_g128_z has a zero for each group: give zeros of the shape of scales, \[4, 2\]"),
        ("uint4_g128_z", ZEROS[:, :1], r"zeros have shape \[4, 1\]; uint4_g128_z codes \[4, 256\] need \[4, 2\]"),
        ("uint4_g128_z", ZEROS.to("meta"), r"codes are on cpu, zeros on meta"),
        (
            "uint4_g128_z",
            torch.tensor([[0, 1], [2, 3], [4, 16], [0, 0]]),
            r"zero\[2, 1\] is 16: uint4_g128_z has .* 0…15",
        ),
        ("uint4_g128_z", ZEROS - 8, r"zero\[0, 0\] is -1: uint4_g128_z has integer zeros 0…15"),
        ("uint4_g128_z", ZEROS + 0.5, r"zero\[0, 0\] is 7.5: uint4_g128_z has integer zeros 0…15"),
        ("int4_g128_z", ZEROS + 1, r"zero\[0, 0\] is 8: int4_g128_z has integer zeros -8…7"),
        ("uint4_g128_m", ZEROS.int(), r"zeros are torch.int32: give them as f16"),
        ("uint4_g128_m", ZEROS * torch.nan, r"zero\[0, 0\] is nan"),
        ("uint4_g128_m", ZEROS.float() * 1e5, r"a zero of 7e\+05 does not fit f16: use uint4_g128_m_f32"),
    ],
)
def test_from_codes_names_the_zero_that_does_not_fit(form: str, zeros: torch.Tensor | None, message: str) -> None:
    with pytest.raises(W4Error, match=message) as caught:
        Weight.from_codes(CODES, SCALES, zeros, form)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int64, torch.bfloat16, torch.float64])
def test_integer_zeros_may_be_of_any_type(kind: torch.dtype) -> None:
    case = cases.call("uint4_g128_z", 1, 4, 200)
    assert torch.equal(Weight.from_codes(case.codes, case.scales, case.zeros.to(kind), "uint4_g128_z").zero, case.w.zero)


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_codes_may_be_any_integers(kind: torch.dtype) -> None:
    case = cases.call("int4_g128", 1, 4, 200)
    assert torch.equal(Weight.from_codes(case.codes.to(kind), case.scales, None, "int4_g128").codes, case.w.codes)


def test_codes_may_be_a_view() -> None:
    case = cases.call("int4_g128", 1, 4, 200)
    view = case.codes.T.contiguous().T
    assert torch.equal(Weight.from_codes(view, case.scales, None, "int4_g128").codes, case.w.codes)


def test_a_clone_has_buffers_of_its_own() -> None:
    w = cases.call("nf4_g64", 1, 4, 200).w
    copy = w.clone()
    copy.codes.zero_()
    copy.scale.zero_()
    assert w.codes.any()
    assert w.scale.any()


def test_a_weight_prints_what_it_is() -> None:
    assert repr(cases.call("nf4_g64", 1, 4, 200).w).startswith("Weight(nf4_g64, [4, 200], ")


def test_a_weight_moves() -> None:
    moved = cases.call("nf4_g64", 1, 4, 200).w.to("meta")
    assert {each.device.type for each in moved.buffers if each is not None} == {"meta"}


@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64"])
def test_weights_on_a_cpu_stay_canonical(form: str) -> None:
    case = cases.call(form, 2, 64, 1024)
    assert layout_for(case.w.format, ARCHES["portable"], 64, 1024) != case.w.layout
    layer = w4gen.Linear(case.w)
    layer(case.x)
    assert layer.layout == case.w.layout == rows(64, 1024, 4)


def torch_parts(name: str, n: int, k: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """Random parts of a tree, and what they stand for."""
    parts = oracle.random_parts(np.random.default_rng(0), oracle.TREES[name], n, k)
    kinds = {each: kind for each, (kind, _) in named(name).parts(n, k).items()}
    tensors = {each: torch.from_numpy(array) for each, array in parts.items()}
    tensors = {each: t.bfloat16() if str(kinds[each]) == "bf16" else t for each, t in tensors.items()}
    return tensors, oracle.weight(parts, oracle.TREES[name])


@pytest.mark.parametrize(("n", "k"), [(6, 512), (3, 192), (5, 320)])
@pytest.mark.parametrize("name", oracle.TREES)
def test_a_tree_is_stored_and_given_back(name: str, n: int, k: int) -> None:
    parts, w = torch_parts(name, n, k)
    made = Weight.from_parts(parts, name)
    assert np.allclose(made.dequantize(torch.float64).numpy(), w, rtol=1e-14, atol=0)
    for layout in (made.layout, layout_for(named(name), ARCHES["sm_90"], n, k)):
        packed = made.packed_as(layout)
        assert all(torch.equal(packed.parts()[each], part) for each, part in parts.items())
        assert torch.equal(packed.dequantize(torch.float64), made.dequantize(torch.float64))


@pytest.mark.parametrize("name", [*FAMILIES, *oracle.TREES])
def test_from_float_keeps_a_weight_in_every_format(name: str, rng: np.random.Generator) -> None:
    """Under whatever its scales are stored as, which are never NaN; groups of zeros stay zeros where 0 is a value."""
    form = named(name)
    w = torch.from_numpy(rng.standard_normal((8, 512)) * 0.02)
    w[2] = 0
    w[3] *= 1e-3
    made = Weight.from_float(w, form)
    found = made.dequantize(torch.float64)
    assert found.isfinite().all()
    few = {1: 0.7, 2: 0.75, 3: 0.35}.get(form.bits, 0.16)
    if form.name.startswith("uint") and form.zero is None:
        few = 0.9  # negative weights are clipped
    assert oracle.error(found.numpy(), w.numpy()) <= few
    assert (found[2] == 0).all() or form.name in ("int1", "iq4_nl")
    assert all(part.isfinite().all() for each, part in made.parts().items() if part.is_floating_point())


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "q4_k", "nf4_dq", "q6_k", "fp8_e4m3_tensor", "int3_g64", "uint5_g32_z"])
def test_from_float_takes_the_nearest_value_under_the_scales_as_stored(name: str, rng: np.random.Generator) -> None:
    """Of every code under the stored scale and zero, none is nearer."""
    w = torch.from_numpy(rng.standard_normal((4, 256)) * 0.02)
    made = Weight.from_float(w, name)
    parts = made.parts()
    every = []
    for code in range(2**made.format.bits):
        each = Weight.from_parts(parts | {"codes": torch.full_like(parts["codes"], code)}, name).dequantize(torch.float64)
        every.append(torch.nan_to_num((each - w).abs(), nan=torch.inf))
    found = (made.dequantize(torch.float64) - w).abs()
    assert torch.allclose(found, torch.stack(every).amin(0), rtol=1e-4, atol=1e-7)


def test_a_learned_codebook_beats_a_fixed_one(rng: np.random.Generator) -> None:
    w = torch.from_numpy(rng.standard_t(4, (64, 512)))
    learned, fixed = Weight.from_float(w, "learned(codebook=tensor,group=64)"), Weight.from_float(w, "nf4_g64")
    error = [oracle.error(each.dequantize(torch.float64).numpy(), w.numpy()) for each in (learned, fixed)]
    assert error[0] < 0.98 * error[1]
    assert learned.codebook.shape == (16,)


def test_small_floats_come_in_torchs_own_types(rng: np.random.Generator) -> None:
    codes = torch.from_numpy(rng.standard_normal((4, 64))).to(torch.float8_e4m3fn)
    scales = (torch.ones(4, 2) * 0.25).to(torch.float8_e8m0fnu)
    w = Weight.from_codes(codes.view(torch.uint8), scales, None, "mxfp8")
    assert torch.equal(w.dequantize(), codes.float() * 0.25)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_code_that_is_nan_is_nan_alone(code: int) -> None:
    case = cases.call(cases.FLOATS[0], 1, 4, 128)
    codes = case.codes.clone()
    codes[2, 77] = code
    w = Weight.from_codes(codes, case.scales, None, cases.FLOATS[0]).dequantize()
    assert w.isnan().sum() == 1
    assert w[2, 77].isnan()


@pytest.mark.parametrize(
    ("form", "parts", "message"),
    [
        ("nvfp4", {}, r"nvfp4_g16_e4m3 is made of codes, scale, scale.scale; scale.scale: give it in more="),
        ("nvfp4", {"scale.scale": torch.ones(1, 2)}, r"scale.scales have shape \[1, 2\]; .* need \[1, 1\]"),
        ("mxfp4", {"scale.scale": torch.ones(1, 1)}, r"scale.scale: it has no such part, leave it out"),
        ("mxfp4", {"scale": torch.ones(4, 8)}, r"scale codes are torch.float32: .* has codes, u8 in 0…255"),
        ("q4_k", {"scale": torch.full((4, 8), 64)}, r"scale code\[0, 0\] is 64: .* has codes 0…63"),
        ("learned(codebook=tensor,group=64)", {}, r"codebook: give it in more=\{'codebook': tensor\}"),
    ],
)
def test_parts_of_a_tree_that_do_not_fit_are_named(form: str, parts: dict[str, torch.Tensor], message: str) -> None:
    wanted = named(form).parts(4, 256)
    given = {each: torch.zeros(wanted[each][1], dtype=torch.uint8) for each in ("codes", "scale", "zero") if each in wanted}
    given |= {"scale": torch.ones(wanted["scale"][1])} if form.startswith("learned") else {}
    given |= {each: torch.ones(shape) for each, (_, shape) in wanted.items() if form == "q4_k" and each.endswith(".scale")}
    with pytest.raises(W4Error, match=message):
        Weight.from_parts(given | parts, form)


def test_what_is_no_weight_is_named() -> None:
    with pytest.raises(ShapeError, match=r"w is a Parameter: give a Weight, as Weight\.from_float or"):
        w4gen.linear(torch.randn(1, 8), torch.nn.Linear(8, 4).weight)
