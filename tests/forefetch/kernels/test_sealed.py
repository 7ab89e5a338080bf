from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from forefetch.kernels.attention import sealed_cpu
from forefetch.kernels.attention.sealed import SealedKv, SealedPlan, decode_sealed_ref
from forefetch.kernels.attention.sealed_cpu import decode_sealed_cpu, prefill_sealed_cpu
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
    whole: tuple[Tensor, Tensor] | None = None  # the longest row's K and V [Hkv, L, D] as they were before sealing


def make_scene(
    name: str,
    lengths: list[int],
    kv_heads: int = 2,
    dim: int = 32,
    *,
    recent: int = 9,
    seed: int = 0,
    page: int = R,
    shared: bool = False,
) -> Scene:
    """Everything that no row should read is NaN, or a byte pattern that opens to NaN. `shared`: all rows hold the beginning
    of one sequence."""
    format = KvFormat(name, dim, page=page, thirds=THIRDS.get(name, 0), sinks=5, recent=recent)
    generator = torch.Generator().manual_seed(seed)
    sealed = [format.sealed_pages(length - 1) for length in lengths]
    pages = torch.full((kv_heads, 1 + sum(sealed), format.blob_bytes), 0xFF, dtype=torch.uint8)
    tails = torch.full((2, kv_heads, len(lengths), format.tail_tokens, dim), torch.nan, dtype=torch.float16)
    sinks = torch.full((2, kv_heads, len(lengths), format.sinks, dim), torch.nan, dtype=torch.float16)
    table = torch.full((len(lengths), 1 + max(sealed)), 2**30, dtype=torch.int32)
    free = torch.randperm(sum(sealed), generator=generator) + 1  # scattered
    entries = torch.randperm(len(lengths), generator=generator)
    dense = []
    size, longest = torch.randn(kv_heads, 1, dim, generator=generator).mul_(4), max(lengths)
    whole = torch.randn(2, kv_heads, longest, dim, generator=generator).mul_(2)
    for row, (length, count) in enumerate(zip(lengths, sealed, strict=True)):
        own, free = free[:count], free[count:]
        table[row, :count] = own
        k, v = whole[:, :, :length] if shared else torch.randn(2, kv_heads, length, dim, generator=generator).mul_(2)
        k, v = (k + size).half(), v.half()
        seen = [k.double(), v.double()]
        for page in range(count):
            span = slice(page * format.page, (page + 1) * format.page)
            pages[:, own[page]] = seal(k[:, span], v[:, span], format, skip=0 if page else format.sinks)
            for part, opened in zip(seen, open_pages(pages[:, own[page]], format, torch.float64), strict=True):
                part[:, span] = opened
        for part, tail, sink, full in zip(seen, tails, sinks, (k, v), strict=True):
            tail[:, entries[row], : length - count * format.page] = full[:, count * format.page :]
            first = min(format.sinks, length)
            sink[:, entries[row], :first] = full[:, :first]
            part[:, :first] = full[:, :first].double()
        dense.append((seen[0], seen[1]))
    plan = SealedPlan(table, torch.tensor(sealed).int(), torch.tensor(lengths).int(), entries.int())
    stored = ((whole[0] + size).half(), whole[1].half()) if shared else None
    return Scene(format, SealedKv(pages, tails[0], tails[1], sinks[0], sinks[1]), plan, dense, stored)


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


def tolerance(q: Tensor, scene: Scene, scale: float) -> float:
    """What float32 arithmetic may lose. A score is a sum of at most D + 8 products whose magnitudes add up to at most
    sum|q| * 2 max|k| * scale (scale * level and zero are each below twice the largest key); each costs 2**-24. An error ds in
    every score changes weights by 2 ds at most, and a mix of L values adds L roundings."""
    keys = max(float(k.abs().max()) for k, _ in scene.dense)
    values = max(float(v.abs().max()) for _, v in scene.dense)
    length = max(k.shape[1] for k, _ in scene.dense)
    ds = (q.shape[-1] + 8) * 2**-24 * float(q.abs().sum(-1).max()) * 2 * keys * scale
    return (2 * ds + (length + 8) * 2**-24) * values


NAMES = ["e2m0", "asym2", "mixed", "asym3", "fp4"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("group", [1, 4, 7, 8])
def test_cpu_decode_is_the_truth_within_float32(name: str, group: int) -> None:
    scene = make_scene(name, LENGTHS)
    q = torch.randn(len(LENGTHS), 2 * group, 32, generator=torch.Generator().manual_seed(1))
    out = decode_sealed_cpu(q, scene.kv, scene.plan, scene.format, 0.3)
    assert (out - truth(q, scene, 0.3)).abs().max() < tolerance(q, scene, 0.3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192])
def test_every_head_dim_and_both_orders(name: str, dim: int) -> None:
    lengths = [127, 128, 129, 256, 300]
    scene = make_scene(name, lengths, 1, dim, recent=40, page=128)
    q = torch.randn(len(lengths), 2, dim, generator=torch.Generator().manual_seed(1))
    out = decode_sealed_cpu(q, scene.kv, scene.plan, scene.format, dim**-0.5)
    assert (out - truth(q, scene, dim**-0.5)).abs().max() < tolerance(q, scene, dim**-0.5)


def test_many_blocks_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_cpu, "BLOCK", 2)
    scene = make_scene("e2m0", [9 * R + 3])
    q = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(1))
    out = decode_sealed_cpu(q, scene.kv, scene.plan, scene.format, 0.3)
    assert (out - truth(q, scene, 0.3)).abs().max() < tolerance(q, scene, 0.3)


def test_a_row_that_left_changes_nothing_for_the_others() -> None:
    scene = make_scene("e2m0", LENGTHS)
    q = torch.randn(len(LENGTHS), 8, 32, generator=torch.Generator().manual_seed(1))
    whole = decode_sealed_cpu(q, scene.kv, scene.plan, scene.format, 0.3)
    left = [row for row in range(len(LENGTHS)) if row != 3]
    fewer = SealedPlan(*(getattr(scene.plan, field.name)[left] for field in dataclasses.fields(SealedPlan)))
    assert torch.equal(decode_sealed_cpu(q[left], scene.kv, fewer, scene.format, 0.3), whole[left])


BROKEN = {
    "radix 2 instead of 4": (
        "_table",
        lambda format: torch.where(right_table(format).abs() > 1, 0.5, 1.0) * right_table(format),
    ),
    "a wrong order": ("_natural", lambda flat, format, which: flat.view(-1, format.page, format.head_dim)),
}
right_table = sealed_cpu._table


@pytest.mark.parametrize("what", list(BROKEN))
def test_a_broken_kernel_fails(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_cpu, *BROKEN[what])
    scene = make_scene("e2m0", [300], 1, 64, page=128)
    q = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(1))
    out = decode_sealed_cpu(q, scene.kv, scene.plan, scene.format, 0.125)
    assert (out - truth(q, scene, 0.125)).abs().max() > 10 * tolerance(q, scene, 0.125)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, R), (0, 5 * R + 3), (R - 1, 2), (3 * R, R + 1), (2 * R + 5, 3 * R)])
def test_a_chunk_sees_what_decoding_would_see(name: str, start: int, count: int) -> None:
    """Queries of a chunk, at its ends and where pages become sealed, against decode rows of the same lengths."""
    end = start + count
    edges = [edge + side for edge in range(9, end, R) for side in (-1, 0, 1)]
    some = sorted({start, end - 1, *(edge for edge in edges if start <= edge < end)})
    scene = make_scene(name, [position + 1 for position in some], seed=5, shared=True)
    format, q = scene.format, torch.randn(end, 8, 32, generator=torch.Generator().manual_seed(1))
    expected = truth(q[some], scene, 0.3)
    assert scene.whole is not None
    low = format.sealed_pages(start) * R
    k, v = (part[:, low:] for part in scene.whole)
    pages = scene.plan.page_table[-1].long()
    tail = int(scene.plan.tail[-1])
    out = prefill_sealed_cpu(q[start:], k, v, pages, scene.kv, tail, start, format, 0.3)
    assert (out[[position - start for position in some]] - expected).abs().max() < tolerance(q, scene, 0.3)
