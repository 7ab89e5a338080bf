"""Where and in what type a service computes: the meaning of "auto", in one place. And how host numbers get there."""

from __future__ import annotations

import torch

from forefetch.errors import ConfigError


def place(device: str, dtype: str, stored: str) -> tuple[torch.device, torch.dtype]:
    """`--device` and `--dtype` of a service, and the type a checkpoint is stored in -> what to use.

    auto is a GPU if there is one, and float32 on a CPU (which is slow at 16 bits, see benchmarks/LOG.md), the stored type on a
    GPU. Raises ConfigError for a device that is not there.
    """
    name = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if name.split(":")[0] not in ("cpu", "cuda") or (name.startswith("cuda") and not torch.cuda.is_available()):
        raise ConfigError(f"--device {name}: there is no such device here")
    try:
        chosen = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"--device {name}: is not cpu, cuda or cuda:N") from None
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {name}: there are {torch.cuda.device_count()} such devices here")
    automatic = "float32" if chosen.type == "cpu" else stored
    return chosen, getattr(torch, automatic if dtype == "auto" else dtype)


def upload(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`values` from the host on `device`. A GPU is not waited for: they pass pinned memory, in its stream's order."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)
