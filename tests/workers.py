"""Processes that tune, replaced by what a test makes up."""

from __future__ import annotations

from pathlib import Path

import pytest

from w4gen.bench import tune


def made_up(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes that tune run `text` instead."""
    (folder / "made_up_worker.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(tune, "WORKER", "made_up_worker")
