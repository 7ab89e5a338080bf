"""Which thread holds which element, spelled out, so that nothing has to pass between threads once it is in registers.

One warp works on a tile of 8 query heads. Everything is arranged around `mma.sync` with 8-bit elements (m16n8k32): rows of A
and of the accumulator are the 8 heads twice, rows of B are what is summed over. A lane's number has five bits: the upper three
are an accumulator's row (or a column of B), the lower two sit inside the summed index.

A page's codes lie in the order of B (`kv_codec/orders.py`), so a decoded word *is* an operand register. Its summed index k is
not the natural one: k0..k6 are channel bits 1 2 5 6 0 3 4 for keys and token bits 0 3 1 2 4 5 6 for values. Reordering Q and P
alike costs nothing, because it renames registers: `convert_layout(..., assert_trivial=True)` says so, and compiling checks it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_ROWS = [[1, 0], [2, 0], [4, 0]]
_Linear = gl.DistributedLinearLayout
_Mma = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])

CHUNK = gl.constexpr(32)  # tokens or channels that are worked on at a time
MMA = gl.constexpr(_Mma)  # accumulators [16, n]
A8 = gl.constexpr(gl.DotOperandLayout(0, _Mma, 4))  # int8 [16, k]
B8 = gl.constexpr(gl.DotOperandLayout(1, _Mma, 4))  # int8 [k, n]
A16 = gl.constexpr(gl.DotOperandLayout(0, _Mma, 2))  # float16 [16, k]
B16 = gl.constexpr(gl.DotOperandLayout(1, _Mma, 2))  # float16 [k, n]

# Q [8, 128] by channel: a lane owns 32 channels of a head.
QUERY = gl.constexpr(_Linear([[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]], [[0, 32], [0, 64], *_ROWS], [], [], [8, 128]))
# Rows as pairs of equal ones: QUERY, and `rows_by(128)`.
_TWICE = [[0, 1, 0], [1, 0, 0], [2, 0, 0]]
TWICE_QUERY = gl.constexpr(
    _Linear([[0, 0, 1 << bit] for bit in range(5)], [[0, 0, 32], [0, 0, 64], *_TWICE], [], [], [4, 2, 128])
)
TWICE_ROWS = gl.constexpr(
    _Linear([[0, 0, 1 << bit] for bit in (0, 3, 4, 5, 6)], [[0, 0, 2], [0, 0, 4], *_TWICE], [], [], [4, 2, 128])
)
# The same in the order k of an 8-bit operand.
QUERY_K = gl.constexpr(_Linear([[0, 1], [0, 2], [0, 16], [0, 32], [0, 64]], [[0, 4], [0, 8], *_ROWS], [], [], [8, 128]))
# Columns of an accumulator two by two, [8, 4].
PAIRS = gl.constexpr(_Linear([], [[0, 1], [0, 2], *_ROWS], [], [], [8, 4]))
# A vector over channels on its way to an operand B [64, 8] whose even columns have the channels with bit 4 clear, odd ones the
# others (`codes.fold_channels`): k, what columns share, that bit.
FOLDED = gl.constexpr(_Linear([[1], [2], [4], [8]], [[32], [64], [16], [0], [0]], [], [], [128]))
FOLDED_B = gl.constexpr(
    _Linear([[1, 0, 0], [8, 0, 0], [16, 0, 0], [32, 0, 0]],
            [[2, 0, 0], [4, 0, 0], [0, 0, 1], [0, 1, 0], [0, 2, 0]], [], [], [64, 4, 2])
)  # fmt: skip
# V's zero, and ones behind it, over tokens as stored; as two operands B [32, 8]: k, what columns share, (one?, token bit 5).
SUMMED = gl.constexpr(_Linear([[1], [2], [4], [64]], [[16], [32], [8], [128], [0]], [], [], [256]))
SUMMED_B = gl.constexpr(
    _Linear([[1, 0, 0], [8, 0, 0], [16, 0, 0]],
            [[2, 0, 0], [4, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0]], [], [], [32, 2, 4])
)  # fmt: skip
# A vector over channels that meets QUERY as a float16 operand B with equal columns.
CHANNELS = gl.constexpr(_Linear([[1], [2], [4], [8], [16]], [[32], [64], [0], [0], [0]], [], [], [128]))
# Weights of 32 tokens and 4 heads on their way to be an operand: bit 4 of the token, bits 2-0, head, part, bit 3.
TURNING = gl.constexpr(
    _Linear(
        [[0, 0, 0, 0, 1], [0, 0, 0, 1, 0], [1, 0, 0, 0, 0]],
        [[0, 0, 1, 0, 0], [0, 0, 2, 0, 0], [0, 1, 0, 0, 0], [0, 2, 0, 0, 0], [0, 4, 0, 0, 0]], [], [], [2, 8, 4, 2, 2],
    )
)  # fmt: skip
# A page's vector over tokens as stored: a lane reads two runs of 32 bytes.
TOKENS = gl.constexpr(_Linear([[1], [2], [4], [8], [64]], [[16], [32], [0], [0], [0]], [], [], [128]))

# cp.async: 16 bytes a lane.
COPY_WORDS = gl.constexpr(gl.BlockedLayout([4], [32], [1], [0]))
COPY_HALVES = gl.constexpr(gl.BlockedLayout([8], [32], [1], [0]))
COPY_TOKENS = gl.constexpr(gl.BlockedLayout([4], [32], [1], [0]))
COPY_TILE = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0]))
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))  # [32], an element each
PER_ROW = gl.constexpr(gl.BlockedLayout([2], [32], [1], [0]))  # [64], two neighbours each
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
SWIZZLED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))


@gluon.constexpr_function
def _bits(first, size):
    """Columns of a register each, from bit `first` on."""
    return [[0, 1 << bit] for bit in range(first, size.bit_length() - 1)]


@gluon.constexpr_function
def rows_by(columns):
    """[8, columns] as the accumulator of one `mma` column block after the next holds it (upper 8 rows split off)."""
    return _Linear([[0, 1], *_bits(3, columns)], [[0, 2], [0, 4], *_ROWS], [], [], [8, columns])


@gluon.constexpr_function
def by_column(rows, width):
    """[rows, width] over tokens or channels and heads, as accumulators hold it whose 8 columns are `width` = 8 heads, or the
    high and the low parts of 4."""
    columns = [[0, 2], [0, 4]] if width == 8 else [[0, 1], [0, 2]]
    tiles = [[1 << bit, 0] for bit in range(3, rows.bit_length() - 1)]
    return _Linear([*([[0, 1]] if width == 8 else []), *tiles], [*columns, [1, 0], [2, 0], [4, 0]], [], [], [rows, width])


@gluon.constexpr_function
def token_words(count):
    """[count, 2]: words of a page's vector over tokens as stored and the lower or upper half, which is the token's bit 0. A
    lane reads every word that has one of its tokens, the rows of `by_column`."""
    return _Linear(
        [[1 << bit, 0] for bit in (0, 1, 2, *range(5, count.bit_length() - 1))],
        [[0, 0], [0, 0], [0, 1], [8, 0], [16, 0]], [], [], [count, 2],
    )  # fmt: skip


@gluon.constexpr_function
def tokens_k(columns):
    """[8, columns] over tokens in the order k of an 8-bit operand."""
    return _Linear([[0, 1], [0, 2], *_bits(4, columns)], [[0, 4], [0, 8], *_ROWS], [], [], [8, columns])


@gluon.constexpr_function
def channels_k16():
    """[8, 128] over channels in the order k of float16 operands that meet `fp4`."""
    return _Linear([[0, 1], [0, 8], [0, 16], [0, 32], [0, 64]], [[0, 2], [0, 4], *_ROWS], [], [], [8, 128])


@gluon.constexpr_function
def halves_by(count):
    """[count, 8]: stored words and their 8 codes of 4 bits; a lane reads 16 bytes."""
    chunk = [[1 << bit, 0] for bit in range(7, count.bit_length() - 1)]
    lanes = [[4, 0], [8, 0], [16, 0], [32, 0], [64, 0]]
    return _Linear([[0, 1], [0, 2], [0, 4], [1, 0], [2, 0], *chunk], lanes, [], [], [count, 8])


@gluon.constexpr_function
def thirds_by(count):
    """[count]: words of third bits, each for two words of codes that lie as `words_by` has them."""
    chunk = [[1 << bit] for bit in range(6, count.bit_length() - 1)]
    return _Linear([[1], *chunk], [[2], [4], [8], [16], [32]], [], [], [count])


# `mixed`: the 128 words of third bits, a lane's four in its registers; and one word's 32 bits.
THIRDS = gl.constexpr(_Linear([[1], [2]], [[4], [8], [16], [32], [64]], [], [], [128]))
BITS = gl.constexpr(
    _Linear([[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]], [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]], [], [], [32, 32])
)
# The list of the 32 channels that have one: a lane reads the 8 bytes that its part of operand A stands for.
LISTED = gl.constexpr(_Linear([[1], [2], [4]], [[8], [16], [0], [0], [0]], [], [], [32]))
# E4M3 scales of 128 channels, and of 128 tokens as stored.
CHANNEL_BYTES = gl.constexpr(_Linear([[1], [2], [4], [8], [16]], [[32], [64], [0], [0], [0]], [], [], [128]))
TOKEN_BYTES = TOKENS


@gluon.constexpr_function
def words_by(count):
    """[count, 16]: stored words and their 16 codes; a lane reads 16 bytes."""
    chunk = [[1 << bit, 0] for bit in range(7, count.bit_length() - 1)]
    lanes = [[4, 0], [8, 0], [16, 0], [32, 0], [64, 0]]
    return _Linear([[0, 1], [0, 2], [0, 4], [0, 8], [1, 0], [2, 0], *chunk], lanes, [], [], [count, 16])
