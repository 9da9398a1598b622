"""Write the layers in this folder by the libraries whose formats they are, each with the weight that its library reads.

    python make.py AUTOAWQ AUTO_ROUND
    PYTHONPATH=OLD python make.py old

Needs torch, compressed-tensors, transformers; AUTOAWQ and AUTO_ROUND are folders of unpacked source archives (autoawq 0.2.9,
auto-round 0.16.1), of which single files run without a GPU, OLD one where compressed-tensors 0.14.0 is installed. Each file is
one layer `layer.*`, its quantization_config in the metadata, and `truth`: the weight f32[N, K].
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path

import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent
N, K, GROUP = 32, 96, 32


def save(name: str, tensors: dict[str, torch.Tensor], truth: torch.Tensor, **said: object) -> None:
    held = {f"layer.{each}": tensor.detach().contiguous().clone() for each, tensor in tensors.items() if tensor is not None}
    held["truth"] = truth.float().contiguous()
    save_file(held, HERE / f"{name}.safetensors", {"quantization_config": json.dumps(said)})


def source(path: Path, name: str, **modules: dict[str, object]) -> types.ModuleType:
    """The module in one file, whose package is not installed: what it imports from there is given."""
    for each, names in modules.items():
        parts = each.replace("__", ".").split(".")
        for size in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:size]), types.ModuleType(".".join(parts[:size])))
        vars(sys.modules[".".join(parts)]).update(names)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def numbers(bits: int, group: int = GROUP) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [N, K], scales and zeros [N, groups], and the weight that they stand for."""
    codes = torch.randint(0, 2**bits, (N, K))
    scales = (torch.rand(N, K // group) * 0.01 + 0.01).half()
    zeros = torch.randint(1, 2**bits, (N, K // group))
    return codes, scales, zeros, (codes - zeros.repeat_interleave(group, 1)) * scales.float().repeat_interleave(group, 1)


def awq(folder: Path) -> None:
    given = {
        "awq__utils__module": {"try_import": lambda name: (None, "")},
        "awq__utils__utils": {"get_best_device": lambda: "cpu"},
        "awq__utils__packing_utils": {"dequantize_gemm": None},
    }
    for version, form in (("gemm", "WQLinear_GEMM"), ("gemv", "WQLinear_GEMV")):
        module = source(folder / f"awq/modules/linear/{version}.py", f"awq_{version}", **given)
        _, scales, zeros, w = numbers(4)
        linear = torch.nn.Linear(K, N)
        linear.weight.data = w
        turned = (scales.T, zeros.T) if version == "gemm" else (scales, zeros)
        layer = getattr(module, form).from_linear(linear, 4, GROUP, scales=turned[0].contiguous(), zeros=turned[1].contiguous())
        save(f"awq_{version}", layer.state_dict(), w, quant_method="awq", bits=4, group_size=GROUP, version=version)


def gptq(folder: Path) -> None:
    bits = source(folder / "auto_round/utils/bit_packing.py", "bit_packing")
    given = {"auto_round__utils": {"get_packing_device": lambda device=None: "cpu"}, "auto_round__utils__bit_packing": vars(bits)}
    for package in ("auto_round_extension", "auto_round_extension.torch"):
        sys.modules.setdefault(package, types.ModuleType(package))
    for version, file in (("gptq_v2", "qlinear_torch"), ("gptq", "qlinear_torch_zp")):
        module = source(folder / f"auto_round_extension/torch/{file}.py", file, **given)
        sys.modules.setdefault("auto_round_extension.torch.qlinear_torch", module)
        for width in (2, 3, 4, 8):
            _, scales, zeros, w = numbers(width)
            linear = torch.nn.Linear(K, N)
            linear.weight.data = w
            layer = module.QuantLinear(width, GROUP, K, N, True)
            layer.device = "cpu"
            layer.pack(linear, scales.float(), zeros, None, device="cpu")
            said = {"quant_method": "gptq", "bits": width, "group_size": GROUP, "checkpoint_format": version}
            save(f"{version}_{width}", layer.state_dict(), w, **said)


def compressed_tensors(age: str, cases: list[tuple[int, bool, str]]) -> None:
    if age:
        from compressed_tensors.compressors.quantized_compressors import pack_quantized as helpers
    else:
        from compressed_tensors.compressors.pack_quantized import helpers

    for bits, symmetric, way in cases:
        group = GROUP if way == "group" else K
        codes, scales, zeros, w = numbers(bits, group)
        half = 2 ** (bits - 1)
        index = torch.randperm(K) // GROUP if bits == 4 and way == "group" else None
        if symmetric:
            zeros = torch.full_like(zeros, half)
        of = torch.arange(K) // group if index is None else index
        w = (codes - zeros[:, of]) * scales.float()[:, of]
        tensors = {
            "weight_packed": helpers.pack_to_int32((codes - half).to(torch.int8), bits),
            "weight_scale": scales.bfloat16() if bits == 8 else scales,
            "weight_shape": torch.tensor([N, K]),
            "weight_zero_point": None if symmetric else helpers.pack_to_int32((zeros - half).to(torch.int8), bits, packed_dim=0),
            "weight_g_idx": None if index is None else index.int(),
        }
        if bits == 8:
            w = (codes - zeros[:, of]) * scales.bfloat16().float()[:, of]
        weights = {"num_bits": bits, "type": "int", "strategy": way, "group_size": group, "symmetric": symmetric}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        said = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
        save(f"ct{age}_{bits}_{way}{'' if symmetric else '_z'}", tensors, w, **said)


def floats() -> None:
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8

    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    w = values[torch.randint(0, 16, (N, K))]
    packed = pack_fp4_to_uint8(w)
    scale, overall = (torch.rand(N, K // 16) * 200 + 20).to(torch.float8_e4m3fn), torch.tensor([4096.0])
    truth = w * scale.float().repeat_interleave(16, 1) / overall
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float"}}}
    said = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": groups}
    save("ct_nvfp4", {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": overall}, truth, **said)
    theirs = {"weight": packed, "weight_scale": scale, "weight_scale_2": 1 / overall[0], "input_scale": torch.tensor(1.0)}
    save("modelopt_nvfp4", theirs, truth, quant_method="modelopt", quant_algo="NVFP4")
    power = torch.randint(110, 130, (N, K // 32), dtype=torch.uint8)
    truth = w * 2.0 ** (power.float() - 127).repeat_interleave(32, 1)
    said["format"] = "mxfp4-pack-quantized"
    save("ct_mxfp4", {"weight_packed": packed, "weight_scale": power}, truth, **said)


if __name__ == "__main__":
    torch.manual_seed(0)
    if sys.argv[1:2] == ["old"]:
        compressed_tensors("_old", [(bits, bits != 6, "group") for bits in (3, 5, 6, 7)])
    else:
        awq(Path(sys.argv[1]))
        gptq(Path(sys.argv[2]))
        floats()
        compressed_tensors("", [(bits, bits % 2 == 0, "group") for bits in range(1, 9)] + [(4, False, "channel")])
