"""Batches over sealed pages in which everything that no row should read is NaN, and what each row should see."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from forefetch.kernels.attention.sealed import SealedKv, SealedPlan
from forefetch.kernels.kv_codec import KvFormat, open_pages, seal


@dataclasses.dataclass
class Scene:
    """Rows of a batch: what is stored, and the dense K and V [Hkv, L, D] in float64 that each row should see."""

    format: KvFormat
    kv: SealedKv
    plan: SealedPlan
    dense: list[tuple[Tensor, Tensor]]

    def to(self, device: str) -> Scene:
        kv, plan = (
            type(part)(*(getattr(part, field.name).to(device) for field in dataclasses.fields(part)))
            for part in (self.kv, self.plan)
        )
        return Scene(self.format, kv, plan, self.dense)  # type: ignore[arg-type]


def make_scene(format: KvFormat, lengths: list[int], kv_heads: int = 2, seed: int = 0) -> Scene:
    """Scattered pages, entries and table; keys with strong channels, as models have them. A length of 0 is an idle row."""
    generator, page, dim = torch.Generator().manual_seed(seed), format.page, format.head_dim
    sealed = [format.sealed_pages(length - 1) for length in lengths]
    pages = torch.full((kv_heads, 1 + sum(sealed), format.blob_bytes), 0xFF, dtype=torch.uint8)
    tails = torch.full((2, kv_heads, len(lengths), format.tail_tokens, dim), torch.nan, dtype=torch.float16)
    sinks = torch.full((2, kv_heads, len(lengths), format.sinks, dim), torch.nan, dtype=torch.float16)
    table = torch.full((len(lengths), 1 + max(sealed)), 2**30, dtype=torch.int32)
    free, entries = torch.randperm(sum(sealed), generator=generator) + 1, torch.randperm(len(lengths), generator=generator)
    dense = []
    for row, (length, count) in enumerate(zip(lengths, sealed, strict=True)):
        own, free = free[:count], free[count:]
        table[row, :count] = own
        k, v = torch.randn(2, kv_heads, length, dim, generator=generator).half()
        k *= 1 + 4 * torch.rand(kv_heads, 1, dim, generator=generator).half() ** 4
        k += 2 * torch.randn(kv_heads, 1, dim, generator=generator).half()
        seen = [k.double(), v.double()]
        for index in range(count):
            span = slice(index * page, (index + 1) * page)
            pages[:, own[index]] = seal(k[:, span], v[:, span], format, skip=0 if index else format.sinks)
            for part, opened in zip(seen, open_pages(pages[:, own[index]], format, torch.float64), strict=True):
                part[:, span] = opened
        for part, tail, sink, whole in zip(seen, tails, sinks, (k, v), strict=True):
            tail[:, entries[row], : length - count * page] = whole[:, count * page :]
            first = min(format.sinks, length)
            sink[:, entries[row], :first] = whole[:, :first]
            tail[:, entries[row], : max(0, first - count * page)] = torch.nan  # sinks come from their own block
            part[:, :first] = whole[:, :first].double()
        dense.append((seen[0], seen[1]))
    plan = SealedPlan(table, torch.tensor(sealed).int(), torch.tensor(lengths).int(), entries.int())
    return Scene(format, SealedKv(pages, tails[0], tails[1], sinks[0], sinks[1]), plan, dense)


def truth(q: Tensor, scene: Scene, scale: float) -> Tensor:
    """Dense attention in float64; zeros for idle rows."""
    rows = []
    for query, (k, v) in zip(q.double(), scene.dense, strict=True):
        grouped = query.view(len(k), -1, query.shape[-1])
        rows.append(((grouped @ k.mT * scale).softmax(-1) @ v).flatten(0, 1))
    return torch.stack(rows)


def relative(got: Tensor, expected: Tensor) -> float:
    """Error by length, over everything."""
    return float((got.double() - expected).norm() / expected.norm())


def expected_error(q: Tensor, scene: Scene, scale: float) -> float:
    """How far rounding may carry an answer, as a share of its length.

    Q and P meet the levels as numbers of about 11 bits (float16, or 15 bits of the largest one): a unit roundoff u = 2^-11 on
    each product q k, independent of the others. A score's error is then of standard deviation u scale sqrt(sum (q k)^2). A
    weight's relative error is that, plus u for itself; V, the output and sums add another 2 u. The errors of thousands of
    weights do not add up to more than one of them. Three deviations.
    """
    largest = max(
        float((query.double().view(len(k), -1, 1, k.shape[2]) * k[:, None]).square().sum(-1).max().sqrt())
        for query, (k, _) in zip(q, scene.dense, strict=True)
        if k.shape[1]
    )
    return 3 * 2**-11 * (scale * largest + 3)
