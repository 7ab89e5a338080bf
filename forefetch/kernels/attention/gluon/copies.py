"""What is read of a page and when: shared memory that copies fill ahead of use, and the few numbers that registers hold."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from forefetch.kernels.attention.gluon.decode import listed_to_k8
from forefetch.kernels.attention.gluon.half import load_tile
from forefetch.kernels.attention.gluon.layouts import (
    CHUNK,
    COPY_HALVES,
    COPY_TOKENS,
    COPY_WORDS,
    FLAT,
    LISTED,
    by_column,
    rows_by,
    tokens_k,
)


@gluon.constexpr_function
def get(format, name):
    """A parameter of the format."""
    return getattr(format, name)


@gluon.constexpr_function
def place(format, section):
    """Byte offset of a section of a blob."""
    return format.sections[section].offset


@gluon.constexpr_function
def words_of(format, section):
    """32-bit words of a section, 0 if the format has none."""
    return format.sections[section].size // 4 if section in format.sections else 0


@gluon.constexpr_function
def width(format, group):
    """As how many columns of the tensor products heads come; 0: they are rows."""
    if format.name == "fp4":
        return 8
    return 4 if group <= 4 else 0


@gluon.jit
def buffers(F: gl.constexpr, W: gl.constexpr):
    """Shared memory of one page, K's and V's: see the two functions."""
    if get(F, "name") == "fp4":
        return _ring_buffers(F)
    else:
        return _page_buffers(F, W)


@gluon.jit
def _page_buffers(F: gl.constexpr, W: gl.constexpr):
    """(K codes, scale and zero, outliers, third bits), (V codes; scale, with columns and zero; zero, and ones; third bits)."""
    k_codes, v_codes = gl.allocate_shared_memory(gl.int32, [1024], FLAT), gl.allocate_shared_memory(gl.int32, [1024], FLAT)
    k_rest = gl.allocate_shared_memory(gl.float16, [256], FLAT)
    if W == 0:
        v_scale = gl.allocate_shared_memory(gl.float16, [128], FLAT)
        v_zero = gl.allocate_shared_memory(gl.float16, [256], FLAT)
        v_zero.slice(128, 128).store(gl.full([128], 1.0, gl.float16, COPY_TOKENS))
    else:
        v_scale = gl.allocate_shared_memory(gl.float16, [256], FLAT)
        v_zero = v_scale.slice(128, 128)
    outliers = gl.allocate_shared_memory(gl.float16, [max(1, get(F, "outliers")) * 128], FLAT)
    k_thirds, v_thirds = k_codes, v_codes  # not looked at
    if words_of(F, "k_thirds") > 0:
        k_thirds = gl.allocate_shared_memory(gl.int32, [words_of(F, "k_thirds")], FLAT)
    if words_of(F, "v_thirds") > 0:
        v_thirds = gl.allocate_shared_memory(gl.int32, [words_of(F, "v_thirds")], FLAT)
    return (k_codes, k_rest, outliers, k_thirds), (v_codes, v_scale, v_zero, v_thirds)


@gluon.jit
def _ring_buffers(F: gl.constexpr):
    """`fp4`: (ring of codes, K's scales, zeros, outliers), (the ring, V's scales, zeros). The ring holds three of a page's four
    quarters of 4 KB, first and second half of K's codes and of V's: with all four, two warps less would fit on an SM."""
    ring = gl.allocate_shared_memory(gl.int32, [3, 1024], FLAT)
    k_scales, v_scales = gl.allocate_shared_memory(gl.int32, [128], FLAT), gl.allocate_shared_memory(gl.int32, [128], FLAT)
    k_zero, v_zero = gl.allocate_shared_memory(gl.float16, [128], FLAT), gl.allocate_shared_memory(gl.float16, [128], FLAT)
    outliers = gl.allocate_shared_memory(gl.float16, [max(1, get(F, "outliers")) * 128], FLAT)
    return (ring, k_scales, k_zero, outliers), (ring, v_scales, v_zero)


@gluon.jit
def _copy(buffer, source, wanted, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    async_copy.async_copy_global_to_shared(buffer, source + gl.arange(0, COUNT, LAYOUT), mask=wanted)


@gluon.jit
def load_quarter(buffer, head, page, wanted, which: gl.constexpr, F: gl.constexpr):
    """`fp4`: starts copying a half of K's codes (`which` 0, 1) or of V's (2, 3)."""
    words = head[0] + page.to(gl.int64) * (get(F, "blob_bytes") // 4)
    _copy(buffer, words + which * 1024, wanted, 1024, COPY_WORDS)


@gluon.jit
def load_keys(head, page, wanted, buffers, slot, F: gl.constexpr):
    """Starts copying what scores need of a page; `fp4`: K's first half of codes, into a slot of the ring."""
    words, halves = (
        head[0] + page.to(gl.int64) * (get(F, "blob_bytes") // 4),
        head[1] + page.to(gl.int64) * (get(F, "blob_bytes") // 2),
    )
    OWN: gl.constexpr = get(F, "outliers") * 128
    if get(F, "name") == "fp4":
        load_quarter(buffers[0].index(slot), head, page, wanted, 0, F)
        _copy(buffers[1], words + place(F, "k_scale") // 4, wanted, 128, COPY_WORDS)
        _copy(buffers[2], halves + place(F, "k_zero") // 2, wanted, 128, COPY_HALVES)
        if OWN > 0:
            _copy(buffers[3], halves + place(F, "outliers") // 2, wanted, OWN, COPY_TOKENS)
    else:
        _copy(buffers[0], words, wanted, words_of(F, "k_codes"), COPY_WORDS)
        _copy(buffers[1], halves + place(F, "k_scale") // 2, wanted, 256, COPY_HALVES)
        if OWN > 0:
            _copy(buffers[2], halves + place(F, "outliers") // 2, wanted, OWN, COPY_TOKENS)
        if words_of(F, "k_thirds") > 0:
            _copy(buffers[3], words + place(F, "k_thirds") // 4, wanted, words_of(F, "k_thirds"), COPY_WORDS)


@gluon.jit
def load_values(head, page, wanted, buffers, slot, F: gl.constexpr, W: gl.constexpr):
    """Starts copying the rest of it; `fp4`: V's first half of codes."""
    words, halves = (
        head[0] + page.to(gl.int64) * (get(F, "blob_bytes") // 4),
        head[1] + page.to(gl.int64) * (get(F, "blob_bytes") // 2),
    )
    if get(F, "name") == "fp4":
        load_quarter(buffers[0].index(slot), head, page, wanted, 2, F)
        _copy(buffers[1], words + place(F, "v_scale") // 4, wanted, 128, COPY_WORDS)
        _copy(buffers[2], halves + place(F, "v_zero") // 2, wanted, 128, COPY_HALVES)
    else:
        _copy(buffers[0], words + place(F, "v_codes") // 4, wanted, words_of(F, "v_codes"), COPY_WORDS)
        if W == 0:
            _copy(buffers[1], halves + place(F, "v_scale") // 2, wanted, 128, COPY_HALVES)
            _copy(buffers[2].slice(0, 128), halves + place(F, "v_zero") // 2, wanted, 128, COPY_HALVES)
        else:
            _copy(buffers[1], halves + place(F, "v_scale") // 2, wanted, 256, COPY_HALVES)
        if words_of(F, "v_thirds") > 0:
            _copy(buffers[3], words + place(F, "v_thirds") // 4, wanted, words_of(F, "v_thirds"), COPY_WORDS)


@gluon.jit
def codes_at(buffers, slot, F: gl.constexpr):
    """Where codes lie; in a slot of the ring if there is one."""
    if get(F, "name") == "fp4":
        return buffers[0].index(slot)
    else:
        return buffers[0]


@gluon.jit
def fetch_keys(tokens, spans, start, stop, head, page, have, buffers, F: gl.constexpr):
    """What the K buffers hold next: the tile at `start` if that is before `stop`, else the first page, else nothing if there is
    none (`have` 0). One group of copies in any case.

    Branches and not masks alone: a masked copy writes zeros, and two copies to one place have no order.
    """
    if start < stop:
        load_tile(tokens, spans, start, codes_at(buffers, 0, F))
    elif have > 0:
        load_keys(head, page, have > 0, buffers, 0, F)
        if get(F, "name") == "fp4":
            load_quarter(buffers[0].index(1), head, page, have > 0, 1, F)
    async_copy.commit_group()


@gluon.jit
def fetch_values(tokens, spans, start, stop, head, page, have, buffers, F: gl.constexpr, W: gl.constexpr):
    """The same of the V buffers."""
    if start < stop:
        load_tile(tokens, spans, start, codes_at(buffers, 2, F))
    elif have > 0:
        load_values(head, page, have > 0, buffers, 2, F, W)
    async_copy.commit_group()


@gluon.jit
def load_meta(head, page, F: gl.constexpr):
    """(V's factor, K's factor as float32; N outlier channels; channels with a third bit [32]). Of a page that is not there:
    anything, but channels inside the row."""
    meta = head[0] + page.to(gl.int64) * (get(F, "blob_bytes") // 4) + place(F, "meta") // 4
    channels = ()
    for n in gl.static_range(get(F, "outliers")):
        channels = channels + (gl.load(meta + 2 + n) & 127,)
    listed = gl.full([32], 0, gl.int32, LISTED)
    if get(F, "thirds") > 0:
        raw = head[2] + page.to(gl.int64) * get(F, "blob_bytes") + (place(F, "meta") + 32)
        listed = gl.load(raw + gl.arange(0, 32, LISTED)).to(gl.int32) & 127
    factor = 1.0
    if get(F, "name") == "fp4":
        factor = gl.load(meta + 1).to(gl.float32, bitcast=True)
    return gl.load(meta).to(gl.float32, bitcast=True), factor, channels, listed


@gluon.jit
def heads(G: gl.constexpr, W: gl.constexpr, LAYOUT: gl.constexpr):
    """The query head of each of the 8 rows of Q: they repeat. Where they will be 4 columns (W), two rows each."""
    row = gl.arange(0, 8, LAYOUT)
    if W == 4:
        row = row // 2
    return row % G


@gluon.jit
def pick(q_at, q_head, meta, scale, G: gl.constexpr, W: gl.constexpr, N: gl.constexpr):
    """Scaled q[channel] of each head, for N outlier channels: [8] by row, or [W] by column."""
    if W == 0:
        head = heads(G, W, gl.SliceLayout(1, rows_by(CHUNK)))
    else:
        head = gl.arange(0, W, gl.SliceLayout(0, by_column(CHUNK, W))) % G
    picked = ()
    for n in gl.static_range(N):
        picked = picked + (gl.load(q_at + head * q_head + meta[2][n]).to(gl.float32) * scale,)
    return picked


@gluon.jit
def pick_thirds(q_at, q_head, head, page, meta, unit, G: gl.constexpr, W: gl.constexpr, F: gl.constexpr):
    """`mixed`: queries of the channels with a third bit, times K's scale there: float16 [8, 32] in the order k.

    `unit` [8]: what queries were multiplied by (`load_query`)."""
    KS: gl.constexpr = tokens_k(CHUNK)
    channel = gl.convert_layout(listed_to_k8(meta[3]), gl.SliceLayout(0, KS), assert_trivial=True)
    row = heads(G, W, gl.SliceLayout(1, KS))
    q = gl.load(q_at + row[:, None] * q_head + channel[None, :]).to(gl.float32)
    scales = head[1] + page.to(gl.int64) * (get(F, "blob_bytes") // 2) + place(F, "k_scale") // 2
    unit = gl.convert_layout(unit, gl.SliceLayout(1, KS), assert_trivial=True)
    return (q * unit[:, None]).to(gl.float16) * gl.load(scales + channel)[None, :]
