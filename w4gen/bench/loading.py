"""`python -m w4gen.bench.loading`: memory and time to load a large synthetic checkpoint, and to start from what is packed.

It writes a GPTQ checkpoint of a Llama of 7B sizes with random codes to a folder that it removes (9 GB with what is packed), and
measures each step in a process of its own. On a GPU models are loaded there. Repacking of one layer is timed too.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from w4gen import processes
from w4gen.bench.facts import facts
from w4gen.bench.results import write
from w4gen.checkpoints import derive, folder
from w4gen.checkpoints.load import load
from w4gen.formats import named
from w4gen.ir import layout as layouts
from w4gen.runtime.launch import arch_of
from w4gen.runtime.repack import in_slabs, repacked
from w4gen.runtime.weight import Weight
from w4gen.schedule.arch import arch
from w4gen.schedule.stored import layout_for

HIDDEN, INNER, WORDS, GROUP = 4096, 11008, 32000, 128
LINEAR = {
    **{f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"},
    **{f"mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")},
    "mlp.down_proj": (HIDDEN, INNER),
}
REPACKED = 8192, 28672
TIMES = {"cpu": 3, "cuda": 20}
TITLE = "Loading a checkpoint"


def tensors(layers: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a Llama, its linear layers as GPTQ stores them."""
    for name in ("model.embed_tokens", "lm_head"):
        yield f"{name}.weight", torch.randn(WORDS, HIDDEN).half()
    yield "model.norm.weight", torch.ones(HIDDEN).half()
    for layer in range(layers):
        start = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{start}.{name}.weight", torch.ones(HIDDEN).half()
        for name, (n, k) in LINEAR.items():
            words, zeros = ((k // 8, n), (k // GROUP, n // 8))
            yield f"{start}.{name}.qweight", torch.randint(-(2**31), 2**31, words, dtype=torch.int32)
            yield f"{start}.{name}.qzeros", torch.randint(0, 2**31, zeros, dtype=torch.int32) & 0x66666666
            yield f"{start}.{name}.scales", torch.rand(k // GROUP, n).half() / 1000
            yield f"{start}.{name}.g_idx", torch.arange(k, dtype=torch.int32) // GROUP


def checkpoint(path: Path, layers: int) -> int:
    """Write the checkpoint; its bytes."""
    stated = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_attention_heads": 32, "num_hidden_layers": layers, "vocab_size": WORDS, "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq"},
    }  # fmt: skip
    folder.save(path, stated, tensors(layers))
    return sum(each.stat().st_size for each in path.glob("*.safetensors"))


def peak() -> int:
    """The most memory that this process has had, files that it has mapped included."""
    (told,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(told) * 1024


def resident() -> int:
    """The memory that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def step(name: str, path: Path) -> dict[str, float]:
    """One step, in the process that it has for itself: seconds, those of processors, and memory beyond what importing took."""
    import accelerate  # noqa: F401  what every start imports is not counted
    import transformers.models.llama.modeling_llama

    from w4gen.checkpoints import quantizer  # noqa: F401

    _ = transformers.AutoModelForCausalLM
    place = "cuda" if torch.cuda.is_available() else "cpu"
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
    before, start, spent = resident(), time.perf_counter(), time.process_time()
    if name == "pack":
        derive.pack(path, arch_of().name, progress=False)
    else:
        load(path, device=place)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    told = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - spent}
    return {**told, "bytes": peak() - before, "bytes_gpu": gpu}


def repack() -> dict[str, float]:
    """Milliseconds for one layer of int4_g128, from a stream along K to an H200's order: the median, on the device here.

    The whole weight, the codes alone, and what bounds these: a copy of the words. On a GPU the codes by PyTorch, too.
    """
    n, k = REPACKED
    device, form = torch.device("cuda" if torch.cuda.is_available() else "cpu"), named("int4_g128")
    words = torch.randint(-(2**31), 2**31, (n * k // 8,), dtype=torch.int32).to(device)
    source, order = layouts.dense(n, k, 4), layout_for(form, arch("sm_90"), n, k)
    weight = Weight(form, n, k, source, (words, torch.rand(n, k // GROUP).half().to(device)))
    runs: dict[str, Callable[[], Any]] = {
        "milliseconds": lambda: weight.packed_as(order),
        "codes": lambda: repacked(words, source, order, n, k),
        "copy": words.clone,
    }
    if device.type == "cuda":
        runs["by_pytorch"] = lambda: in_slabs(words, source, order, n, k)
    return {name: statistics.median(_timed(run, device) for _ in range(TIMES[device.type])) for name, run in runs.items()}


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of one run, with all that it launched."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32, help="of the model: 32 make 7B")
    parser.add_argument("--at", type=Path, help="where the folder is made; default: the system's temporary folder")
    parser.add_argument("--out", type=Path, help="JSON of the results")
    parser.add_argument("--step", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        print(json.dumps(step(options.step[0], Path(options.step[1]))))
        return
    found: dict[str, Any] = {"threads": torch.get_num_threads(), "repack_ms": repack()}
    with tempfile.TemporaryDirectory(dir=options.at) as made:
        path = Path(made) / "model"
        found |= {"layers": options.layers, "checkpoint_bytes": checkpoint(path, options.layers), "steps": {}}
        for name in ("load", "pack", "second start"):
            command = processes.module("w4gen.bench.loading", "--step", name, str(path))
            told = subprocess.run(command, env=processes.environment(), check=True, capture_output=True, text=True).stdout
            found["steps"][name] = json.loads(told.splitlines()[-1])
            print(name, found["steps"][name], flush=True)
    print(json.dumps(found, indent=1))
    if options.out:
        write(options.out, facts("w4gen.bench.loading") | {"title": TITLE, "loading": found})


if __name__ == "__main__":
    main()
