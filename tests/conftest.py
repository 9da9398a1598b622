"""What every test shares: a cache of the session's own, reproducible hypothesis runs, seeded data."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from pathlib import Path

import hypothesis
import numpy as np
import pytest

WORKER = "PYTEST_XDIST_WORKER" in os.environ
SESSION = os.environ["TESTS_SESSION"] if WORKER else tempfile.mkdtemp(prefix="w4gen-tests-")
os.environ["TESTS_SESSION"] = SESSION  # for the workers: what one has compiled is compiled
os.environ["W4GEN_CACHE"] = f"{SESSION}/cache"
os.environ["TRITON_CACHE_DIR"] = f"{SESSION}/triton"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers fill the processors; threads of torch that wait for each other spin
for knob in ("W4GEN_STRICT", "W4GEN_DEBUG", "W4GEN_ARCH", "W4GEN_JIT"):
    os.environ.pop(knob, None)

hypothesis.settings.register_profile(
    "w4gen", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("deep", hypothesis.settings.get_profile("w4gen"), derandomize=False, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "w4gen"))


def pytest_collection_finish() -> None:
    """What is imported by now stays: a test that collects garbage need not look for it there."""
    gc.freeze()


def pytest_unconfigure() -> None:
    if not WORKER:
        shutil.rmtree(SESSION, ignore_errors=True)


@pytest.fixture(autouse=True)
def no_shipped_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests ask what the rules choose; rows that come with the package are another's choice, and change with it."""
    monkeypatch.setattr("w4gen.paths.shipped", lambda: Path(SESSION) / "shipped")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder for one test."""
    monkeypatch.setenv("W4GEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
