"""A shard whose experts all lie packed in one device's memory, evaluated by kernels that never ask the host.

Blobs are those of `kernels/grouped_mlp/formats.py`, one per slot, so that a weight is read once, in as few bits as it was
stored in. A router in the same process evaluates whole layers with `route`, inside a CUDA graph if it likes; calls that come
over a wire use `forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from expert_worker.residency import Copied
from forefetch.errors import BadRequest, Unavailable
from forefetch.hints import ExpertHint
from forefetch.kernels.grouped_mlp.formats import ExpertFormat, Kind, blob_bytes, pack
from forefetch.kernels.grouped_mlp.moe import moe, moe_from_logits, unsummed_from_logits
from forefetch.kernels.grouped_mlp.scratch import MoeScratch
from forefetch.kernels.grouped_mlp.tally import tally
from forefetch.kernels.grouped_mlp.unsummed import Unsummed
from forefetch.kernels.residency.state import COUNTERS
from forefetch.spec import ModelSpec
from forefetch.weights import Checkpoint, load_expert
from forefetch.wire import LayerCall, Verified

LOCK_NS = 2_000_000_000
"""How long a call waits for the device's lock; who holds it is done within a call."""


def packed_format(spec: ModelSpec, kind: Kind, dtype: torch.dtype, device: torch.device) -> ExpertFormat:
    """How experts of these sizes are packed: codes in the order of Hopper's tensor-core operands where that has kernels."""
    whole = spec.hidden_size % 128 == 0 and spec.expert_width % 128 == 0
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    fragment = kind in {"int4", "int8"} and whole and hopper and dtype.itemsize == 2
    return ExpertFormat(kind, order="fragment" if fragment else "natural")


Ahead = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor] | None]
"""(layer, ids [T, K], weights [T, K]) -> experts and probabilities [D, T, M] of the next D <= 2 MoE layers, or None."""


@dataclass
class Share:
    """What one lane's calls use alone."""

    scratch: MoeScratch
    counters: Tensor  # int64 [len(COUNTERS)]: what they found
    fault: Tensor | None = None  # int32 [1]: not 0 once the lane is broken


class PackedExperts:
    """Experts `held` of every MoE layer on `device`, for up to `max_rows` rows of `dtype`. Not for concurrent use.

    Letters: L MoE layers, E experts of the model, T rows, H hidden, K top-k.
    """

    moves = False  # whether experts come and go
    shadows = False  # whether absent ones are evaluated from copies in fewer bits
    ahead: Ahead | None = None  # heads, run beside `route` where experts move

    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        held: Sequence[int],
        format: ExpertFormat,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_rows: int,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Packs each expert on the device. on_progress(done, total) counts them. UnsupportedModel for bad tensors."""
        self.spec, self.held, self.format = spec, tuple(held), format
        self.layers = {layer: place for place, layer in enumerate(spec.moe_layers)}
        self.expert_bytes = blob_bytes(spec.hidden_size, spec.expert_width, format)
        self._device = device
        self._hold(checkpoint, on_progress)
        shape = (max_rows, spec.top_k, spec.num_experts, spec.hidden_size, spec.expert_width)
        self._scratch = MoeScratch(*shape, format, device=device, dtype=dtype)
        self._out = torch.empty(max_rows, spec.hidden_size, dtype=dtype, device=device)
        # Pairs per layer and expert, and one more column where those that count nothing go.
        self._load = torch.zeros(len(self.layers), spec.num_experts + 1, dtype=torch.int64, device=device)
        self._chosen = torch.full((len(self.layers), max_rows, spec.top_k), -1, dtype=torch.int32, device=device)
        self.lock = torch.zeros(1, dtype=torch.int32, device=device)  # held by whoever computes while there are lanes
        self.lanes = 0  # p2p lanes that share the device with `forward`

    def _hold(self, checkpoint: Checkpoint, on_progress: Callable[[int, int], None]) -> None:
        """Each expert, packed, into a slot of its own."""
        self._pool, self._slot_of = self._packed(checkpoint, self.format, on_progress)

    def _packed(
        self, checkpoint: Checkpoint, format: ExpertFormat, on_progress: Callable[[int, int], None] = lambda done, total: None
    ) -> tuple[Tensor, Tensor]:
        """Every expert in `format`: blobs uint8 [slots, bytes], and which is whose, int32 [L, E], -1 for those not held."""
        spec, held = self.spec, self.held
        total, size = len(self.layers) * len(held), blob_bytes(spec.hidden_size, spec.expert_width, format)
        blobs = torch.empty(total, size, dtype=torch.uint8, device=self._device)
        slot_of = torch.full((len(self.layers), spec.num_experts), -1, dtype=torch.int32)
        slot_of[:, list(held)] = torch.arange(total, dtype=torch.int32).view(len(self.layers), -1)
        for number in range(total):
            layer, expert = spec.moe_layers[number // len(held)], held[number % len(held)]
            blobs[number] = pack(*load_expert(checkpoint, spec, layer, expert, self._device), format)
            on_progress(number + 1, total)
        return blobs, slot_of.to(self._device)

    @property
    def copied(self) -> Copied:
        """Nothing ever is."""
        return Copied()

    @property
    def fault(self) -> Tensor:
        """int32 [1] on the device: not 0 when a call since the last `check` went wrong."""
        return self._scratch.fault

    @property
    def counters(self) -> Tensor:
        """int64: how experts were found and moved. All are resident: there is nothing to count."""
        return self._load[0, :0]

    def verified(self, counters: Tensor) -> Verified:
        """What of `counters`, on the host, is new."""
        return Verified()

    def check(self) -> None:
        """RuntimeError when a call since the last check went wrong on the device. Waits for it."""
        self._scratch.check()

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights held."""
        return self._pool.numel()

    @property
    def load(self) -> npt.NDArray[np.int64]:
        """Pairs evaluated per layer and expert held. Waits for the device."""
        counts: npt.NDArray[np.int64] = self._load[:, list(self.held)].cpu().numpy()
        return counts

    def pairs_of(self, held: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
        """Pairs evaluated by each of these experts. Waits for the device."""
        counts = self._load.cpu().numpy()
        return {layer: counts[self.layers[layer], list(experts)].tolist() for layer, experts in held.items()}

    def run(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], ids, weights [T, K] -> [T, H]; pairs with id -1 count nothing. Valid until the next call."""
        place, out = self.layers[layer], self._out[: len(x)]
        moe(x, ids, weights, self._pool, self._slot_of[place], out, self._scratch)
        chosen = ids.flatten().long() % self._load.shape[1]
        self._load[place].scatter_add_(0, chosen, torch.ones_like(chosen))
        return out

    def route(self, layer: int, x: Tensor, logits: Tensor) -> Tensor:
        """x [T, H], gate logits [T, E] -> [T, H], the choice included. Valid until the next call. `settle` counts the pairs."""
        place, out, scratch = self.layers[layer], self._out[: len(x)], self._scratch
        scratch.ids = self._chosen[place].view(-1)
        rule = self.spec.gate_rule, self.spec.renormalise
        moe_from_logits(x, logits, *rule, self._pool, self._slot_of[place], out, scratch)
        return out

    def unsummed(self, layer: int, x: Tensor, logits: Tensor) -> Tensor | Unsummed:
        """`route`, a token's experts left for `kernels.norm.add_rms_norm` to add up, which must be what is launched next."""
        place, scratch = self.layers[layer], self._scratch
        scratch.ids = self._chosen[place].view(-1)
        rule = self.spec.gate_rule, self.spec.renormalise
        return unsummed_from_logits(x, logits, *rule, self._pool, self._slot_of[place], scratch)

    def begin(self, idle: Tensor) -> None:
        """A step of whole layers begins. Nothing is to be done: what idle rows choose is here too."""

    def settle(self, idle: Tensor) -> None:
        """Counts the pairs of the step whose layers `route` evaluated; idle [T, 1] marks rows that are padding."""
        tally(self._load, self._chosen[:, : len(idle)], idle)

    def share(self, rows: int, source: str = "") -> Share:
        """What `evaluate` needs for up to `rows` rows; source: the router that sends them. `leave` gives it back."""
        spec = self.spec
        shape = (rows, spec.top_k, spec.num_experts, spec.hidden_size, spec.expert_width)
        scratch = MoeScratch(*shape, self.format, device=self._device, dtype=self._out.dtype)
        return Share(scratch, torch.zeros(len(COUNTERS), dtype=torch.int64, device=self._device))

    def evaluate(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor, share: Share) -> None:
        """`run` into out [T, H], which may be another GPU's, with a share of one's own. `count` counts the pairs."""
        moe(x, ids, weights, self._pool, self._slot_of[self.layers[layer]], out, share.scratch)

    def tell(self, share: Share, told: Tensor) -> None:
        """What the share's calls found, as `lane.TOLD` says, into told [TOLD_WORDS]. Nothing ever moves: it stays at zero."""

    def join(self, share: Share) -> None:
        """The end of a step: nothing that it launched beside itself is left."""

    def leave(self, share: Share) -> None:
        """The share is used no more."""

    def count(self, chosen: Tensor) -> None:
        """Counts pairs: chosen [L, T, K], -1 where there is none."""
        flat = chosen.flatten(1).long() % self._load.shape[1]
        self._load.scatter_add_(1, flat, torch.ones_like(flat))

    @torch.inference_mode()
    def forward(self, call: LayerCall, out: Tensor, source: str = "") -> tuple[int, Verified]:
        """Fills out [N, H], which may lie on the host. Nothing is ever copied: everything is resident."""
        if call.layer not in self.layers:
            raise BadRequest("layer", f"layer {call.layer} has no routed experts")
        ids, weights = dense(call, self.held, self.spec.top_k)
        with self.alone():
            rows = self.run(call.layer, *(part.to(self._device) for part in (call.x, ids, weights)))
        out.copy_(rows)
        return 0, Verified(resident=len(np.unique(call.pair_expert)))

    @contextmanager
    def alone(self) -> Iterator[Tensor | None]:
        """The device's lock around what is launched inside, while there are lanes: two calls at once would starve each
        other. Yields the word that is not 0 where it could not be had; Unavailable behind it then."""
        if not self.lanes:
            yield None
            return
        from forefetch.kernels.hop.triton import turn

        nothing, state = self.lock[:0], torch.zeros(3, dtype=torch.int32, device=self.lock.device)
        turn(nothing, nothing, state, self.lock, LOCK_NS, answer=False, wait=True)
        try:
            yield state[1:2]
        finally:
            turn(nothing, nothing, state, self.lock, LOCK_NS, answer=True, wait=False)
        if int(state[1]):
            raise Unavailable(f"the device was not free for {LOCK_NS // 10**9} s")

    def hint(self, hint: ExpertHint, source: str = "") -> bool:
        """Whether the hint is about experts held here; there is nothing to fetch."""
        return hint.layer in self.layers and set(hint.experts.tolist()) <= set(self.held)

    def resident(self, layer: int) -> list[int]:
        """All of them; none for a layer without routed experts."""
        return list(self.held) if layer in self.layers else []


def dense(call: LayerCall, held: Sequence[int], top_k: int) -> tuple[Tensor, Tensor]:
    """A call's pairs -> ids int32, weights [N, K]; places without a pair have id -1. BadRequest for what makes no sense."""
    row, expert, rows = call.pair_row, call.pair_expert, call.form.sizes[0]
    if row.size and row.view(np.uint32).max() >= rows:  # as unsigned, a negative index is too large as well
        raise BadRequest("pair_row", f"a row index is outside 0..{rows - 1}")
    if not np.isfinite(call.pair_weight).all():
        raise BadRequest("pair_weight", "a gate weight is not finite")
    missing = np.setdiff1d(expert, held)
    if missing.size:
        raise BadRequest("pair_expert", f"expert {missing[0]} of layer {call.layer} is not held by this worker")
    order = np.argsort(row, kind="stable")
    counts = np.bincount(row, minlength=rows)
    if counts.max(initial=0) > top_k:
        raise BadRequest("pair_row", f"a row names {counts.max()} experts; the model chooses {top_k}")
    column = np.arange(row.size) - np.repeat(np.cumsum(counts) - counts, counts)
    ids = np.full((rows, top_k), -1, dtype=np.int32)
    weights = np.zeros((rows, top_k), dtype=np.float32)
    ids[row[order], column] = expert[order]
    weights[row[order], column] = call.pair_weight[order]
    return torch.from_numpy(ids), torch.from_numpy(weights)
