"""The experts of a shard as they wait in host memory: one block for all, pinned in one piece where a GPU copies from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from forefetch.errors import ConfigError
from forefetch.kernels.grouped_mlp.formats import ExpertFormat, blob_bytes


class Host:
    """`blobs` uint8 [experts, stride]: row n is expert n in `format` (formats.py says what its bytes mean)."""

    def __init__(self, experts: int, hidden: int, width: int, format: ExpertFormat, *, pinned: bool) -> None:
        """Allocates, and does not fill. ConfigError when the memory is not there or cannot be pinned."""
        self.format, self.hidden, self.width = format, hidden, width
        self.stride = blob_bytes(hidden, width, format)
        need = f"{experts} experts of {self.stride} bytes take {experts * self.stride / 2**30:.1f} GiB of host memory"
        try:
            self.blobs = torch.empty(experts, self.stride, dtype=torch.uint8, pin_memory=pinned)
        except RuntimeError as error:
            raise ConfigError(f"--experts: {need}{', which must be pinned' if pinned else ''}: {_first_line(error)}") from None
        if pinned and not self.blobs.is_pinned():
            raise ConfigError(f"--experts: {need}, and they could not be pinned; copies to the device would be slow")

    def fill(self, blobs: Iterable[Tensor], on_progress: Callable[[int, int], None]) -> None:
        """Takes the blobs of experts 0, 1, ..."""
        total = len(self.blobs)
        for number, blob in enumerate(blobs):
            self.blobs[number].copy_(blob)
            on_progress(number + 1, total)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
