"""run_record.json: what exactly ran, on what, at which cost, so that a checkpoint can be believed later."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import sys
from datetime import datetime, timezone
from typing import Any

import torch
from transformers import PreTrainedModel

import ppo_fast

_PACKAGES = ("torch", "transformers", "peft", "accelerate", "safetensors")


def now() -> str:
    """UTC, ISO 8601, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, machine, and the path that each op takes."""
    return {
        "versions": {
            "ppo_fast": ppo_fast.__version__,
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in _PACKAGES},
        },
        "machine": {
            "platform": platform.platform(),
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        },
        "ops": ppo_fast.backends(),
        "command": " ".join(sys.argv),
    }


def model_hash(model: PreTrainedModel) -> str:
    """SHA-256 over names, shapes and bytes of all parameters, frozen ones too."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(parameter.detach().contiguous().cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
