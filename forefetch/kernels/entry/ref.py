"""The definition in plain PyTorch: three operations after another."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import rms_norm

from forefetch.kernels.qkv import HeadNorms
from forefetch.kernels.qkv import ref as qkv


def enter_layer(
    x: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    tables: tuple[Tensor, Tensor],
    norms: HeadNorms | None,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    """x [T, H], norm [H], weight [H, (Hq + 2 Hkv) D] -> q [T, Hq, D]; K and V go to caches [Hkv, N, D] at slots [T].

    `tables`: cos and sin [T, 1, D] with both halves filled; `norms` as in `kernels.qkv`.
    """
    rows = rms_norm(x, x.shape[-1:], norm, eps) @ weight
    return qkv.enter(rows, *tables, norms, slots, k_cache, v_cache)
