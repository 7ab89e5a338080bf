"""In which order a page's codes and per-token vectors lie. Tables of indices; everything is cached.

T = 128 tokens and D a multiple of 64: the order of the B operand of an `mma.sync` with 8-bit elements, so that a kernel loads
words and multiplies without a shuffle. Sixteen 2-bit codes make a 32-bit word `a`, code j at bits 2j and 2j + 1:

    K  (token t, channel c)  q = c / (D/4), r = c % (D/4), t3 = bit 3 of t
       a = (t>>4) * D + (((t&7)*4 + q)*2 + t3) * D/64 + (r>>4);  j = r & 15
    V  (token t, channel d)  a = (d>>4)<<7 | (d&7)<<4 | ((t>>1)&3)<<2 | ((d>>3)&1)<<1 | t>>6
       j = t4 | t0<<1 | t3<<2 | t5<<3       (ti: bit i of t)
    token order              p = t0 | t3<<1 | t4<<2 | t5<<3 | t1<<4 | t2<<5 | t6<<6

Any other shape: row by row, K as [t][c], V as [d][t], tokens in their own order; sixteen codes to a word all the same.

The other widths follow the 2-bit place (a, j), so that a kernel's registers hold the same elements:

    1 bit   word a>>1, bit 4*(j>>1) + 2*(a&1) + (j&1): the nibbles' third bit after one shift
    mixed   channel i of the third-bit list, N = thirds, w = N/4: slot s = (t>>3) * N/16 + (i%w>>2) of lane (t&7)*4 + i/w;
            word lane * N/8 + s/8, bit 8 * (i&3) + s%8: a mask picks four channels of a token, a byte each
            (any other shape: bit ((t&7)*4 + i/w) * T/8 * w + (t>>3) * w + i%w)

`fp4` meets float16 tensor cores instead, 8 codes to a word `a`, field f:

    K  (token t, channel c)  a = t * D/8 + (c>>3);  f = c1 | c0<<1 | c2<<2
    V  (token t, channel d)  a = (d>>3)<<7 | (d&7)<<4 | ((t>>1)&3)<<2 | t>>5;  f = t3 | t0<<1 | t4<<2

A code of 4 bits is a sign and a magnitude. Magnitude f is the lower three bits of nibble f, as `prmt` wants its selector; the
signs of fields 0 to 3 are bits 7, 15, 23 and 31, where the bytes have theirs that it makes of these, those of fields 4 to 7
bits 3, 11, 19 and 27.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from forefetch.kernels.kv_codec.formats import KvFormat

Place = tuple[Tensor, Tensor]  # word a and code j


def _k_fragment(t: Tensor, c: Tensor, dim: int) -> Place:
    """16-token tiles of D words; a lane (t&7, quarter of the channels) owns D/32 consecutive words."""
    quarter, rest = c // (dim // 4), c % (dim // 4)
    lane = (t & 7) * 4 + quarter
    return (t >> 4) * dim + (lane * 2 + ((t >> 3) & 1)) * (dim // 64) + (rest >> 4), rest & 15


def _v_fragment(t: Tensor, d: Tensor) -> Place:
    word = (d >> 4) << 7 | (d & 7) << 4 | ((t >> 1) & 3) << 2 | ((d >> 3) & 1) << 1 | t >> 6
    return word, (t >> 4) & 1 | (t & 1) << 1 | ((t >> 3) & 1) << 2 | ((t >> 5) & 1) << 3


def _half_fragment(t: Tensor, c: Tensor, dim: int, which: str) -> Tensor:
    """fp4: where a code lies among codes."""
    if which == "k":
        return (t * (dim // 8) + (c >> 3)) * 8 + ((c >> 1) & 1 | (c & 1) << 1 | c & 4)
    word = (c >> 3) << 7 | (c & 7) << 4 | ((t >> 1) & 3) << 2 | t >> 5
    return word * 8 + ((t >> 3) & 1 | (t & 1) << 1 | ((t >> 4) & 1) << 2)


def _position(a: Tensor, j: Tensor, bits: int) -> Tensor:
    """Where a field of `bits` bits lies among fields of that width."""
    if bits != 1:
        return a * 16 + j
    return (a >> 1) * 32 + 4 * (j >> 1) + 2 * (a & 1) + (j & 1)


@lru_cache
def code_order(format: KvFormat, which: str, bits: int) -> Tensor:
    """For each stored field of K or V (`which`: "k" or "v"), in order, the index t * D + c of its element: int64 [T * D]."""
    page, dim = format.page, format.head_dim
    t, c = (part.flatten() for part in torch.meshgrid(torch.arange(page), torch.arange(dim), indexing="ij"))
    if format.fragment_order and bits == 4:
        return _half_fragment(t, c, dim, which).argsort()
    if format.fragment_order:
        a, j = _k_fragment(t, c, dim) if which == "k" else _v_fragment(t, c)
    else:
        flat = t * dim + c if which == "k" else c * page + t
        a, j = flat >> 4, flat & 15
    return _position(a, j, bits).argsort()


@lru_cache
def token_order(format: KvFormat) -> Tensor:
    """For each stored position of a per-token vector the token it belongs to: int64 [T]."""
    t = torch.arange(format.page)
    if not format.fragment_order:
        return t
    return sum(((t >> source) & 1) << target for target, source in enumerate((0, 3, 4, 5, 1, 2, 6))).argsort()  # type: ignore[union-attr]


@lru_cache
def third_order(format: KvFormat) -> Tensor:
    """`mixed`: for each stored bit the index i * T + t of its element (channel i of the list): int64 [thirds * T]."""
    count, page = format.thirds, format.page
    i, t = (part.flatten() for part in torch.meshgrid(torch.arange(count), torch.arange(page), indexing="ij"))
    width = count // 4
    if format.fragment_order:
        slot = (t >> 3) * (count // 16) + (i % width >> 2)
        word = ((t & 7) * 4 + i // width) * (count // 8) + (slot >> 3)
        return (word * 32 + 8 * (i & 3) + (slot & 7)).argsort()
    return (((t & 7) * 4 + i // width) * (page // 8 * width) + (t >> 3) * width + i % width).argsort()


@lru_cache
def inverse(format: KvFormat, table: str, bits: int = 2) -> Tensor:
    """The inverse of a table: where the element with a given index is stored. `table`: k, v, tokens or thirds."""
    orders = {"tokens": token_order, "thirds": third_order}
    return orders[table](format).argsort() if table in orders else code_order(format, table, bits).argsort()


def pack(fields: Tensor, bits: int) -> Tensor:
    """uint8 fields [..., n] below 2**bits -> bytes [..., n * bits / 8], the first in the lowest bits; 4 bits: see above."""
    if bits == 4:
        words = fields.reshape(*fields.shape[:-1], fields.shape[-1] // 8, 2, 4)
        signs = words >> 3
        magnitudes = (words & 7).reshape(*words.shape[:-2], 4, 2)  # of each byte
        both: Tensor = magnitudes[..., 0] | magnitudes[..., 1] << 4 | signs[..., 0, :] << 7 | signs[..., 1, :] << 3
        return both.flatten(-2)
    per = 8 // bits
    parts = fields.reshape(*fields.shape[:-1], -1, per)
    packed: Tensor = parts[..., 0].clone()
    for place in range(1, per):
        packed |= parts[..., place] << (bits * place)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`: uint8 [..., n * 8 / bits]."""
    if bits == 4:
        words = packed.reshape(*packed.shape[:-1], packed.shape[-1] // 4, 4)
        signs = torch.cat((words >> 7, words >> 3 & 1), -1).flatten(-2)
        both = torch.stack((packed & 7, packed >> 4 & 7), -1).flatten(-2)
        return both | signs << 3
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    fields: Tensor = (packed.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return fields.flatten(-2)
