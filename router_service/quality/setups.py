"""What is compared: every sealed format, min-max quantisation as the baseline of equal bytes, and `peers.py`.

The baseline is KIVI's scheme (arXiv 2402.02750): asymmetric integers between minimum and maximum, K per channel in groups of
tokens, V per token in groups of channels, a float16 scale and zero per group, the newest tokens in float16; no sinks, no
outliers, nothing fitted. It keeps as many tokens in float16 as the format that it stands beside: those that are sinks there
are newest tokens here. Groups are chosen so that a page takes 0.03 bits more than the format's, never fewer (`MIN_MAX`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from forefetch.errors import ConfigError
from forefetch.kernels.kv_codec import KvFormat
from forefetch.spec import ModelSpec
from router_service.batch import StepBatch
from router_service.cache import KvCache
from router_service.quality.peers import GROUP, PEERS, PeerCache, layer_maker, runs
from router_service.sealed import SealedCache

OWN = ("fp16", "e2m0", "asym2", "mixed", "asym3", "fp4")
MIN_MAX = ("kivi2", "kivi2-k64", "kivi2-g64", "kivi3-k64", "kivi4-g64")
DEFAULT = (*OWN, *MIN_MAX, *(name for name in PEERS if "quanto" in name and runs(name)))
"""Every format, for each a min-max baseline of as many bytes or a few more, and transformers' quanto caches where installed.
HQQ takes minutes a window."""
INT8_TRUNK = "int8-trunk"
"""Not a format of K and V: what the router's --trunk int8 costs, with K and V in float16."""
BASELINES = {
    "kivi2": (2, 128, 128),
    "kivi2-k64": (2, 64, 128),
    "kivi2-g64": (2, 64, 64),
    "kivi2-g32": (2, 32, 32),
    "kivi3": (3, 128, 128),
    "kivi3-k64": (3, 64, 128),
    "kivi4": (4, 128, 128),
    "kivi4-g64": (4, 64, 64),
}
"""Bits of a code, tokens of a group of K, channels of a group of V."""


@dataclass(frozen=True)
class Setup:
    """One thing to measure. `format` says for a baseline which tokens are quantised; None: all stay float16."""

    name: str
    format: KvFormat | None
    exempt: frozenset[int] = frozenset()
    baseline: tuple[int, int, int] | None = None
    rounded: bool = False  # the trunk is in int8 (--trunk), K and V in float16

    def cache(self, spec: ModelSpec, rows: int, device: torch.device) -> KvCache | SealedCache | MinMaxCache | PeerCache:
        """Memory for one sequence of up to `rows` tokens, all in one step."""
        page = self.format.page if self.format else 128
        pages = 2 + rows // page
        if self.format is None:
            return KvCache(spec, pages=pages, page_size=page, dtype=torch.float16, device=device)
        if self.name in PEERS:
            return PeerCache(layer_maker(self.name))
        if self.baseline is not None:
            return MinMaxCache(self.format, self.exempt, *self.baseline)
        return SealedCache(spec, self.format, exempt=self.exempt, pages=pages, lanes=1, max_rows=rows, device=device)

    def page_bits(self) -> float:
        """Bits per element of a sealed token."""
        if self.format is None:
            return 16.0
        if self.baseline is not None:
            bits, k_group, v_group = self.baseline  # a scale and a zero for each group of K, and of V
            return bits + 16 / min(k_group, self.format.page) + 16 / min(v_group, self.format.head_dim)
        return 8 * self.format.blob_bytes / (2 * self.format.page * self.format.head_dim)

    def bits(self, spec: ModelSpec, context: int) -> float:
        """Bits per element that a sequence of `context` tokens takes, tail and sinks counted: the mean over the lengths of the
        page that ends there, because a tail grows and is sealed by turns."""
        if self.format is None:
            return 16.0
        lengths = range(max(1, context - self.format.page + 1), context + 1)
        held = sum(self._held(length) for length in lengths) / sum(lengths)
        share = len(self.exempt) / spec.layers
        return share * 16.0 + (1 - share) * held

    def _held(self, length: int) -> float:
        assert self.format is not None
        sealed = self.format.sealed_pages(length) * self.format.page
        sinks = min(self.format.sinks, sealed)
        return self.page_bits() * sealed + 16.0 * (length - sealed + sinks)


def setups(names: Sequence[str], format_of: KvFormat, thirds: int, recent: int, exempt: frozenset[int]) -> list[Setup]:
    """`format_of`: page, sinks, outliers and head dim for all. `recent` -1: each format's default.

    ConfigError: no such one, or a peer that is not installed."""
    found = []
    for name in names:
        kind, _, options = name.partition(":")
        changes = _options(name, options)
        if kind in {"fp16", INT8_TRUNK}:
            found.append(Setup(name, None, rounded=kind == INT8_TRUNK))
            continue
        if kind in PEERS:
            layer_maker(kind)  # refused before anything is measured
            format = replace(format_of, name="asym2", page=128, recent=0, sinks=0)
            found.append(Setup(name, format, frozenset(), (PEERS[kind], GROUP, GROUP)))
            continue
        base = "asym2" if kind in BASELINES else kind
        own = recent if recent >= 0 else 32 if base == "fp4" or kind.startswith("kivi4") else 112
        values: dict[str, Any] = {"name": base, "recent": own, "thirds": thirds if base == "mixed" else 0, **changes}
        try:
            format = replace(format_of, **values)
            if kind in BASELINES:
                format = replace(format, recent=format.recent + format.sinks, sinks=0)
        except ValueError as error:
            raise ConfigError(f"--formats {name}: {error}") from None
        found.append(Setup(name, format, exempt, BASELINES.get(kind)))
    return found


def _options(name: str, options: str) -> dict[str, int]:
    """`recent=64+sinks=0` -> numbers."""
    try:
        pairs = [option.split("=") for option in options.split("+") if option]
        return {key: int(value) for key, value in pairs}
    except ValueError:
        raise ConfigError(f"--formats {name}: options are written as name:recent=64+sinks=0") from None


class MinMaxCache:
    """The baseline, for one sequence from position 0 in one step. Nothing is packed: it is compared by what it computes.
    Only `step` of what a cache does."""

    def __init__(self, format: KvFormat, exempt: frozenset[int], bits: int, k_group: int, v_group: int) -> None:
        self.format, self.exempt, self.page_size, self.steps = format, exempt, format.page, 2**bits - 1
        self.k_group, self.v_group = k_group, v_group

    def step(self, batch: StepBatch, dtype: torch.dtype, scale: float) -> MinMaxStep:
        """The attention of a step's rows."""
        return MinMaxStep(self, scale)

    def sealed(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Whole pages of k, v [Hkv, R, D] as attention sees them."""
        page = self.format.page
        whole = k.shape[1] // page * page
        return self.rounded(k[:, :whole].mT, min(self.k_group, page)).mT, self.rounded(v[:, :whole], self.v_group)

    def rounded(self, x: Tensor, group: int) -> Tensor:
        """x [..., n] through codes, groups along the last dim."""
        size = min(group, x.shape[-1])
        groups = x.reshape(*x.shape[:-1], -1, size)
        low = groups.amin(-1, keepdim=True).half().float()
        step = ((groups.amax(-1, keepdim=True) - low) / self.steps).half().float()
        codes = ((groups - low) / step.clamp_min(1e-8)).round_().clamp_(0, self.steps)
        rounded: Tensor = codes * step + low
        return rounded.reshape(x.shape)


@dataclass(frozen=True, slots=True)
class MinMaxStep:
    """Attention over what the baseline leaves of K and V."""

    cache: MinMaxCache
    scale: float

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [R, Hq, D], k, v [R, Hkv, D] -> [R, Hq, D]."""
        format, count, (heads, dim) = self.cache.format, len(q), k.shape[1:]
        k, v = (x.half().float().transpose(0, 1) for x in (k, v))  # [Hkv, R, D]
        rough_k, rough_v = (k, v) if layer in self.cache.exempt else self.cache.sealed(k, v)
        queries = q.view(count, heads, -1, dim).permute(1, 2, 0, 3)  # [Hkv, G, R, D]
        parts, low = [], 0
        while low < count:
            edge = format.sealed_pages(low) * format.page
            high = min(count, edge + format.page + format.recent)
            keys, values = (torch.cat((a[:, :edge], b[:, edge:high]), 1)[:, None] for a, b in ((rough_k, k), (rough_v, v)))
            mask = torch.full((high - low, high), -torch.inf, device=q.device).triu_(low + 1)
            shape = (heads, queries.shape[1], high, dim)
            rows = queries[:, :, low:high].float()
            parts.append(
                scaled_dot_product_attention(rows, keys.expand(shape), values.expand(shape), attn_mask=mask, scale=self.scale)
            )
            low = high
        return torch.cat(parts, 2).permute(2, 0, 1, 3).reshape(q.shape).to(q.dtype)
