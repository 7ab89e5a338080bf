"""Pages in Triton: the places of every number (`key_tile`, `value_tile`, for kernels that read pages) and `open_pages`.

Made to be right for every format and shape, on any GPU and in the interpreter. Fragment order is read word by word and brought
to its place by the compiler's shuffles; any other order byte by byte. `attention/gluon` reads fragment order without a shuffle.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forefetch.kernels.kv_codec.formats import KvFormat

TOKENS = 32  # of a tile; divides every page


@triton.constexpr_function
def _at(format, section):
    """Byte offset of a section."""
    return format.sections[section].offset if section in format.sections else 0


@triton.constexpr_function
def _get(format, name):
    """A parameter of the format."""
    return getattr(format, name)


@triton.jit
def _place(t, c, KEYS: tl.constexpr, F: tl.constexpr):
    """Word a and code j of element (token, channel): `orders.py`."""
    D: tl.constexpr = _get(F, "head_dim")
    T: tl.constexpr = _get(F, "page")
    if not _get(F, "fragment_order"):
        flat = t * D + c if KEYS else c * T + t
        return flat >> 4, flat & 15
    if _get(F, "code_bits") == 4:
        if KEYS:
            at = (t * (D // 8) + (c >> 3)) * 8 + ((c >> 1) & 1 | (c & 1) << 1 | c & 4)
        else:
            word = (c >> 3) << 7 | (c & 7) << 4 | ((t >> 1) & 3) << 2 | t >> 5
            at = word * 8 + ((t >> 3) & 1 | (t & 1) << 1 | ((t >> 4) & 1) << 2)
        return at >> 4, at & 15
    if KEYS:
        rest = c % (D // 4)
        lane = (t & 7) * 4 + c // (D // 4)
        return (t >> 4) * D + (lane * 2 + ((t >> 3) & 1)) * (D // 64) + (rest >> 4), (rest & 15) + 0 * t
    word = (c >> 4) << 7 | (c & 7) << 4 | ((t >> 1) & 3) << 2 | ((c >> 3) & 1) << 1 | t >> 6
    return word, (t >> 4) & 1 | (t & 1) << 1 | ((t >> 3) & 1) << 2 | ((t >> 5) & 1) << 3 | 0 * c


@triton.jit
def _sign_at(f):
    """Which bit of a word is the sign of its field f of 4 bits."""
    return 8 * (f & 3) + 7 - (f & 4)


@triton.jit
def _nibble(word, f):
    """Field f of 4 bits of a word."""
    return (word >> 4 * f) & 7 | ((word >> _sign_at(f)) & 1) << 3


@triton.jit
def level_of(code):
    """fp4: codes -> levels, int32."""
    m = code & 7
    return tl.where(m < 2, 3 + 7 * m, 8 * m + 8 * (m == 7).to(tl.int32)) * (1 - 2 * (code >> 3))


@triton.jit
def _field(section, a, j, inside, BITS: tl.constexpr):
    """The field of BITS bits at place (a, j)."""
    at = a * 16 + j
    if BITS == 1:
        at = (a >> 1) * 32 + 4 * (j >> 1) + 2 * (a & 1) + (j & 1)
    if BITS == 4:
        return _nibble(tl.load(section.to(tl.pointer_type(tl.int32)) + (at >> 3), mask=inside, other=0), at & 7)
    byte = tl.load(section + at * BITS // 8, mask=inside, other=0).to(tl.int32)
    return (byte >> (at * BITS % 8)) & ((1 << BITS) - 1)


@triton.jit
def _unpacked(section, a, j, BITS: tl.constexpr):
    """Fields of 1 or 2 bits at words a [W, 1], codes j [1, J] of fragment order: int32 [W, J]."""
    words = section.to(tl.pointer_type(tl.int32))
    if BITS == 2:
        return (tl.load(words + a) >> (2 * j)) & 3
    return (tl.load(words + (a >> 1)) >> (4 * (j >> 1) + 2 * (a & 1) + (j & 1))) & 1


@triton.jit
def _key_fields(section, start, BITS: tl.constexpr, F: tl.constexpr):
    """Fields of K of tokens [start, start + 32) in fragment order: int32 [32, D]."""
    D: tl.constexpr = _get(F, "head_dim")
    a, j = start // 16 * D + tl.arange(0, 2 * D)[:, None], tl.arange(0, 16)[None, :]
    fields = tl.reshape(_unpacked(section, a, j, BITS), (2, 8, 4, 2, D // 64, 16))  # t4, t2-0, quarter, t3, rest, code
    return tl.reshape(tl.permute(fields, (0, 3, 1, 2, 4, 5)), (32, D))


@triton.jit
def _value_fields(section, start, BITS: tl.constexpr, F: tl.constexpr):
    """The same of V: t5 and t6 are the tile's, and choose half of the words and half of each word."""
    D: tl.constexpr = _get(F, "head_dim")
    a, j = tl.arange(0, 4 * D)[:, None] * 2 + (start >> 6), tl.arange(0, 8)[None, :] + ((start >> 5) & 1) * 8
    fields = tl.reshape(_unpacked(section, a, j, BITS), (D // 16, 8, 4, 2, 2, 2, 2))  # d4.., d2-0, t2-1, d3, t3, t0, t4
    return tl.reshape(tl.permute(fields, (6, 4, 2, 5, 0, 3, 1)), (32, D))


@triton.jit
def _nibbles(section, start, KEYS: tl.constexpr, F: tl.constexpr):
    """Codes of 4 bits of tokens [start, start + 32) in fragment order: int32 [32, D]."""
    D: tl.constexpr = _get(F, "head_dim")
    words, f = section.to(tl.pointer_type(tl.int32)), tl.arange(0, 8)[None, :]
    if KEYS:
        word = tl.load(words + start * (D // 8) + tl.arange(0, 4 * D)[:, None])
    else:
        word = tl.load(words + tl.arange(0, 4 * D)[:, None] * 4 + start // 32)
    code = _nibble(word, f)
    if KEYS:  # token, word, c2, c0, c1
        return tl.reshape(tl.permute(tl.reshape(code, (32, D // 8, 2, 2, 2)), (0, 1, 2, 4, 3)), (32, D))
    code = tl.reshape(code, (D, 4, 2, 2, 2))  # channel, t2-1, t4, t0, t3
    return tl.reshape(tl.permute(code, (2, 4, 1, 3, 0)), (32, D))


@triton.jit
def _fields(section, start, BITS: tl.constexpr, KEYS: tl.constexpr, F: tl.constexpr, C: tl.constexpr):
    """Fields of tokens [start, start + 32): int32 [32, C], anything beyond D."""
    if _get(F, "fragment_order") and BITS == 4 and _get(F, "head_dim") == C:
        return _nibbles(section, start, KEYS, F)
    elif _get(F, "fragment_order") and _get(F, "head_dim") == C:
        if KEYS:
            return _key_fields(section, start, BITS, F)
        return _value_fields(section, start, BITS, F)
    t, c = start + tl.arange(0, 32)[:, None], tl.arange(0, C)[None, :]
    a, j = _place(t, c, KEYS, F)
    return _field(section, a, j, (c < _get(F, "head_dim")) & (t >= 0), BITS)


@triton.jit
def _levels(page, start, KEYS: tl.constexpr, F: tl.constexpr, C: tl.constexpr):
    """float32 levels [32, C] of a tile, without `mixed`'s third bits."""
    code = _fields(page + _at(F, "k_codes" if KEYS else "v_codes"), start, _get(F, "code_bits"), KEYS, F, C)
    NAME: tl.constexpr = _get(F, "name")
    if NAME == "e2m0":
        level = (1 + 3 * (code & 1)) * (1 - 2 * (code >> 1))
    elif NAME == "asym2":
        level = 2 * code - 3
    elif NAME == "fp4":
        level = level_of(code)
    else:
        level = 4 * code - 6
    if NAME == "asym3":
        level += 2 * _fields(page + _at(F, "k_thirds" if KEYS else "v_thirds"), start, 1, KEYS, F, C) - 1
    return level.to(tl.float32)


@triton.jit
def _third_levels(page, t, c, F: tl.constexpr):
    """`mixed`: +-1 in K's channels that have a third bit, 0 elsewhere."""
    COUNT: tl.constexpr = _get(F, "thirds")
    index = tl.full(c.shape, -1, tl.int32)
    for i in range(COUNT):
        index = tl.where(c == tl.load(page + _at(F, "meta") + 32 + i), i, index)
    PER: tl.constexpr = COUNT // 4
    lane = (t & 7) * 4 + index // PER
    if _get(F, "fragment_order"):
        slot = (t >> 3) * (COUNT // 16) + (index % PER >> 2)
        bit = (lane * (COUNT // 8) + (slot >> 3)) * 32 + 8 * (index & 3) + (slot & 7)
    else:
        bit = lane * (_get(F, "page") // 8 * PER) + (t >> 3) * PER + index % PER
    byte = tl.load(page + _at(F, "k_thirds") + bit // 8, mask=(index >= 0) & (t >= 0), other=0).to(tl.int32)
    return tl.where(index >= 0, 2 * ((byte >> (bit % 8)) & 1) - 1, 0).to(tl.float32)


@triton.jit
def _halves(section, index, inside):
    """float16 numbers of a section as float32."""
    return tl.load(section.to(tl.pointer_type(tl.float16)) + index, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _e4m3(section, index, inside):
    """Scales, which are not negative, as float32; spelled out, because older GPUs have no such type."""
    byte = tl.load(section + index, mask=inside, other=0).to(tl.int32)
    exponent, low = byte >> 3, byte & 7
    return tl.where(exponent == 0, low, 8 + low).to(tl.float32) * tl.exp2((tl.maximum(exponent, 1) - 10).to(tl.float32))


@triton.jit
def _stored(t, F: tl.constexpr):
    """Where a per-token vector keeps token t."""
    if not _get(F, "fragment_order"):
        return t
    return t & 1 | ((t >> 3) & 1) << 1 | ((t >> 4) & 1) << 2 | ((t >> 5) & 1) << 3 | ((t >> 1) & 3) << 4 | (t >> 6) << 6


@triton.jit
def _meta(page, word, F: tl.constexpr, TYPE: tl.constexpr):
    return tl.load((page + _at(F, "meta")).to(tl.pointer_type(TYPE)) + word)


@triton.jit
def key_tile(page, start, F: tl.constexpr, C: tl.constexpr):
    """Keys of a page (uint8 pointer to its blob), tokens [start, start + 32), start a multiple of 32: float32 [32, C], C >= D a
    power of two; zeros beyond D."""
    D: tl.constexpr = _get(F, "head_dim")
    t, c = start + tl.arange(0, 32)[:, None], tl.arange(0, C)[None, :]
    level = _levels(page, start, True, F, C)
    if _get(F, "thirds") > 0:
        level += _third_levels(page, t, c, F)
    if _get(F, "name") == "fp4":
        scale = _e4m3(page + _at(F, "k_scale"), start // 32 * D + c, c < D)
    else:
        scale = _halves(page + _at(F, "k_scale"), c, c < D)
    key = level * (scale * _meta(page, 1, F, tl.float32)) + _halves(page + _at(F, "k_zero"), c, c < D)
    for n in tl.static_range(_get(F, "outliers")):
        own = _halves(page + _at(F, "outliers"), n * _get(F, "page") + _stored(t, F), t >= 0)
        key = tl.where(c == _meta(page, 2 + n, F, tl.int32), own, key)
    return key


@triton.jit
def value_tile(page, start, F: tl.constexpr, C: tl.constexpr):
    """Values: as `key_tile`."""
    T: tl.constexpr = _get(F, "page")
    t, c = start + tl.arange(0, 32)[:, None], tl.arange(0, C)[None, :]
    if _get(F, "name") == "fp4":
        group = tl.arange(0, C // 32)[None, :]
        scale = _e4m3(page + _at(F, "v_scale"), group * T + _stored(t, F), (group * 32 < _get(F, "head_dim")) & (t >= 0))
        scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (32, C // 32, 32)), (32, C))
    else:
        scale = _halves(page + _at(F, "v_scale"), _stored(t, F), t >= 0)
    zero = _halves(page + _at(F, "v_zero"), _stored(t, F), t >= 0)
    value = _levels(page, start, False, F, C) * (scale * _meta(page, 0, F, tl.float32)) + zero
    return tl.where(c < _get(F, "head_dim"), value, 0.0)


@triton.jit
def _open(blobs, k, v, F: tl.constexpr, C: tl.constexpr):
    """Program (page, tile)."""
    D: tl.constexpr = _get(F, "head_dim")
    number, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * 32
    page = blobs + number * _get(F, "blob_bytes")
    c = tl.arange(0, C)[None, :]
    at = (number * _get(F, "page") + start + tl.arange(0, 32)[:, None]) * D + c
    tl.store(k + at, key_tile(page, start, F, C).to(k.dtype.element_ty), mask=c < D)
    tl.store(v + at, value_tile(page, start, F, C).to(v.dtype.element_ty), mask=c < D)


def columns(format: KvFormat) -> int:
    """C of a tile."""
    return max(32, 1 << (format.head_dim - 1).bit_length())


def open_pages(blobs: Tensor, format: KvFormat, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """`ref.open_pages` in one pass: blobs uint8 [n, blob_bytes] -> K and V [n, T, D], computed in float32."""
    if blobs.dtype != torch.uint8 or blobs.dim() != 2 or blobs.shape[1] != format.blob_bytes or not blobs.is_contiguous():
        raise ValueError(f"blobs must be contiguous uint8 [n, {format.blob_bytes}], not {blobs.dtype} {tuple(blobs.shape)}")
    k, v = (torch.empty((len(blobs), format.page, format.head_dim), dtype=dtype, device=blobs.device) for _ in range(2))
    if len(blobs):
        _open[(len(blobs), format.page // TOKENS)](blobs, k, v, format, columns(format))
    return k, v
