"""Checkpoints that do not exist: the shapes of known models with random weights, made where they are wanted.

For benchmarks and sizing: `synthetic:qwen3-30b-a3b` needs no file, and its weights never lie on a disk or, on a GPU, in host
memory. `synthetic:NAME,layers=4` overrides whole numbers of the configuration. A name always makes the same bits on the same
kind of device. Answers mean nothing, so services refuse such a model unless `--allow-synthetic` is given.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from forefetch.errors import ConfigError
from forefetch.families import read_spec
from forefetch.shapes import PREFIX, synthetic_config
from forefetch.spec import ModelSpec, Slice
from forefetch.weights import Checkpoint


class SyntheticCheckpoint(Checkpoint):
    """Stands in for a Checkpoint: every tensor is drawn when it is read."""

    def __init__(self, config: dict[str, Any], spec: ModelSpec) -> None:
        self.folder = Path(spec.name)
        self.read_log = {}
        self._config, self._spec = config, spec

    @property
    def names(self) -> frozenset[str]:
        """Empty: nothing is stored."""
        return frozenset()

    @property
    def digest(self) -> str:
        """Of the configuration, which is all there is."""
        return hashlib.sha256(b"forefetch synthetic 1\0" + json.dumps(self._config, sort_keys=True).encode()).hexdigest()

    def read(self, what: str | Slice, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> torch.Tensor:
        """Normal numbers scaled so that a residual stream keeps its size through the layers; norms are ones."""
        where = Slice(what) if isinstance(what, str) else what
        shape = self._shape(where.name)
        dtype = dtype or getattr(torch, self._spec.dtype)
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=device)
        seed = hashlib.sha256(f"{where.name}\0{where.index}\0{where.rows}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(seed[:7], "little"))
        return torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(shape[-1] ** -0.5)

    def dtype_of(self, what: Slice) -> torch.dtype:
        """The model's."""
        dtype: torch.dtype = getattr(torch, self._spec.dtype)
        return dtype

    def _shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor by its name, as the families lay them out."""
        spec = self._spec
        attended, kept, parts = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, name.split(".")
        if "experts" in parts:
            down = parts[-2] in ("down_proj", "w2")
            return (spec.hidden_size, spec.expert_width) if down else (spec.expert_width, spec.hidden_size)
        matrices = {
            "embed_tokens": (spec.vocab_size, spec.hidden_size),
            "lm_head": (spec.vocab_size, spec.hidden_size),
            "q_proj": (attended, spec.hidden_size),
            "k_proj": (kept, spec.hidden_size),
            "v_proj": (kept, spec.hidden_size),
            "o_proj": (spec.hidden_size, attended),
            "gate": (spec.num_experts, spec.hidden_size),
        }
        full = spec.qk_norm == "full"
        norms = {"q_norm": attended if full else spec.head_dim, "k_norm": kept if full else spec.head_dim}
        return matrices.get(parts[-2]) or (norms.get(parts[-2], spec.hidden_size),)


def open_model(model: str, *, allow_synthetic: bool = False) -> tuple[ModelSpec, Checkpoint]:
    """The folder of a checkpoint, or `synthetic:NAME[,key=number...]` -> its spec and where its weights come from.

    Raises UnsupportedModel for a model that is not supported, ConfigError for a synthetic one that was not asked for by flag.
    """
    if not model.startswith(PREFIX):
        return ModelSpec.load(Path(model)), Checkpoint(Path(model))
    if not allow_synthetic:
        raise ConfigError(f"--model {model}: has random weights and answers nonsense; --allow-synthetic serves it all the same")
    config = synthetic_config(model)
    spec = read_spec(config, {}, model)
    return spec, SyntheticCheckpoint(config, spec)
