"""A whole model from a checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from w4gen.checkpoints import gguf_model

logger = logging.getLogger("w4gen")


def load(path: str | Path, dtype: torch.dtype = torch.float16) -> torch.nn.Module:
    """The model of Transformers that a GGUF file holds, its quantized linear layers as `w4gen.Linear` over the stored codes.

    What is not quantized comes in `dtype`; embeddings are dequantized. What became of each layer goes to the logger `w4gen`.
    Raises `CheckpointError` where the file is damaged, or holds what Transformers or w4gen does not read.
    """
    loaded = gguf_model.load(path, dtype)
    logger.info("%s: %s", path, loaded)
    return loaded.model
