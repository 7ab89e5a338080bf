"""What the engine runs: the trunk, its decode steps by the fastest way there is for where it and the experts are."""

from __future__ import annotations

import logging

from expert_worker import client as expert
from forefetch import rpc
from forefetch.errors import Mismatch
from forefetch.kernels import compiled as kernels
from forefetch.kernels.gate import choose
from forefetch.p2p.host import HostLanes
from forefetch.p2p.lane import LaneShape
from router_service.batch import StepBuffers
from router_service.beside import RecordedHeads
from router_service.captured import CapturedTrunk
from router_service.config import RouterConfig
from router_service.hints import Hints
from router_service.layouts import LayoutBuffers
from router_service.outgoing import Outgoing
from router_service.p2p import Attached, LaneTrunk, Opener
from router_service.p2p_decoder import LaneExperts, step_shape
from router_service.p2p_hints import DeviceHeads, HostHeads
from router_service.trunk import Model, Trunk
from router_service.turns import TurnTrunk
from router_service.workers import LOCAL, Workers

log = logging.getLogger("forefetch.router")

LANE_OPENS_S = 120.0
"""How long opening a p2p lane may take: the worker records its side of every step meanwhile."""


def model(
    trunk: Trunk, buffers: StepBuffers, workers: Workers, config: RouterConfig, hints: Hints | None, outgoing: Outgoing
) -> Model:
    """The trunk, its decode steps by the fastest way there is for its device."""
    if not trunk.embedding.is_cpu or isinstance(buffers, LayoutBuffers):
        return captured(trunk, buffers, workers, config, hints)
    if not kernels.available():
        log.warning("Numba is not installed: steps take several times as long as they could (pip install 'forefetch[cpu]')")
        return in_halves(trunk, config)
    from router_service.compiled import CompiledTrunk, Local, takes  # brings Numba

    if not takes(trunk):
        return in_halves(trunk, config)
    experts = expert.whole_of(workers.rows[0].link) if len(workers.rows) == 1 else None
    local = Local(workers.rows[0], experts) if experts else None
    fast = CompiledTrunk(trunk, config.max_batch, workers, local, config.halves(), hints)
    if local:
        fast.computing = outgoing.until_computing()
    with rpc.loading("compiled kernels") as on_progress:
        fast.warm_up(observed=config.hints not in {"auto", "off"})
        on_progress(1, 1)
    return fast


def in_halves(trunk: Trunk, config: RouterConfig) -> Model:
    """The trunk, its decode steps in two halves if the configuration has them."""
    return TurnTrunk(trunk, config.halves()) if config.halves() else trunk


def captured(trunk: Trunk, buffers: StepBuffers, workers: Workers, config: RouterConfig, hints: Hints | None) -> Model:
    """The trunk, its decode steps recorded if they can be: experts in this process, on the trunk's GPU or moved there by
    themselves, or behind lanes. Where experts move, heads are recorded with the step, and hints are of no use."""
    if config.link == "p2p" and isinstance(buffers, LayoutBuffers):
        return laned(trunk, buffers, workers, config, hints)
    if not isinstance(buffers, LayoutBuffers):
        return in_halves(trunk, config)
    experts = expert.resident_of(workers.rows[0].link) if len(workers.rows) == 1 else None
    if experts is None:
        buffers.unrecorded()
        return in_halves(trunk, config)
    recorded = CapturedTrunk(trunk, experts, buffers)
    if hints is not None and experts.moves:
        heads = RecordedHeads(hints.record())
        experts.ahead, recorded.see = heads, heads.see
    with rpc.loading("decode steps") as on_progress:
        recorded.warm_up(on_progress)
    return recorded


def laned(trunk: Trunk, buffers: LayoutBuffers, workers: Workers, config: RouterConfig, hints: Hints | None = None) -> Model:
    """The trunk, its steps recorded over p2p lanes to all workers; unrecorded, if a local one can have none. Heads take part
    where experts move at some worker, or are told to."""
    spec, device, dtype = trunk.spec, trunk.embedding.device, trunk.dtype
    alone = all(worker.address != LOCAL for worker in workers.rows)  # else there is nothing to do while others evaluate a half
    shapes = {layout: step_shape(layout, config.p2p_halves_from if alone else 0) for layout in buffers.layouts()}
    rows = max(step.rows for step in shapes.values())
    shape = LaneShape(rows, spec.hidden_size, spec.top_k, len(spec.moe_layers), dtype.itemsize)
    links = [worker.link for worker in workers.rows]
    try:
        own = next((lane for link in links if link is not None and (lane := expert.beside(link, shape, device))), None)
    except Mismatch as error:
        log.warning("starting without p2p lanes: %s", error)
        buffers.unrecorded()
        return in_halves(trunk, config)
    place = -1 if own is None else links.index(own.link)
    lanes: Attached
    moves = any(link is not None and link.info.moves for link in links)
    if device.type == "cuda":
        from forefetch.p2p.device import DeviceLanes

        normed = spec.gate_rule == "topk_softmax" or spec.renormalise
        lanes = DeviceLanes(len(workers.rows), shape, spec.num_experts, normed, config.p2p_patience_s, device, place)  # type: ignore[assignment]
        lanes.tells = moves
    else:
        rule = spec.top_k, spec.gate_rule, spec.renormalise
        lanes = HostLanes(lambda logits: choose(logits, *rule), config.p2p_patience_s, own=place)  # type: ignore[assignment]
    steps = sorted(set(shapes.values()), key=lambda step: (step.rows, step.parts))
    how = {"device": device, "patience_s": config.p2p_patience_s, "timeout_s": LANE_OPENS_S}

    def opened(link: expert.Link) -> expert.Lane | expert.Beside:
        return own if own is not None and link is own.link else expert.open_lane(link, shape, steps, **how)  # type: ignore[arg-type]

    opener, experts = Opener(opened), LaneExperts(spec, lanes, rows, dtype, device, own)
    if hints is not None and (moves or config.hints != "auto"):
        experts.heads = DeviceHeads(hints, spec, device) if device.type == "cuda" else HostHeads(hints, spec)
    else:
        hints = None  # nobody has a use for any
    recorder = None if device.type == "cuda" else lambda step: step
    model = LaneTrunk(trunk, experts, buffers, lanes, workers, opener, shapes.__getitem__, recorder, hints)
    with rpc.loading("decode steps") as on_progress:
        model.warm_up(on_progress)
    if experts.heads is not None:
        experts.heads.ready()
    model.start(LANE_OPENS_S)
    return model
