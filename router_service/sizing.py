"""What a router's settings come to for one model on one device: types and formats, pages and the context they hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from forefetch.device import place
from forefetch.errors import ConfigError
from forefetch.kernels.kv_codec import KvFormat
from forefetch.spec import ModelSpec
from router_service.cache import KvCache
from router_service.cache_config import SEALED
from router_service.config import RouterConfig
from router_service.sealed import SealedCache

RECENT = {"e2m0": 112, "fp4": 32}
"""--kv-recent -1, by format; e2m0's for all others."""


@dataclass(frozen=True)
class Placement:
    """Where and in what the trunk computes and keeps K and V."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    sealed: KvFormat | None = None
    exempt: frozenset[int] = frozenset()

    @staticmethod
    def of(config: RouterConfig, spec: ModelSpec) -> Placement:
        """Resolves every "auto". Raises ConfigError for a device that is not there."""
        device, dtype = place(config.device, config.dtype, spec.dtype)
        if config.kv_format in SEALED:
            return Placement(device, dtype, torch.float16, sealed_format(config, spec), config.exempt_layers())
        kv = dtype if config.kv_format == "auto" else getattr(torch, config.kv_format)
        return Placement(device, dtype, kv)

    @property
    def kv_name(self) -> str:
        """The KV format's name."""
        return self.sealed.name if self.sealed else str(self.kv_dtype).removeprefix("torch.")

    @property
    def kv_parameters(self) -> str:
        """Canonical text of the parameters that its bytes depend on."""
        exempt = ",".join(map(str, sorted(self.exempt)))
        return f"{self.sealed.parameters()} exempt={exempt or 'none'}" if self.sealed else ""

    @property
    def approximate_kv(self) -> str:
        """The name of the KV format when it may round, else ""."""
        return "" if self.kv_dtype == self.dtype and not self.sealed else self.kv_name


def sealed_format(config: RouterConfig, spec: ModelSpec) -> KvFormat:
    """The sealed format that the settings name. Raises ConfigError for what it does not support."""
    if wrong := sorted(layer for layer in config.exempt_layers() if layer >= spec.layers):
        raise ConfigError(f"--kv-exempt-layers: the model has {spec.layers} layers, no layer {wrong[0]}")
    recent = config.kv_recent if config.kv_recent >= 0 else RECENT.get(config.kv_format, RECENT["e2m0"])
    thirds = config.kv_thirds if config.kv_format == "mixed" else 0
    try:
        return KvFormat(
            config.kv_format,
            spec.head_dim,
            page=config.page_size,
            outliers=config.kv_outliers,
            thirds=thirds,
            sinks=config.kv_sinks,
            recent=recent,
        )
    except ValueError as error:
        raise ConfigError(f"--kv-format: {error}") from None


@dataclass(frozen=True)
class Sizes:
    """What the settings come to for this model."""

    context: int
    pages: int
    max_pages: int  # of one request

    @staticmethod
    def of(config: RouterConfig, spec: ModelSpec, placement: Placement) -> Sizes:
        """Raises ConfigError, with the arithmetic, when the settings cannot work together."""
        if config.max_context > spec.context_length:
            raise ConfigError(f"--max-context {config.max_context}: the model was made for {spec.context_length}")
        context = config.max_context or spec.context_length
        block, fixed = kv_bytes(config, spec, placement)
        # More than every request at full length could use is never needed.
        most = config.max_batch * -(-context // config.page_size)
        pages = min((config.kv_memory_mb * 2**20 - fixed) // block, most) + 1
        if pages < 2:
            tails = f", tails and sinks of --max-batch {config.max_batch} requests and a step's rows {fixed}" if fixed else ""
            raise ConfigError(
                f"--kv-memory-mb {config.kv_memory_mb}: one block of {config.page_size} tokens takes {block} bytes{tails}"
            )
        context = min(context, (pages - 1) * config.page_size)
        return Sizes(context, pages, -(-context // config.page_size))


def kv_bytes(config: RouterConfig, spec: ModelSpec, placement: Placement) -> tuple[int, int]:
    """Bytes of a block, and of what sealed formats keep besides: a lane per request, rows until they are committed."""
    if placement.sealed is None:
        return KvCache.page_bytes(spec, config.page_size, placement.kv_dtype), 0
    lanes = (config.max_batch + 1) * SealedCache.lane_bytes(spec, placement.sealed, placement.exempt)
    rows = SealedCache.rows_bytes(spec, placement.sealed, placement.exempt, config.max_step_tokens)
    return SealedCache.page_bytes(spec, placement.sealed, placement.exempt), lanes + rows
