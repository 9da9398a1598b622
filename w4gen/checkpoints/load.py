"""A whole model from a checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from w4gen.checkpoints import folder, gguf_model, model
from w4gen.errors import CheckpointError

logger = logging.getLogger("w4gen")


def load(path: str | Path, dtype: torch.dtype = torch.float16) -> torch.nn.Module:
    """The model of Transformers that a GGUF file, or a folder of safetensors, holds.

    Its quantized linear layers are `w4gen.Linear` over the stored codes. What is not quantized comes in `dtype`; embeddings of
    GGUF are dequantized. `save_pretrained` writes files of w4gen's own. What became of each layer goes to the logger `w4gen`;
    warnings, as of tensors that no module takes, too. Raises `CheckpointError` where the file is damaged, or holds what
    Transformers or w4gen does not read.
    """
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise CheckpointError(f"dtype={dtype!r}: give torch.float16, torch.bfloat16 or torch.float32")
    loaded = model.load(folder.read(path), dtype) if Path(path).is_dir() else gguf_model.load(path, dtype)
    if warned := [*loaded.notes, *(f"{name} was not used" for name in loaded.unused)]:
        logger.warning("%s: %s", path, "; ".join(warned))
    logger.info("%s: %s", path, loaded)
    if loaded.layers:
        from w4gen.checkpoints import quantizer

        quantizer.keep(loaded.model)
    return loaded.model
