"""The whole model in one process, without engine or workers: what recording, training and evaluation run it with.

Sequence i owns pages 1 + i * P ... of the cache, page 0 is scratch. Letters: S sequences, T rows, E experts, K top-k, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from forefetch.kernels.grouped_mlp import SlotWeights, grouped_mlp
from forefetch.pairs import sort_pairs
from forefetch.spec import ModelSpec
from forefetch.telemetry.ring import StepRing, StepStamps
from forefetch.weights import Checkpoint, load_expert
from router_service.admission import SamplingParams
from router_service.batch import PrefillRows, StepBatch
from router_service.cache import KvCache
from router_service.sampling import sample
from router_service.trunk import Observer, Trunk

PAGE = 64


class AllExperts:
    """Every routed expert of the checkpoint in this process's memory, in the compute type."""

    def __init__(self, spec: ModelSpec, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._layers = {layer: _load(spec, checkpoint, layer, dtype, device) for layer in spec.moe_layers}
        self._rows = torch.empty(0)

    def send(self, batch: StepBatch, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        """Computes the rows' experts at once."""
        (rows, top_k), self._rows = ids.shape, torch.empty_like(x)
        row, expert = np.arange(rows, dtype=np.int32).repeat(top_k), ids.flatten().to("cpu", torch.int32).numpy()
        pairs = sort_pairs(row, expert, weights.flatten().float().cpu(), rows, x.device)
        grouped_mlp(x, self._layers[layer], pairs, self._rows)

    def add(self, out: Tensor, layer: int, stamps: StepStamps) -> int:
        """Adds what `send` computed."""
        out += self._rows
        return 0

    def weights(self, layer: int) -> SlotWeights:
        """All experts of a layer."""
        return self._layers[layer]


def _load(spec: ModelSpec, checkpoint: Checkpoint, layer: int, dtype: torch.dtype, device: torch.device) -> SlotWeights:
    experts = [load_expert(checkpoint, spec, layer, expert) for expert in range(spec.num_experts)]
    w13, w2 = (torch.stack(matrices).to(device, dtype) for matrices in zip(*experts, strict=True))
    return SlotWeights(w13, w2)


class Runner:
    """Trunk, cache and experts for up to `sequences` sequences of up to `length` tokens, in float32 unless told otherwise."""

    def __init__(
        self, folder: Path, *, sequences: int, length: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        self.spec, self.checkpoint = ModelSpec.load(folder), Checkpoint(folder)
        self.sequences, self.length, self.device = sequences, min(length, self.spec.context_length), device
        self._pages = -(-self.length // PAGE)
        cache = KvCache(self.spec, pages=1 + sequences * self._pages, page_size=PAGE, dtype=dtype, device=device)
        self.trunk = Trunk(self.spec, self.checkpoint, cache, dtype=dtype, device=device)
        self.experts = AllExperts(self.spec, self.checkpoint, dtype, device)
        self._stamps = StepRing(1, self.spec.layers, 1)

    def prefill(self, sequences: Sequence[Sequence[int]], observer: Observer | None = None) -> Tensor:
        """Whole sequences from position 0 in one flat batch -> logits [S, V] behind the last token of each."""
        prefills, first = [], 0
        for index, ids in enumerate(sequences):
            prefills.append(PrefillRows(first, len(ids), 0, self._own(index)))
            first += len(ids)
        positions = torch.cat([torch.arange(len(ids)) for ids in sequences])
        owner = torch.arange(len(sequences)).repeat_interleave(torch.tensor([len(ids) for ids in sequences]))
        tokens = torch.tensor([token for ids in sequences for token in ids])
        ends = torch.tensor([rows.first + rows.count - 1 for rows in prefills])
        return self._forward(tokens, positions, owner, tuple(prefills), ends, observer)

    def decode(self, tokens: Sequence[int], positions: Sequence[int], observer: Observer | None = None) -> Tensor:
        """One token of each of the first S sequences at its position -> logits [S, V]."""
        rows = torch.arange(len(tokens))
        return self._forward(torch.tensor(tokens), torch.tensor(positions), rows, (), rows, observer)

    def follow(self, sequences: Sequence[Sequence[int]], observer: Observer) -> Iterator[int]:
        """Given sequences, longest first, side by side, token by token, as a router decodes. Yields the rows of each step."""
        lengths = [len(ids) for ids in sequences]
        for position in range(lengths[0]):
            alive = sum(length > position for length in lengths)
            self.decode([ids[position] for ids in sequences[:alive]], [position] * alive, observer)
            yield alive

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, temperature: float, seed: int = 0) -> list[list[int]]:
        """Each prompt with `tokens` sampled tokens behind it; an end-of-text token does not end it."""
        texts = [list(prompt) for prompt in prompts]
        params = [SamplingParams(temperature=temperature, seed=seed + index) for index in range(len(prompts))]
        logits = self.prefill(texts)
        for step in range(tokens):
            positions = [len(text) for text in texts]
            for text, token in zip(texts, sample(logits, params, positions).ids, strict=True):
                text.append(token)
            if step + 1 < tokens:
                logits = self.decode([text[-1] for text in texts], positions)
        return texts

    def _own(self, index: int) -> list[int]:
        return list(range(1 + index * self._pages, 1 + (index + 1) * self._pages))

    def _forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        owner: Tensor,  # [T]: the sequence a row belongs to
        prefills: tuple[PrefillRows, ...],
        logit_rows: Tensor,
        observer: Observer | None,
    ) -> Tensor:
        slots = (1 + owner * self._pages + positions // PAGE) * PAGE + positions % PAGE
        decodes = 0 if prefills else len(tokens)
        lengths = [position + 1 for position in positions.tolist()] if decodes else []
        table = torch.tensor([self._own(index)[: -(-max(lengths) // PAGE)] for index in range(decodes)], dtype=torch.int64)
        tokens, positions, slots, logit_rows = (part.to(self.device) for part in (tokens, positions, slots, logit_rows))
        batch = StepBatch(0, len(tokens), decodes, tokens, positions, slots, table, lengths, prefills, logit_rows)
        return self.trunk.forward(batch, self.experts, self._stamps.begin(0, 0), observer)
