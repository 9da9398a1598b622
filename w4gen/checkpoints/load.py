"""A whole model from a checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from w4gen.checkpoints import folder, gguf_model, model

logger = logging.getLogger("w4gen")


def load(path: str | Path, dtype: torch.dtype = torch.float16) -> torch.nn.Module:
    """The model of Transformers that a GGUF file, or a folder of safetensors, holds.

    Its quantized linear layers are `w4gen.Linear` over the stored codes. What is not quantized comes in `dtype`; embeddings of
    GGUF are dequantized. What became of each layer, and warnings, go to the logger `w4gen`.
    Raises `CheckpointError` where the file is damaged, or holds what Transformers or w4gen does not read.
    """
    loaded = model.load(folder.read(path), dtype) if Path(path).is_dir() else gguf_model.load(path, dtype)
    logger.info("%s: %s", path, loaded)
    return loaded.model
