"""Reads a worker's experts as its settings say: on a CPU or a GPU, all of them in slots or not, a shard or what a planner
says."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from expert_worker.config import ExpertConfig
from expert_worker.core import Core, WorkerInfo
from expert_worker.evaluator import Evaluator
from expert_worker.experts import Experts, Storage
from expert_worker.shadowed import ShadowedExperts
from forefetch import placement, shm
from forefetch.device import place
from forefetch.errors import ConfigError
from forefetch.kernels.grouped_mlp.formats import Kind
from forefetch.placement import Shard
from forefetch.spec import ModelSpec
from forefetch.synthetic import open_model

OnProgress = Callable[[int, int], None]
"""(done, total)."""


def load(config: ExpertConfig, on_progress: OnProgress = lambda done, total: None, *, local: bool = False) -> Core:
    """A worker as the settings say; `local`: in a router's process. Raises ConfigError or UnsupportedModel."""
    return Loader(config, local=local).core(on_progress)


class Loader:
    """Reads shards of one checkpoint as the settings say. Raises ConfigError or UnsupportedModel."""

    def __init__(self, config: ExpertConfig, *, local: bool = False) -> None:
        self._config, self._local = config, local
        self._spec, self._checkpoint = open_model(config.model, allow_synthetic=config.allow_synthetic)
        self._device, self._dtype = place(config.device, config.dtype, self._spec.dtype)
        self._shards = placement.shard_of(self._spec.num_experts, config.shards)
        self.info = WorkerInfo(
            model_digest=self._checkpoint.digest,
            model=self._spec.name,
            shard=config.shard,
            shards=config.shards,
            layers={},
            hidden_size=self._spec.hidden_size,
            dtype=self._dtype,
            device=str(self._device),
            instance_id=secrets.token_hex(8),
            max_rows=config.max_rows,
            expert_format=config.rounding,
            shm_domain=shm.domain(),
        )

    def core(self, on_progress: OnProgress = lambda done, total: None) -> Core:
        """A worker with its shard; with nothing yet if it is to be placed."""
        config, spec = self._config, self._spec
        if config.placed:
            everything = dict.fromkeys(spec.moe_layers, tuple(range(spec.num_experts)))
            places = min(config.max_experts or 2**31, len(spec.moe_layers) * spec.num_experts)
            row_pairs = min(spec.top_k, spec.num_experts)
            info = replace(self.info, shard=0, shards=0, capacity=places, row_pairs=row_pairs)
            return Core(info, self._experts(everything, on_progress, places))
        held = self.held(config.shard)
        moves = config.slot_count(total := sum(map(len, held.values()))) < total
        return Core(replace(self.info, layers=held, moves=moves), self._experts(held, on_progress))

    def held(self, shard: int) -> dict[int, tuple[int, ...]]:
        """MoE layer -> the shard's experts. ConfigError for a placement that does not fit."""
        config, spec = self._config, self._spec
        if not config.placement:
            return dict.fromkeys(spec.moe_layers, self._shards[shard])
        try:
            text = Path(config.placement).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--placement: {config.placement} cannot be read ({type(error).__name__})") from None
        shards = placement.parse(text, spec.moe_layers, spec.num_experts)
        if len(shards) != config.shards:
            raise ConfigError(f"--placement: is for {len(shards)} workers, --shards is {config.shards}")
        return shards[shard]

    def _experts(self, held: dict[int, tuple[int, ...]], on_progress: OnProgress, places: int = 0) -> Evaluator:
        """An evaluator of these experts; with places of so many of them that come and go."""
        config = self._config
        total = places or sum(map(len, held.values()))
        slots = config.slot_count(total)
        _check_slots(config, self._spec, max(map(len, held.values())), total, slots)
        kept = (config.expert_format, config.cache_folder, config.max_rows, config.miss, config.check_copies, places)
        how = {"device": self._device, "dtype": self._dtype, "on_progress": on_progress}
        if self._device.type == "cuda" and _has_kernels(self._spec):
            return self._on_gpu(held, Storage(slots, *kept), how)
        kind = ShadowedExperts if config.miss == "shadow" and slots < total else Experts
        return kind(self._spec, self._checkpoint, held, Storage(slots, *kept), **how)  # type: ignore[arg-type]

    def _on_gpu(self, held: Shard, storage: Storage, how: dict[str, Any]) -> Evaluator:
        """Experts packed in the GPU's memory: all of them, or in slots."""
        from expert_worker.in_place import InPlaceExperts
        from expert_worker.packed import PackedExperts, packed_format
        from expert_worker.packed_placed import PlacedPackedExperts
        from expert_worker.packed_slots import SlottedExperts
        from expert_worker.shadowed_in_place import ShadowedInPlace

        config, spec, checkpoint = self._config, self._spec, self._checkpoint
        kind = cast(Kind, str(self._dtype).removeprefix("torch.") if config.experts == "stored" else config.experts)
        format = packed_format(spec, kind, self._dtype, self._device)
        if storage.places and storage.slots == storage.places:
            sizes: dict[str, Any] = {"device": self._device, "dtype": self._dtype, "max_rows": config.max_rows}
            return PlacedPackedExperts(spec, checkpoint, storage.places, format, **sizes)
        alike = len(set(held.values())) == 1  # else a placement with another set in every layer
        if not storage.places and alike:
            packed = (spec, checkpoint, held[spec.moe_layers[0]], format)
            if storage.slots == sum(map(len, held.values())):
                return PackedExperts(*packed, max_rows=config.max_rows, **how)
            if config.miss in ("in-place", "shadow") or (config.miss == "auto" and self._local):
                moving = ShadowedInPlace if config.miss == "shadow" else InPlaceExperts
                return moving(*packed, slots=storage.slots, cache=storage.cache, max_rows=config.max_rows, **how)
        if config.miss == "shadow" and storage.slots < sum(map(len, held.values())):
            raise ConfigError("--miss shadow: on a GPU not with a --placement that differs between layers")
        if not storage.places and storage.slots == sum(map(len, held.values())):
            return Experts(spec, checkpoint, held, storage, **how)
        return SlottedExperts(spec, checkpoint, held, replace(storage, format=format), **how)


def _has_kernels(spec: ModelSpec) -> bool:
    """Whether the device kernels take experts of these sizes."""
    return spec.hidden_size % 32 == 0 and spec.expert_width % 32 == 0


def _check_slots(config: ExpertConfig, spec: ModelSpec, most: int, total: int, slots: int) -> None:
    """ConfigError when one token's experts of one layer, which has up to `most` of the `total` experts, do not fit."""
    need = min(spec.top_k, most)
    if slots < need:
        raise ConfigError(
            f"--slots {config.slots}: {slots} slots for the {total} experts that this worker holds; a token needs up to {need} "
            f"(top-{spec.top_k}) of the {most} of a layer at once"
        )
