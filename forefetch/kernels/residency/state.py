"""What the residency kernels share: one address space for slots and host memory, and the tables over it.

Row r of `base` begins at base + r * stride. Rows `first_slot` .. are the slots on the device, rows `first_host` .. the
experts in pinned host memory, which a GPU reads at the same addresses as the host. So the kernels of `grouped_mlp` take an
expert from wherever its row says, and a table of rows is all that changes when an expert moves. Letters: L layers, E experts,
S slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

COUNTERS = ("hits", "late", "misses", "resident", "brought", "wasted", "waits", "absent")
MOST_TARGETS = 2  # layers that heads name at a time


@dataclass
class Mover:
    """One of several who choose copies: what it chose, whether its turn was granted, and where its copies are counted."""

    jobs: Tensor  # int32 [L, C, 2], as Residents.jobs
    granted: Tensor  # int32 [1]
    counters: Tensor  # int64 [len(COUNTERS)]

    @staticmethod
    def of(state: Residents, counters: Tensor | None = None) -> Mover:
        """A new one. counters: where its copies are counted, unless with all others."""
        return Mover(
            torch.full_like(state.jobs, -1), torch.zeros_like(state.active), state.counters if counters is None else counters
        )


@dataclass
class Residents:
    """`slots` uint8 [S, stride] on the device; `host` uint8 [N, stride], pinned if that is a GPU, `aligned` to the slots.

    `members` int [N]: which expert, layer * E + e, each row of `host` is; others are held elsewhere.
    """

    slots: Tensor
    host: Tensor
    members: Tensor
    layers: int
    experts: int
    most_copies: int = 2  # that one `pick` decides on
    waits: bool = True  # whether `enter` waits for copies under way
    table: Tensor = field(init=False)

    def __post_init__(self) -> None:
        """ValueError when a whole number of rows does not lie between slots and host memory."""
        stride, device = self.slots.stride(0), self.slots.device
        apart = self.host.data_ptr() - self.slots.data_ptr()
        if apart % stride or self.host.stride(0) != stride or len(self.host) != len(self.members):
            raise ValueError(f"host rows {tuple(self.host.shape)}, {apart} bytes behind slots of {stride}, do not fit them")
        apart //= stride
        self.stride = stride
        self.base, self.first_slot, self.first_host = (self.slots, 0, apart) if apart > 0 else (self.host, -apart, 0)
        total = self.layers * self.experts

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.home = ints(total) - 1  # the row of each expert in host memory
        self.home[self.members.long().to(device)] = (
            torch.arange(len(self.host), dtype=torch.int32, device=device) + self.first_host
        )
        self.table = self.home.clone()  # where each expert is read
        self.coming = ints(total)  # being copied
        self.expert_in = ints(len(self.slots)) - 1
        self.unused = ints(len(self.slots))  # came by a prediction, and no layer has used it
        self.active = ints(1) - 1  # the layer whose kernels may be reading
        self.averages = torch.full((2, total), 1.0 / self.experts, device=device)  # of use: quick and slow to forget
        self.chance = torch.zeros(total, device=device)  # that the next call needs it, as heads say
        self.moving = ints(1)  # whether a Mover has its turn
        self.jobs = ints(self.layers, self.most_copies, 2) - 1  # what `pick` chose at each layer's gate
        self.candidates = 1 << (2 * self.most_copies - 1).bit_length()  # twice as many as one `pick` may take
        self.spares = ints(self.candidates) - 1  # slots that the next `pick` may empty
        self.until = torch.zeros(self.candidates, device=device)  # calls until their experts are expected to be needed
        self.arrived = ints(self.most_copies)  # programs of `bring` that are done with a job
        self.counts = ints(self.experts)  # scratch of `enter`
        self.misses = torch.zeros(MOST_TARGETS * self.experts, device=device)  # scratch of `note`
        self.rows = ints(self.experts)  # what `enter` found for the layer at hand
        self.counters = torch.zeros(len(COUNTERS), dtype=torch.int64, device=device)

    def occupy(self) -> None:
        """Fills the slots with the first experts of every layer, evenly; to begin with, and not beside other calls."""
        slots, home = len(self.slots), self.home.cpu()
        held = torch.nonzero(home >= 0).flatten()
        chosen = held[torch.arange(slots) * len(held) // slots]
        for slot, row in enumerate((home[chosen] - self.first_host).tolist()):
            self.slots[slot].copy_(self.host[row], non_blocking=True)
        numbers = chosen.int().to(self.slots.device)
        self.expert_in.copy_(numbers)
        self.table[numbers.long()] = torch.arange(slots, dtype=torch.int32, device=self.slots.device) + self.first_slot
        if self.slots.is_cuda:  # whatever comes next may come on another stream
            torch.cuda.synchronize(self.slots.device)

    def resident(self, layer: int) -> list[int]:
        """The layer's experts that sit in slots, ascending. Waits for the device."""
        rows = self.table[layer * self.experts : (layer + 1) * self.experts].cpu() - self.first_slot
        return torch.nonzero((rows >= 0) & (rows < len(self.slots))).flatten().tolist()


def aligned(experts: int, stride: int, slots: Tensor) -> Tensor:
    """Host memory for `experts` blobs, a whole number of strides away from the slots, pinned where they lie on a GPU."""
    raw = torch.empty((experts + 1) * stride, dtype=torch.uint8, pin_memory=slots.is_cuda)
    skip = (slots.data_ptr() - raw.data_ptr()) % stride
    return raw[skip : skip + experts * stride].view(experts, stride)
