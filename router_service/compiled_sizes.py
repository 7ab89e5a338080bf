"""What compiled kernels are told of a trunk, and the memory they work in."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from forefetch.kernels.compiled import layer, step
from forefetch.kernels.compiled.linear import padded
from router_service.cache import KvCache
from router_service.trunk import Trunk

Floats = npt.NDArray[np.float32]


def model_of(trunk: Trunk) -> layer.Model:
    """A trunk's sizes and rules."""
    spec, cache = trunk.spec, trunk.cache
    assert isinstance(cache, KvCache)
    norm = {"none": layer.NO_NORM, "head": layer.HEAD_NORM, "full": layer.FULL_NORM}[spec.qk_norm]
    clip = np.inf if spec.clip_qkv is None else spec.clip_qkv
    sizes = spec.hidden_size, spec.heads, spec.kv_heads, spec.head_dim, spec.num_experts, spec.top_k
    over_chosen = spec.gate_rule == "topk_softmax" or spec.renormalise
    rules = (np.float32(value) for value in (spec.rms_eps, spec.attention_scale, spec.residual_multiplier, clip))
    return layer.Model(*sizes, cache.page_size, cache.k[0].shape[1], norm, over_chosen, *rules)


def buffers_of(model: layer.Model, rows: int) -> layer.Buffers:
    """Room for so many rows."""

    def floats(columns: int) -> Floats:
        return np.zeros((rows, columns), dtype=np.float32)

    inner, pairs = model.heads * model.dim, rows * model.top_k
    return layer.Buffers(
        x=floats(model.hidden),
        normed=floats(model.hidden),
        qkv=floats(padded(inner + 2 * model.kv_heads * model.dim)),
        attended=floats(inner),
        product=floats(padded(model.hidden)),
        logits=floats(padded(model.experts)),
        ids=np.zeros((rows, model.top_k), dtype=np.int64),
        weights=floats(model.top_k),
        order=np.arange(max(pairs, model.experts, model.heads)),
    )


def mlp_of(trunk: Trunk, rows: int) -> step.Mlp:
    """Room for the widest MLP that every row goes through."""
    widths = {len(mlp.w2) for one in trunk.layers if (mlp := one.dense or one.shared)} or {1}
    width, hidden = max(widths), trunk.spec.hidden_size
    shapes = (rows, padded(2 * width)), (rows * width,), (rows, padded(hidden))
    return step.Mlp(*(np.zeros(shape, dtype=np.float32) for shape in shapes))
