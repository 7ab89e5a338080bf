"""Codes into the bytes of a page, in registers: the fields of a byte are neighbours along one or two bits of token or channel
(`orders.py`), so each gives its share and shares are added up. Fields of one bit go through a table of places (`_pack`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forefetch.kernels.kv_codec import orders
from forefetch.kernels.kv_codec.formats import KvFormat
from forefetch.kernels.kv_codec.triton import _at, _get, _place, _sign_at


@triton.jit
def _share(code, f):
    """What a code of 4 bits gives to its word as field f."""
    return (code & 7) << 4 * f | (code >> 3) << _sign_at(f)


@triton.jit
def _put(section, byte, t, c, KEYS: tl.constexpr, F: tl.constexpr):
    """Stores bytes whose first field is that of (t, c)."""
    a, j = _place(t, c, KEYS, F)
    at = ((a * 16 + j) * _get(F, "code_bits")) >> 3
    tl.store(section + at, byte.to(tl.uint8), mask=(c < _get(F, "head_dim")) & (t >= 0))


@triton.jit
def _put_words(section, word, t, c, KEYS: tl.constexpr, F: tl.constexpr):
    """Stores words of 8 codes of 4 bits whose first field is that of (t, c)."""
    a, j = _place(t, c, KEYS, F)
    tl.store(section.to(tl.pointer_type(tl.int32)) + (2 * a + (j >> 3)), word, mask=(c < _get(F, "head_dim")) & (t >= 0))


@triton.jit
def put_keys(page, code, start, F: tl.constexpr, N: tl.constexpr, C: tl.constexpr):
    """Codes int32 [N, C] of tokens from `start` on into K's section."""
    section, t, c = page + _at(F, "k_codes"), start + tl.arange(0, N)[:, None], tl.arange(0, C)[None, :]
    if _get(F, "code_bits") == 2:
        byte = tl.sum(tl.reshape(code << (2 * (c & 3)), (N, C // 4, 4)), 2)
        _put(section, byte, t, tl.arange(0, C // 4)[None, :] * 4, True, F)
    else:
        f = (c >> 1) & 1 | (c & 1) << 1 | c & 4 if _get(F, "fragment_order") else c & 7
        word = tl.sum(tl.reshape(_share(code, f), (N, C // 8, 8)), 2)
        _put_words(section, word, t, tl.arange(0, C // 8)[None, :] * 8, True, F)


@triton.jit
def put_values(page, code, start, F: tl.constexpr, C: tl.constexpr):
    """Codes int32 [32, C] of tokens from `start` on, a multiple of 32, into V's section."""
    section, t, c = page + _at(F, "v_codes"), tl.arange(0, 32)[:, None], tl.arange(0, C)[None, :]
    if _get(F, "code_bits") == 2 and _get(F, "fragment_order"):
        share = code << (2 * (t >> 4 | (t & 1) << 1))
        byte = tl.sum(tl.sum(tl.reshape(share, (2, 8, 2, C)), 2), 0)
        _put(section, byte, start + tl.arange(0, 8)[:, None] * 2, c, False, F)
    elif _get(F, "code_bits") == 2:
        byte = tl.sum(tl.reshape(code << (2 * (t & 3)), (8, 4, C)), 1)
        _put(section, byte, start + tl.arange(0, 8)[:, None] * 4, c, False, F)
    elif _get(F, "fragment_order"):
        share = tl.reshape(_share(code, (t >> 3) & 1 | (t & 1) << 1 | ((t >> 4) & 1) << 2), (4, 4, 2, C))  # t4-3, t2-1, t0
        word = tl.sum(tl.sum(share, 2), 0)
        _put_words(section, word, start + tl.arange(0, 4)[:, None] * 2, c, False, F)
    else:
        word = tl.sum(tl.reshape(_share(code, t & 7), (4, 8, C)), 1)
        _put_words(section, word, start + tl.arange(0, 4)[:, None] * 8, c, False, F)


_ORDERS: dict[tuple[KvFormat, str, torch.device], Tensor] = {}


def bit_order(format: KvFormat, section: str, device: torch.device) -> Tensor:
    """For each stored bit of `k_thirds` or `v_thirds` the index of its element: int32 on the device, made once."""
    key = format, section, device
    if key not in _ORDERS:
        order = orders.third_order(format) if format.name == "mixed" else orders.code_order(format, section[0], 1)
        _ORDERS[key] = order.int().to(device)
    return _ORDERS[key]


@triton.jit
def put_bits(section, bits, order, size, block, N: tl.constexpr):
    """Bytes block * N .. of a section of `size` bytes, of elements whose lowest bit counts, in stored order."""
    byte = block * N + tl.arange(0, N)
    packed = tl.zeros([N], tl.int32)
    for field in tl.static_range(8):
        source = tl.load(order + byte * 8 + field, mask=byte < size, other=0)
        packed |= (tl.load(bits + source, mask=byte < size, other=0).to(tl.int32) & 1) << field
    tl.store(section + byte, packed.to(tl.uint8), mask=byte < size)
