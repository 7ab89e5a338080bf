"""transformers' own quantised caches, run inside this trunk: their layers keep and give back K and V, the attention is ours.

A `QuantizedLayer` keeps new tokens as they are until there are 128 of them, then quantises all that it has given back so far
once more, the new ones with it. Fed in pieces of 128 it does what it would do token by token. Errors of rounding pile up that
way, which is the peer's own affair. Groups of 64, a scale and a zero each, counted as 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from forefetch.errors import ConfigError
from router_service.batch import StepBatch

PIECE, GROUP = 128, 64
PEERS = {"hf-quanto2": 2, "hf-quanto4": 4, "hf-hqq2": 2, "hf-hqq4": 4}
"""Name -> bits of a code."""
_PACKAGES = {"quanto": "optimum.quanto", "hqq": "hqq"}


def runs(name: str) -> bool:
    """Whether the packages that a peer needs are installed."""
    try:
        return find_spec("transformers") is not None and find_spec(_PACKAGES[_backend(name)]) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def _backend(name: str) -> str:
    return name.removeprefix("hf-").rstrip("0123456789")


def layer_maker(name: str) -> Callable[[], Any]:
    """Makes the peer's cache for one layer. ConfigError where it does not run."""
    if not runs(name):
        raise ConfigError(f"--formats {name}: needs transformers and {_PACKAGES[_backend(name)]}; install forefetch[peers]")
    from transformers import cache_utils

    bits = PEERS[name]
    if _backend(name) == "quanto":
        return lambda: cache_utils.QuantoQuantizedLayer(bits, q_group_size=GROUP, residual_length=PIECE)
    return lambda: cache_utils.HQQQuantizedLayer(bits, axis_key=1, axis_value=1, q_group_size=GROUP, residual_length=PIECE)


class PeerCache:
    """For one sequence from position 0 in one step; only `step` of what a cache does."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make, self.page_size = make, PIECE

    def step(self, batch: StepBatch, dtype: torch.dtype, scale: float) -> PeerStep:
        """The attention of a step's rows."""
        return PeerStep(self.make, scale)


@dataclass(frozen=True, slots=True)
class PeerStep:
    """Attention over what the peer gives back."""

    make: Callable[[], Any]
    scale: float

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [R, Hq, D], k, v [R, Hkv, D] -> [R, Hq, D]."""
        cache, count, (heads, dim) = self.make(), len(q), k.shape[1:]
        # The peer rounds its first piece only once it has seen it, like all later ones.
        keys, values = (x.half().float().transpose(0, 1)[None] for x in (k, v))  # [1, Hkv, R, D]
        queries = q.float().view(count, heads, -1, dim).permute(1, 2, 0, 3)  # [Hkv, G, R, D]
        parts = []
        for low in range(0, count, PIECE):
            high = min(count, low + PIECE)
            seen = cache.update(keys[:, :, low:high], values[:, :, low:high])
            past, mixed = (x[0, :, None].expand(-1, queries.shape[1], -1, -1) for x in seen)
            mask = torch.full((high - low, high), -torch.inf, device=q.device).triu_(low + 1)
            parts.append(scaled_dot_product_attention(queries[:, :, low:high], past, mixed, attn_mask=mask, scale=self.scale))
        return torch.cat(parts, 2).permute(2, 0, 1, 3).reshape(q.shape).to(q.dtype)
