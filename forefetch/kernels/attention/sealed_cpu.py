"""Sealed attention in plain PyTorch operations; made for CPUs, correct on every device.

Decoding never forms K or V: a page's codes become small integers (a look-up of whole bytes), the scale of K goes into the
query, its zero into a constant per page, the scale of V into the probabilities, its zero into a sum, outlier channels and third
bits are products of their own. That happens `BLOCK` pages at a time, so that what is unpacked at any moment does not grow with
the context. A prompt's chunk has many queries per page; there a block of pages is opened once for all of them, and partial
results are merged by log-sum-exp.

Letters: n pages of a block, G = Hq / Hkv, N outliers, S sinks, C queries of a chunk; the others as in `sealed.py`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from forefetch.kernels.attention.sealed import SealedKv, SealedPlan
from forefetch.kernels.kv_codec import orders
from forefetch.kernels.kv_codec.formats import KvFormat
from forefetch.kernels.kv_codec.ref import Parts, open_pages

BLOCK = 16
"""Pages unpacked at a time: 2 MiB of float32 per KV head at D = T = 128."""


def decode_sealed_cpu(q: Tensor, kv: SealedKv, plan: SealedPlan, format: KvFormat, scale: float) -> Tensor:
    """q [B, Hq, D] -> [B, Hq, D]; computed in float32."""
    heads = len(kv.pages)
    counts = zip(plan.sealed.tolist(), plan.lengths.tolist(), plan.tail.tolist(), strict=True)
    rows = []
    for row, (sealed, length, tail) in enumerate(counts):
        grouped = q[row].float().view(heads, -1, q.shape[2]) * scale  # [Hkv, G, D]
        pages = plan.page_table[row, :sealed].long()
        rows.append(_decode_row(grouped, kv, pages, tail, length - sealed * format.page, format))
    return torch.stack(rows).view(q.shape).to(q.dtype)


def _decode_row(q: Tensor, kv: SealedKv, pages: Tensor, tail: int, fresh: int, format: KvFormat) -> Tensor:
    """q [Hkv, G, D] with the scale in it; `fresh` tokens of the row lie in its tail -> [Hkv, G, D]."""
    k, v = _plain(kv, tail, fresh, len(pages) > 0, format)
    blocks = [Block(kv.pages.index_select(1, part), format) for part in torch.split(pages, BLOCK)] if len(pages) else []
    scores = [block.scores(q) for block in blocks]
    if blocks:
        scores[0][..., : format.sinks] = -torch.inf
    weights = torch.cat([*scores, q @ k.mT], dim=-1).softmax(-1)
    out = weights[..., weights.shape[-1] - k.shape[1] :] @ v
    at = 0
    for block, part in zip(blocks, scores, strict=True):
        out += block.mix(weights[..., at : at + part.shape[-1]])
        at += part.shape[-1]
    return out


def _plain(kv: SealedKv, tail: int, fresh: int, sealed: bool, format: KvFormat) -> tuple[Tensor, Tensor]:
    """The float16 part of what a row sees: K and V [Hkv, sinks + fresh, D] as float32.

    A row without sealed pages has its first tokens in both places; it reads them from the tail."""
    parts = []
    for sinks, tails in ((kv.sink_k, kv.tail_k), (kv.sink_v, kv.tail_v)):
        own = tails[:, tail, :fresh]
        parts.append((torch.cat((sinks[:, tail], own), 1) if sealed and format.sinks else own).float())
    return parts[0], parts[1]


class Block:
    """Some pages of every KV head, blobs [Hkv, n, blob_bytes], unpacked as far as attention needs it."""

    def __init__(self, blobs: Tensor, format: KvFormat) -> None:
        self.format, (self.heads, self.count) = format, blobs.shape[:2]
        self.parts = Parts(blobs.flatten(0, 1), format)

    def scores(self, q: Tensor) -> Tensor:
        """q [Hkv, G, D] -> q . k for each token: [Hkv, G, n * T]."""
        format, queries = self.format, q[:, None]  # [Hkv, 1, G, D]
        if format.name == "fp4":  # its scale changes along the tokens, so it cannot go into the query
            keys = levels(self.parts, "k").mul_(self.parts.scale("k"))
            scores = queries @ self._by_head(keys).mT
        else:
            scaled = queries * self._by_head(self.parts.scale("k"))  # [Hkv, n, G, D]
            scores = scaled @ self._by_head(levels(self.parts, "k")).mT  # [Hkv, n, G, T]
            if format.thirds:
                scores += _picked(scaled, self._by_head(self.parts.third_channels())) @ self._by_head(_signs(self.parts))
        scores += queries @ self._by_head(self.parts.zero("k")).mT
        if format.outliers:
            some = _picked(queries, self._by_head(self.parts.channels()))
            scores += some @ self._by_head(self.parts.outliers())
        return scores.transpose(1, 2).flatten(2)

    def mix(self, weights: Tensor) -> Tensor:
        """weights [Hkv, G, n * T] -> the sum of weight times value: [Hkv, G, D]."""
        page = self.format.page
        weights = weights.reshape(self.heads, -1, self.count, page).transpose(1, 2)  # [Hkv, n, G, T]
        zero = self._by_head(self.parts.zero("v"))  # [Hkv, n, T, 1]
        values = levels(self.parts, "v")
        if self.format.name == "fp4":
            values.mul_(self.parts.scale("v"))
            mixed = weights @ self._by_head(values)
        else:
            mixed = (weights * self._by_head(self.parts.scale("v")).mT) @ self._by_head(values)
        return (mixed + weights @ zero).sum(1)

    def _by_head(self, x: Tensor) -> Tensor:
        """[Hkv * n, ...] -> [Hkv, n, ...]."""
        return x.view(self.heads, self.count, *x.shape[1:])


def _picked(q: Tensor, channels: Tensor) -> Tensor:
    """q [Hkv, n or 1, G, D], channels [Hkv, n, k] -> [Hkv, n, G, k]."""
    heads, count, width = channels.shape
    q = q.expand(heads, count, -1, -1)
    return q.gather(3, channels[:, :, None].expand(heads, count, q.shape[2], width))


def levels(parts: Parts, which: str) -> Tensor:
    """Levels of K or V: float32 [pages, T, D], without the third bits of `mixed`."""
    format = parts.format
    flat = _fields(parts.section(f"{which}_codes"), _table(format))
    if format.name == "fp4":  # its signs are not in the bytes of their magnitudes
        flat *= _fields(parts.section(f"{which}_codes"), _SIGNS4).view(len(flat), -1, 4, 2).mT.flatten(1)
    if format.name == "asym3":
        flat = flat + _fields(parts.section(f"{which}_thirds"), _SIGNS)[:, _third_place(format, which)]
    natural = _natural(flat, format, which)
    return natural.contiguous() if format.name == "fp4" else natural


def _fields(packed: Tensor, table: Tensor) -> Tensor:
    """Bytes [pages, m] through a table of what each byte means -> float32 [pages, m * fields per byte]."""
    return table.to(packed.device).index_select(0, packed.flatten().int()).view(len(packed), -1)


@lru_cache
def _table(format: KvFormat) -> Tensor:
    """Levels of the codes in each of 256 bytes, without signs in `fp4`: float32 [256, 8 / code bits]."""
    every = torch.arange(256, dtype=torch.uint8)[:, None]
    fields = torch.cat((every & 7, every >> 4 & 7), 1) if format.code_bits == 4 else orders.unpack(every, format.code_bits)
    return torch.tensor(format.levels, dtype=torch.float32)[fields.int()]


_SIGNS = orders.unpack(torch.arange(256, dtype=torch.uint8)[:, None], 1).float() * 2 - 1
_SIGNS4 = -_SIGNS[:, (7, 3)]  # +-1 of the two fields whose signs are in byte b of a word: b and b + 4


@lru_cache
def _third_place(format: KvFormat, which: str) -> Tensor:
    """`asym3`: for each stored 2-bit code the place of its third bit."""
    return orders.inverse(format, which, 1)[orders.code_order(format, which, 2)]


def _natural(flat: Tensor, format: KvFormat, which: str) -> Tensor:
    """Fields in stored order [pages, T * D] -> [pages, T, D]; a view where the stored order is a product of bit fields."""
    page, dim = format.page, format.head_dim
    if not format.fragment_order:
        return flat.view(-1, page, dim) if which == "k" and format.name != "fp4" else _gathered(flat, format, which)
    if format.name == "fp4":
        return _gathered(flat, format, which)
    if which == "k":  # tile, t&7, quarter, t3, channel within the quarter
        shaped = flat.view(-1, page // 16, 8, 4, 2, dim // 4)
        return shaped.permute(0, 1, 4, 2, 3, 5).reshape(-1, page, dim)
    # d>>4, d&7, t>>1&3, d3, t6, then t5, t3, t0, t4 of the sixteen codes
    shaped = flat.view(-1, dim // 16, 8, 4, 2, 2, 2, 2, 2, 2)
    return shaped.permute(0, 5, 6, 9, 7, 3, 8, 1, 4, 2).reshape(-1, page, dim)


def _gathered(flat: Tensor, format: KvFormat, which: str) -> Tensor:
    index = orders.inverse(format, which, format.code_bits).to(flat.device)
    return flat.index_select(1, index).view(-1, format.page, format.head_dim)


def _signs(parts: Parts) -> Tensor:
    """`mixed`: +-1 of the third bits [pages, thirds, T]."""
    format = parts.format
    index = orders.inverse(format, "thirds").to(parts.blobs.device)
    return _fields(parts.section("k_thirds"), _SIGNS).index_select(1, index).view(-1, format.thirds, format.page)


class Partial(NamedTuple):
    """Attention over some of the tokens: out [Hkv, G, C, D] normalised over them, and the log of the sum of their weights."""

    out: Tensor
    lse: Tensor  # [Hkv, G, C, 1]


def prefill_sealed_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    kv: SealedKv,
    tail: int,
    start: int,
    format: KvFormat,
    scale: float,
    loaded: int = 0,
) -> Tensor:
    """q [C, Hq, D] at positions start .. start + C - 1 of one request -> [C, Hq, D]; causal.

    k, v [Hkv, m, D] float16: the request's tokens that were not sealed before the chunk, and the chunk's own, up to its last.
    `pages` [p]: its page numbers; those that a query reads sealed (`format.sealed_pages`, or `loaded` if more) must be sealed.
    """
    count, first = len(q), start + len(q) - k.shape[1]  # first: position of k[:, 0]
    queries = q.float().view(count, len(k), -1, q.shape[2]).permute(1, 2, 0, 3) * scale  # [Hkv, G, C, D]
    seen = torch.tensor([max(format.sealed_pages(start + i), loaded) for i in range(count)], device=q.device)  # [C]
    out, lse = _fresh(queries, k.float(), v.float(), kv, tail, start, first, seen, format)
    for begin in range(0, int(seen[-1]), BLOCK):
        rows = int((seen <= begin).sum())  # queries before it see nothing of this block
        end = min(begin + BLOCK, int(seen[-1]))
        part = _sealed_block(queries[:, :, rows:], kv.pages[:, pages[begin:end]], begin, seen[rows:], format)
        out[:, :, rows:], lse[:, :, rows:] = _merged(Partial(out[:, :, rows:], lse[:, :, rows:]), part)
    return out.permute(2, 0, 1, 3).reshape(q.shape).to(q.dtype)


def _fresh(
    q: Tensor, k: Tensor, v: Tensor, kv: SealedKv, tail: int, start: int, first: int, seen: Tensor, format: KvFormat
) -> Partial:
    """The float16 part: sinks, and what is not sealed for a query at its position; queries with equal `seen` together."""
    outs: list[Tensor] = []
    sums: list[Tensor] = []
    values_of, counts = torch.unique_consecutive(seen, return_counts=True)
    for sealed, count in zip(values_of.tolist(), counts.tolist(), strict=True):
        at = sum(out.shape[2] for out in outs)
        low, high = sealed * format.page - first, start + at + count - first
        keys, values = k[:, low:high], v[:, low:high]
        sinks = format.sinks if sealed else 0
        if sinks:
            keys = torch.cat((kv.sink_k[:, tail].float(), keys), 1)
            values = torch.cat((kv.sink_v[:, tail].float(), values), 1)
        scores = q[:, :, at : at + count] @ keys[:, None].mT  # [Hkv, G, count, sinks + fresh]
        scores += torch.full(scores.shape[2:], -torch.inf, device=q.device).triu_(scores.shape[3] - count + 1)
        part = _softmax(scores, values)
        outs.append(part.out)
        sums.append(part.lse)
    return Partial(torch.cat(outs, 2), torch.cat(sums, 2))


def _sealed_block(q: Tensor, blobs: Tensor, begin: int, seen: Tensor, format: KvFormat) -> Partial:
    """q [Hkv, G, c, D], blobs [Hkv, n, blob_bytes] of pages begin .. begin + n; seen [c] > begin."""
    heads, count = blobs.shape[:2]
    k, v = (part.view(heads, count * format.page, -1) for part in open_pages(blobs.flatten(0, 1), format))
    scores = q @ k[:, None].mT  # [Hkv, G, c, n * T]
    hidden = torch.arange(begin, begin + count, device=q.device) >= seen[:, None]  # [c, n]
    scores.view(*scores.shape[:3], count, -1).masked_fill_(hidden[..., None], -torch.inf)
    if begin == 0:
        scores[..., : format.sinks] = -torch.inf
    return _softmax(scores, v)


def _softmax(scores: Tensor, values: Tensor) -> Partial:
    lse = scores.logsumexp(-1, keepdim=True)
    return Partial(scores.sub_(lse).exp_() @ values[:, None], lse)


def _merged(a: Partial, b: Partial) -> Partial:
    lse = torch.logaddexp(a.lse, b.lse)
    return Partial(a.out * (a.lse - lse).exp() + b.out * (b.lse - lse).exp(), lse)
