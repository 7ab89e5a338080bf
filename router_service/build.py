"""Puts a router together: checkpoint -> trunk, cache, workers, engine. The only place that knows all the parts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from expert_worker import client as expert
from forefetch import rpc
from forefetch.device import place
from forefetch.errors import ConfigError, Mismatch
from forefetch.spec import ModelSpec, read_json
from forefetch.telemetry.spans import Exporter
from forefetch.weights import Checkpoint
from router_service.admission import Limits, default_sampling
from router_service.asking import Reader
from router_service.batch import StepBuffers
from router_service.cache import KvCache
from router_service.captured import CapturedTrunk
from router_service.config import RouterConfig
from router_service.conversations import Conversations
from router_service.cost import FetchCost
from router_service.dispatch import Dispatch
from router_service.handover import Handover
from router_service.hints import Hints
from router_service.kv import KvSide
from router_service.layouts import LayoutBuffers
from router_service.lookahead import store
from router_service.lookahead.estimate import Estimator
from router_service.lookahead.heads import Lookahead
from router_service.naming import Naming
from router_service.pages import PagePool
from router_service.prefix import Prefix
from router_service.replicas import Replicas
from router_service.scheduler import Scheduler
from router_service.sessions import Sessions
from router_service.trunk import Model, Trunk
from router_service.workers import Workers

log = logging.getLogger("forefetch.router")

PROMPT_ROWS = (64, 256)
"""Prompt rows that recorded steps are padded to, besides --max-step-tokens."""


@dataclass(frozen=True)
class Placement:
    """Where and in what the trunk computes and keeps K and V."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype

    @staticmethod
    def of(config: RouterConfig, spec: ModelSpec) -> Placement:
        """Resolves every "auto". Raises ConfigError for a device that is not there."""
        device, dtype = place(config.device, config.dtype, spec.dtype)
        kv = dtype if config.kv_format == "auto" else getattr(torch, config.kv_format)
        return Placement(device, dtype, kv)

    @property
    def approximate_kv(self) -> str:
        """The name of the KV format when it may round, else ""."""
        return "" if self.kv_dtype == self.dtype else str(self.kv_dtype).removeprefix("torch.")


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
        block = KvCache.page_bytes(spec, config.page_size, placement.kv_dtype)
        # More than every request at full length could use is never needed.
        most = config.max_batch * -(-context // config.page_size)
        pages = min(config.kv_memory_mb * 2**20 // block, most) + 1
        if pages < 2:
            raise ConfigError(
                f"--kv-memory-mb {config.kv_memory_mb}: one block of {config.page_size} tokens takes {block} bytes"
            )
        context = min(context, (pages - 1) * config.page_size)
        return Sizes(context, pages, -(-context // config.page_size))


def limits(config: RouterConfig, spec: ModelSpec, context: int) -> Limits:
    """What requests are checked against."""
    return Limits(
        vocab_size=spec.vocab_size,
        context=context,
        default_max_tokens=config.default_max_tokens,
        eos_token_ids=frozenset(spec.eos_token_ids),
        sampling=default_sampling(read_json(Path(config.model) / "generation_config.json", {})),
    )


def scheduler(config: RouterConfig, sizes: Sizes) -> Scheduler:
    """The admission queue and page pool."""
    return Scheduler(
        PagePool(sizes.pages),
        page_size=config.page_size,
        max_batch=config.max_batch,
        max_step_tokens=config.max_step_tokens,
        max_waiting=config.max_waiting,
    )


def trunk(config: RouterConfig, spec: ModelSpec, checkpoint: Checkpoint, sizes: Sizes, placement: Placement) -> Trunk:
    """Weights and KV pool on the device."""
    cache = KvCache(spec, pages=sizes.pages, page_size=config.page_size, dtype=placement.kv_dtype, device=placement.device)
    with rpc.loading("trunk") as on_progress:
        return Trunk(spec, checkpoint, cache, dtype=placement.dtype, device=placement.device, on_progress=on_progress)


def captured(trunk: Trunk, buffers: StepBuffers, workers: Workers, config: RouterConfig) -> Model:
    """The trunk, its decode steps recorded if they can be: experts in this process, all on the trunk's GPU."""
    experts = expert.resident_of(workers.rows[0].link) if len(workers.rows) == 1 else None
    if experts is None or not isinstance(buffers, LayoutBuffers):
        return trunk
    recorded = CapturedTrunk(trunk, experts, buffers)
    with rpc.loading("decode steps") as on_progress:
        recorded.warm_up(on_progress)
    return recorded


def buffers(config: RouterConfig, sizes: Sizes, placement: Placement) -> StepBuffers:
    """Static step buffers; in fixed layouts where steps may be recorded."""
    device, buckets = placement.device, config.buckets(placement.device.type)
    shape = {"max_tokens": config.max_step_tokens, "max_batch": config.max_batch, "max_pages": sizes.max_pages}
    if device.type == "cuda" and buckets and config.graphs == "auto" and not config.addresses():
        prompts = sorted({min(rows, config.max_step_tokens) for rows in (*PROMPT_ROWS, config.max_step_tokens)})
        return LayoutBuffers(**shape, page_size=config.page_size, device=device, buckets=buckets, chunk_rows=prompts)
    return StepBuffers(**shape, page_size=config.page_size, device=device, buckets=buckets, paged=device.type == "cuda")


def kv(
    config: RouterConfig, spec: ModelSpec, digest: str, trunk: Trunk, pool: PagePool, exporter: Exporter | None = None
) -> KvSide:
    """The way to the KV services: hand-over of sealed blocks, loading of prefixes, logs of sessions."""
    cache, replicas = trunk.cache, Replicas(config.kv_addresses(), rpc.tls_of(config))
    kv_format, params = str(cache.dtype).removeprefix("torch."), f"computed in {trunk.dtype}"
    params += "" if config.experts == "stored" else f" with {config.experts} experts"
    handover = Handover(
        replicas,
        block_bytes=cache.block_bytes,
        budget_bytes=config.handover_mb * 2**20,
        read_block=cache.read_block,
        exporter=exporter,
    )
    cost = FetchCost(cache.block_bytes, config.page_size, config.kv_fetch_s)
    prefix = Prefix(replicas, cost, cache.write_block, exporter) if config.kv_fetch_s else None
    naming = Naming.of(spec, digest, kv_format, params, config.page_size)
    return KvSide(naming, replicas, handover, prefix, Sessions(replicas, config.session_lag_s), pool)


def conversations(digest: str, reader: Reader, kv: KvSide | None) -> Conversations:
    """Sessions, as the API's side sees them."""
    if kv is None:
        return Conversations(None, reader, digest, "")
    return Conversations(kv.sessions, reader, digest, f"{kv.naming.kv_format}, {kv.naming.params}")


def dispatch(config: RouterConfig, spec: ModelSpec, checkpoint: Checkpoint, placement: Placement) -> Dispatch:
    """The table of workers, already connecting, and the dispatch over it."""
    addresses = config.addresses() or ("local",)
    return Dispatch(Workers(spec, addresses, _connector(config, spec, checkpoint, placement)), config.step_timeout_s)


def hints(config: RouterConfig, trunk: Trunk, digest: str, dispatch: Dispatch) -> Hints | None:
    """What sends hints, with trained heads where lookahead.safetensors has them. None when they are off.

    Mismatch for a file that does not fit the checkpoint, unless --hints is auto: then later layers' own gates do.
    """
    if config.hints == "off":
        return None
    try:
        trained = store.find(Path(config.model), digest, trunk.spec.moe_layers)
    except Mismatch as error:
        if config.hints != "auto":
            raise
        log.warning("lookahead without trained heads: %s", error)
        trained = None
    heads = Lookahead(trunk, Estimator(trunk, {}), {}) if trained is None else trained.on(trunk)
    mode = "plain" if config.hints == "auto" else config.hints
    return Hints(heads, dispatch, mode=mode, always=config.hints != "auto", trained=trained is not None)


def _connector(
    config: RouterConfig, spec: ModelSpec, checkpoint: Checkpoint, placement: Placement
) -> Callable[[str], expert.Link]:
    """How a link to an address is made."""
    if not config.addresses():
        local = expert.ExpertConfig(
            model=config.model,
            allow_synthetic=config.allow_synthetic,
            device=str(placement.device),
            dtype=str(placement.dtype).removeprefix("torch."),
            slots=config.slots,
            experts=config.experts,
            max_rows=config.max_step_tokens + max(config.buckets(placement.device.type), default=0),  # padding of both kinds
        )
        return lambda _address: expert.local(local)
    tls = rpc.tls_of(config)
    return lambda address: expert.connect(
        address,
        link=config.link,
        digest=checkpoint.digest,
        hidden=spec.hidden_size,
        dtype=placement.dtype,
        max_rows=config.max_step_tokens,
        tls=tls,
        timeout_s=5.0,
        experts=config.experts,
    )
