"""`layouts.py` for four warps that share a page (`wide.py`): rows of products are spread over warps, 16 each and then 16 more.

Names: BY [128 tokens or channels, 8 heads] as accumulators hold them, the high and the low part of a head in one lane. Words of
a page lie in tiles of 16 rows; warp w has tiles w and w + 4, so a decoded word is an operand register of `wgmma`.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl

_Linear = gl.DistributedLinearLayout
_Wgmma = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 32])
_Mma = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])
_COLUMNS, _ROWS, _WARPS = [[0, 2], [0, 4]], [[1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]

ACC = gl.constexpr(_Wgmma)  # [128, 16]: 8 heads' high parts, then their low parts
A8 = gl.constexpr(gl.DotOperandLayout(0, _Wgmma, 4))
OPERAND = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2))  # B [16, 128], k innermost
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
BY = gl.constexpr(_Linear([[0, 1], [8, 0], [64, 0]], [*_COLUMNS, *_ROWS], _WARPS, [], [128, 8]))
# Stored words and their 16 codes; a lane reads 16 bytes of each of its warp's tiles.
WORDS = gl.constexpr(
    _Linear(
        [[0, 1], [0, 2], [0, 4], [0, 8], [1, 0], [2, 0], [512, 0]],
        [[4, 0], [8, 0], [16, 0], [32, 0], [64, 0]], [[128, 0], [256, 0]], [], [1024, 16],
    )
)  # fmt: skip
# Q by channel: a lane owns 8 channels of a head, a warp two heads; and the same by k of an 8-bit operand.
QUERY = gl.constexpr(
    _Linear([[0, 1], [0, 2], [0, 4]], [[0, 8], [0, 16], [0, 32], [0, 64], [1, 0]], [[2, 0], [4, 0]], [], [8, 128])
)
QUERY_K = gl.constexpr(
    _Linear([[0, 1], [0, 2], [0, 16]], [[0, 32], [0, 64], [0, 4], [0, 8], [1, 0]], [[2, 0], [4, 0]], [], [8, 128])
)
# Places of a page's vector over tokens as stored, for the rows of BY.
PLACES = gl.constexpr(_Linear([[2], [64]], [[0], [0], [1], [16], [32]], [[4], [8]], [], [128]))
# The maxima of four warps [4, 8], in every warp.
MAXIMA = gl.constexpr(
    _Linear([[0, 1], [1, 0], [2, 0]], [*_COLUMNS, [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0]], [], [4, 8])
)
# What a lane adds up of its rows: [4 warps, 8 rows, 8 heads].
TOTAL = gl.constexpr(
    _Linear([[0, 0, 1]], [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]], [[1, 0, 0], [2, 0, 0]], [], [4, 8, 8])
)

# Float16 tokens: tiles of 64, by `mma`.
MMA = gl.constexpr(_Mma)
A16 = gl.constexpr(gl.DotOperandLayout(0, _Mma, 2))
B16 = gl.constexpr(gl.DotOperandLayout(1, _Mma, 2))
BY_TILE = gl.constexpr(_Linear([[0, 1], [8, 0]], [*_COLUMNS, *_ROWS], _WARPS, [], [64, 8]))

COPY_HALVES = gl.constexpr(gl.BlockedLayout([8], [32], [4], [0]))
COPY_TILE = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
# A number for each lane, and then for each of its words: [8 tiles, 32 lanes, 4].
LANES = gl.constexpr(
    _Linear(
        [[0, 0, 1], [0, 0, 2], [4, 0, 0]],
        [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0], [0, 16, 0]], [[1, 0, 0], [2, 0, 0]], [], [8, 32, 4],
    )
)  # fmt: skip
