from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from forefetch.kernels.attention.sealed import SealedKv, SealedPlan, decode_sealed_ref
from forefetch.kernels.kv_codec import KvFormat, open_pages, seal

R = 32
LENGTHS = [1, 3, R - 1, R, R + 1, 2 * R, 3 * R + 7, 5 * R]
"""Around page edges, shorter than the sinks, and ragged."""
THIRDS = {"mixed": 16}


@dataclasses.dataclass
class Scene:
    """Rows of a batch: what is stored, and the dense K and V [Hkv, L, D] that each row should see."""

    format: KvFormat
    kv: SealedKv
    plan: SealedPlan
    dense: list[tuple[Tensor, Tensor]]


def make_scene(name: str, lengths: list[int], kv_heads: int = 2, dim: int = 32, *, recent: int = 9, seed: int = 0) -> Scene:
    """Everything that no row should read is NaN, or a byte pattern that opens to NaN."""
    format = KvFormat(name, dim, page=R, thirds=THIRDS.get(name, 0), sinks=5, recent=recent)
    generator = torch.Generator().manual_seed(seed)
    sealed = [format.sealed_pages(length - 1) for length in lengths]
    pages = torch.full((kv_heads, 1 + sum(sealed), format.blob_bytes), 0xFF, dtype=torch.uint8)
    tails = torch.full((2, kv_heads, len(lengths), format.tail_tokens, dim), torch.nan, dtype=torch.float16)
    sinks = torch.full((2, kv_heads, len(lengths), format.sinks, dim), torch.nan, dtype=torch.float16)
    table = torch.full((len(lengths), 1 + max(sealed)), 2**30, dtype=torch.int32)
    free = torch.randperm(sum(sealed), generator=generator) + 1  # scattered
    entries = torch.randperm(len(lengths), generator=generator)
    dense = []
    for row, (length, count) in enumerate(zip(lengths, sealed, strict=True)):
        own, free = free[:count], free[count:]
        table[row, :count] = own
        k, v = torch.randn(2, kv_heads, length, dim, generator=generator).mul_(2).half()
        k += 4 * torch.randn(kv_heads, 1, dim, generator=generator).half()
        seen = [k.double(), v.double()]
        for page in range(count):
            span = slice(page * R, (page + 1) * R)
            pages[:, own[page]] = seal(k[:, span], v[:, span], format, skip=0 if page else format.sinks)
            for part, opened in zip(seen, open_pages(pages[:, own[page]], format, torch.float64), strict=True):
                part[:, span] = opened
        for part, tail, sink, whole in zip(seen, tails, sinks, (k, v), strict=True):
            tail[:, entries[row], : length - count * R] = whole[:, count * R :]
            first = min(format.sinks, length)
            sink[:, entries[row], :first] = whole[:, :first]
            part[:, :first] = whole[:, :first].double()
        dense.append((seen[0], seen[1]))
    plan = SealedPlan(table, torch.tensor(sealed).int(), torch.tensor(lengths).int(), entries.int())
    return Scene(format, SealedKv(pages, tails[0], tails[1], sinks[0], sinks[1]), plan, dense)


def truth(q: Tensor, scene: Scene, scale: float) -> Tensor:
    """Dense attention in float64."""
    rows = []
    for query, (k, v) in zip(q.double(), scene.dense, strict=True):
        grouped = query.view(len(k), -1, query.shape[-1])
        rows.append(((grouped @ k.mT * scale).softmax(-1) @ v).flatten(0, 1))
    return torch.stack(rows)


@pytest.mark.parametrize("name", ["e2m0", "asym2", "mixed", "asym3", "fp4"])
@pytest.mark.parametrize("group", [1, 4, 7, 8])
def test_reference_is_dense_attention_over_what_the_pages_hold(name: str, group: int) -> None:
    scene = make_scene(name, LENGTHS)
    q = torch.randn(len(LENGTHS), 2 * group, 32, generator=torch.Generator().manual_seed(1))
    out = decode_sealed_ref(q.double(), scene.kv, scene.plan, scene.format, 0.3)
    # Both in float64 over the same values; only the order of sums differs.
    assert torch.allclose(out, truth(q, scene, 0.3), rtol=0, atol=1e-12)
