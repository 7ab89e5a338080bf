"""Puts a router together: checkpoint -> trunk, cache, workers, engine. The only place that knows all the parts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from expert_worker import client as expert
from forefetch import rpc
from forefetch.errors import Mismatch
from forefetch.rpc.auth import bearer
from forefetch.spec import ModelSpec, read_json
from forefetch.telemetry.spans import Exporter
from forefetch.weights import Checkpoint
from kv_service.client import KvClient
from router_service.admission import Limits, default_sampling
from router_service.asking import Reader
from router_service.batch import StepBuffers
from router_service.cache import KvCache
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
from router_service.rows import Rows
from router_service.scheduler import Scheduler
from router_service.sealed import SealedCache
from router_service.sessions import Sessions
from router_service.sizing import Placement, Sizes
from router_service.trunk import Cache, Trunk
from router_service.workers import Workers

log = logging.getLogger("forefetch.router")

PROMPT_ROWS = (64, 256)
"""Prompt rows that recorded steps are padded to, besides --max-step-tokens."""


def limits(config: RouterConfig, spec: ModelSpec, context: int) -> Limits:
    """What requests are checked against."""
    return Limits(
        vocab_size=spec.vocab_size,
        context=context,
        default_max_tokens=config.default_max_tokens,
        eos_token_ids=frozenset(spec.eos_token_ids),
        sampling=default_sampling(read_json(Path(config.model) / "generation_config.json", {})),
    )


def scheduler(config: RouterConfig, sizes: Sizes, placement: Placement) -> Scheduler:
    """The admission queue and page pool."""
    return Scheduler(
        PagePool(sizes.pages),
        page_size=config.page_size,
        max_batch=config.max_batch,
        max_step_tokens=config.max_step_tokens,
        max_waiting=config.max_waiting,
        recent=placement.sealed.recent if placement.sealed else 0,
        prompt_rows=config.prompt_rows,
    )


def kv_cache(config: RouterConfig, spec: ModelSpec, sizes: Sizes, placement: Placement) -> Cache:
    """Memory for K and V."""
    device = placement.device
    if placement.sealed is None:
        lend = bool(config.kv and config.kv_shm_mb)
        shape = {"pages": sizes.pages, "page_size": config.page_size}
        return KvCache(spec, **shape, dtype=placement.kv_dtype, device=device, lend=lend)
    return SealedCache(
        spec,
        placement.sealed,
        exempt=placement.exempt,
        pages=sizes.pages,
        lanes=config.max_batch,
        max_rows=config.max_step_tokens,
        device=device,
    )


def trunk(config: RouterConfig, spec: ModelSpec, checkpoint: Checkpoint, sizes: Sizes, placement: Placement) -> Trunk:
    """Weights and KV pool on the device."""
    cache = kv_cache(config, spec, sizes, placement)
    with rpc.loading("trunk") as on_progress:
        return Trunk(
            spec,
            checkpoint,
            cache,
            dtype=placement.dtype,
            device=placement.device,
            rounded=config.trunk == "int8",
            on_progress=on_progress,
        )


def buffers(config: RouterConfig, sizes: Sizes, placement: Placement) -> StepBuffers:
    """Static step buffers; in fixed layouts where steps may be recorded."""
    device, lanes = placement.device, config.link == "p2p"
    buckets = config.buckets("cuda" if lanes else device.type)
    shape = {"max_tokens": config.max_step_tokens, "max_batch": config.max_batch, "max_pages": sizes.max_pages}
    recorded = lanes or (device.type == "cuda" and config.workers == "local")
    if recorded and buckets and config.graphs == "auto":
        wanted = *PROMPT_ROWS, config.prompt_rows or config.max_step_tokens, config.max_step_tokens
        prompts = sorted({min(rows, config.max_step_tokens) for rows in wanted})
        # Over lanes a commit may have to be taken back, which chunks over sealed pages, whose tails move on, do not know.
        prompts = [] if placement.sealed and lanes else prompts
        return LayoutBuffers(**shape, page_size=config.page_size, device=device, buckets=buckets, chunk_rows=prompts)
    paged = device.type == "cuda" and placement.sealed is None
    return StepBuffers(**shape, page_size=config.page_size, device=device, buckets=buckets, paged=paged)


def kv(
    config: RouterConfig,
    spec: ModelSpec,
    digest: str,
    placement: Placement,
    trunk: Trunk,
    pool: PagePool,
    exporter: Exporter | None = None,
) -> KvSide:
    """The way to the KV services: hand-over of sealed blocks, loading of prefixes, logs of sessions."""
    cache, sealed = trunk.cache, placement.sealed
    naming = Naming.of(spec, digest, placement.kv_name, kv_params(config, placement), config.page_size)
    tls, token = rpc.tls_of(config), bearer(config.kv_token_file, "--kv-token-file")
    replicas = Replicas(config.kv_addresses(), lambda address: KvClient(address, tls, token, naming.origin))
    recent, budget, rows_bytes = sealed.recent if sealed else 0, config.handover_mb * 2**20, 0
    rows = Rows(budget // 4) if recent else None
    if recent:
        rows_bytes = -(-recent // config.page_size) * config.page_size * spec.kv_bytes_per_token(2)
        budget -= budget // 4
    handover = Handover(
        replicas,
        block_bytes=cache.block_bytes,
        budget_bytes=budget,
        read_block=cache.read_block,
        exporter=exporter,
        shared_bytes=config.kv_shm_mb * 2**20,
        most_block_bytes=cache.most_block_bytes,
        pool=cache.pool,
    )
    cost = FetchCost(cache.block_bytes, config.page_size, config.kv_fetch_s, rows_bytes)
    tail_start = partial(cache.tail_start, loaded=0)
    prefix = Prefix(replicas, cost, cache.write_block, exporter, tail_start) if config.kv_fetch_s else None
    sessions = Sessions(replicas, config.session_lag_s, config.session_tail_mb * 2**20)
    return KvSide(naming, replicas, handover, prefix, sessions, cache, pool, sealed is not None, rows)


def kv_params(config: RouterConfig, placement: Placement) -> str:
    """Canonical text of what the bytes of K and V depend on, besides the model and their format."""
    params = f"{placement.kv_parameters} computed in {placement.dtype}".lstrip()
    params += "" if config.rounding == "stored" else f" with {config.rounding} experts"
    return params + ("" if config.trunk == "stored" else f" with {config.trunk} trunk")


def conversations(digest: str, reader: Reader, kv: KvSide | None) -> Conversations:
    """Sessions, as the API's side sees them."""
    if kv is None:
        return Conversations(None, reader, digest, "")
    return Conversations(kv.sessions, reader, digest, f"{kv.naming.kv_format}, {kv.naming.params}")


def dispatch(config: RouterConfig, spec: ModelSpec, checkpoint: Checkpoint, placement: Placement) -> Dispatch:
    """The table of workers, already connecting, and the dispatch over it."""
    addresses, room = config.addresses() or ("local",), 0
    if config.service:
        addresses, room = (), config.max_workers
    workers = Workers(spec, addresses, _connector(config, spec, checkpoint, placement), room=room)
    return Dispatch(workers, config.step_timeout_s)


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
    return Hints(heads, dispatch, setting=config.hints, trained=trained is not None)


def _connector(
    config: RouterConfig, spec: ModelSpec, checkpoint: Checkpoint, placement: Placement
) -> Callable[[str], expert.Link]:
    """How a link to an address is made."""
    addresses, p2p = config.addresses() or ("local",), config.link == "p2p"
    local: expert.ExpertConfig | None = None
    if "local" in addresses and not config.service:
        local = expert.ExpertConfig(
            model=config.model,
            allow_synthetic=config.allow_synthetic,
            device=str(placement.device),
            dtype=str(placement.dtype).removeprefix("torch."),
            slots=config.slots,
            miss=config.miss,
            experts=config.experts,
            # padding of both kinds
            max_rows=config.max_step_tokens + max(config.buckets("cuda" if p2p else placement.device.type), default=0),
            shard=addresses.index("local"),
            shards=len(addresses),
        )
    connect = partial(
        expert.connect,
        link="auto" if p2p else config.link,
        digest=checkpoint.digest,
        hidden=spec.hidden_size,
        dtype=placement.dtype,
        max_rows=config.max_step_tokens + (max(config.buckets("cuda"), default=0) if p2p else 0),
        tls=rpc.tls_of(config),
        timeout_s=5.0,
        experts=config.rounding,
    )

    def connected(address: str) -> expert.Link:
        if local is not None and address == "local":
            return expert.local(local)
        return expert.twin(lambda: connect(address)) if config.halves() else connect(address)

    return connected
