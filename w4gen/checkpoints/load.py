"""A whole model from a checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from w4gen.checkpoints import folder, gguf_model, model, packed
from w4gen.checkpoints.gguf_model import Loaded
from w4gen.errors import CheckpointError
from w4gen.runtime.launch import arch_of

logger = logging.getLogger("w4gen")


def load(path: str | Path, dtype: torch.dtype | None = torch.float16, device: torch.device | str = "cpu") -> torch.nn.Module:
    """The model of Transformers that a GGUF file, or a folder of safetensors, holds, on a device.

    Its quantized linear layers are `w4gen.Linear` over the stored codes. What is not quantized comes in `dtype` (None: as it is
    stored; of GGUF in float32); embeddings of GGUF are dequantized. Where `w4gen pack` made something of these files for the
    arch of the device, that is mapped into memory instead. `save_pretrained` writes files of w4gen's own. What became of each
    layer goes to the logger `w4gen`; warnings, as of tensors that no module takes, too. Raises `CheckpointError` where the file
    is damaged, or holds what Transformers or w4gen does not read.
    """
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, None):
        raise CheckpointError(f"dtype={dtype!r}: give torch.float16, torch.bfloat16 or torch.float32")
    path, device = Path(path), torch.device(device)
    loaded = whole(packed.fresh(path, arch_of(device).name) or path, dtype, device)
    if warned := [*loaded.notes, *(f"{name} was not used" for name in loaded.unused)]:
        logger.warning("%s: %s", path, "; ".join(warned))
    logger.info("%s: %s", path, loaded)
    if loaded.layers:
        from w4gen.checkpoints import quantizer

        quantizer.keep(loaded.model)
    return loaded.model


def whole(path: Path, dtype: torch.dtype | None, device: torch.device) -> Loaded:
    """A model, and what became of its tensors."""
    if path.is_dir():
        return model.load(folder.read(path), dtype, device)
    loaded = gguf_model.load(path, dtype or torch.float32)
    loaded.model.to(device)
    return loaded
