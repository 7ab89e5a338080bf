"""The experts of a worker as they wait in host memory: one block for all, pinned in one piece where a GPU copies from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy

import torch
from torch import Tensor

from expert_worker.shelf import Shelf
from forefetch.errors import ConfigError
from forefetch.kernels.grouped_mlp.formats import ExpertFormat, blob_bytes


class Host:
    """`blobs` uint8 [experts, stride]: an expert a row, in `format` (formats.py says what its bytes mean). Row n is expert n,
    unless a `shelf` says who lies where."""

    shelf: Shelf | None = None

    def __init__(
        self,
        experts: int,
        hidden: int,
        width: int,
        format: ExpertFormat,
        *,
        pinned: bool,
        allocate: Callable[[int, int], Tensor] | None = None,
    ) -> None:
        """Allocates, and does not fill. allocate(experts, stride): where the blobs are to lie in particular.

        ConfigError when the memory is not there or cannot be pinned.
        """
        self.format, self.hidden, self.width = format, hidden, width
        self.stride = blob_bytes(hidden, width, format)
        need = f"{experts} experts of {self.stride} bytes take {experts * self.stride / 2**30:.1f} GiB of host memory"
        try:
            if allocate is None:
                self.blobs = torch.empty(experts, self.stride, dtype=torch.uint8, pin_memory=pinned)
            else:
                self.blobs = allocate(experts, self.stride)
        except RuntimeError as error:
            raise ConfigError(f"--experts: {need}{', which must be pinned' if pinned else ''}: {_first_line(error)}") from None
        if pinned and not self.blobs.is_pinned():
            raise ConfigError(f"--experts: {need}, and they could not be pinned; copies to the device would be slow")

    def blob(self, number: int) -> Tensor:
        """An expert's bytes. KeyError for one that is not here."""
        return self.blobs[self.place_of(number)]

    def place_of(self, number: int) -> int:
        """Its row. KeyError for one that is not here."""
        return self.shelf.place_of[number] if self.shelf else number

    def row(self, place: int) -> Host:
        """A view of one place, for one expert."""
        view = copy(self)
        view.blobs, view.shelf = self.blobs[place : place + 1], None
        return view

    def fill(self, blobs: Iterable[Tensor], on_progress: Callable[[int, int], None]) -> None:
        """Takes the blobs of experts 0, 1, ..."""
        total = len(self.blobs)
        for number, blob in enumerate(blobs):
            self.blobs[number].copy_(blob)
            on_progress(number + 1, total)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
