"""How the weights of one expert lie in memory: a blob of bytes, the same on disk, in host memory and in a device's slot.

A blob holds w13 (gate rows, then up rows) and w2: codes of w13 | codes of w2 | scales of w13 | scales of w2, zeros up to a
multiple of ALIGNMENT. Codes are symmetric: weight = scale * q, with a float16 scale per row and `group` inputs (or the largest
divisor of `group` that divides the inputs). int8 has q in -127..127, int4 in -8..7. The float formats have no scales.

Orders:
- "natural" runs along rows, inputs outside: w13 is [H, 2I], w2 is [I, H], as CPU slots hold them (benchmarks/LOG.md). int4 puts
  input i of a group's first half into the low nibble and input i + group/2 into the high one, both as two's complement, so that
  unpacking is elementwise and writes straight on. Scales are [inputs / group, rows].
- "fragment" is the order in which a warp's tensor-core operands come (`fragments.py`), for sizes that are multiples of 128.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from forefetch.kernels.grouped_mlp import fragments

Kind = Literal["bfloat16", "float16", "float32", "int8", "int4"]
Order = Literal["natural", "fragment"]

ALIGNMENT = 2048  # bytes; a multiple of every wide load, and of what the int4 kernel counts addresses in
_FLOATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_BITS = {"bfloat16": 16, "float16": 16, "float32": 32, "int8": 8, "int4": 4}
_LARGEST = {"int8": 127, "int4": 7}


@dataclass(frozen=True, slots=True)
class ExpertFormat:
    """What a blob's bytes mean. `group` counts the inputs that share a scale (128 or 64; of no effect for floats)."""

    kind: Kind
    group: int = 128
    order: Order = "natural"

    def __post_init__(self) -> None:
        """ValueError for a format that does not exist."""
        if self.kind not in get_args(Kind) or self.order not in get_args(Order) or self.group not in {64, 128}:
            raise ValueError(f"no expert format {self}")
        if self.order == "fragment" and not self.quantised:
            raise ValueError(f"{self.kind} experts have no {self.order} order")

    @property
    def bits(self) -> int:
        """Bits of a weight's code."""
        return _BITS[self.kind]

    @property
    def quantised(self) -> bool:
        """Whether weights are codes with scales, and so approximate."""
        return self.kind in _LARGEST

    def group_of(self, inputs: int) -> int:
        """Inputs that share a scale in a matrix of that many inputs."""
        return math.gcd(self.group, inputs)


def blob_bytes(hidden: int, width: int, format: ExpertFormat) -> int:
    """Bytes of one expert of hidden size H and width I. ValueError for sizes that the format cannot hold."""
    return -(-sum(_parts(hidden, width, format)) // ALIGNMENT) * ALIGNMENT


def pack(w13: Tensor, w2: Tensor, format: ExpertFormat) -> Tensor:
    """w13 [2I, H], w2 [H, I] of any float type -> uint8 [blob_bytes] on their device, rounded to nearest.

    ValueError for shapes that do not fit, and when a group's scale is no finite float16.
    """
    hidden, width = w2.shape
    if w13.shape != (2 * width, hidden):
        raise ValueError(f"w13 {tuple(w13.shape)} does not fit w2 {tuple(w2.shape)}")
    blob = torch.zeros(blob_bytes(hidden, width, format), dtype=torch.uint8, device=w2.device)
    parts = _split(blob, hidden, width, format)
    if not format.quantised:
        for part, matrix in zip(parts, (w13, w2), strict=False):
            part.view(_FLOATS[format.kind]).view(matrix.t().shape).copy_(matrix.t())
        return blob
    for index, matrix in enumerate((w13, w2)):
        codes, scales = quantise(matrix, format)
        packed = (
            _pack_fragment(codes, scales, format, index) if format.order == "fragment" else _pack_natural(codes, scales, format)
        )
        for part, values in zip(parts[index::2], packed, strict=True):
            part.copy_(values.view(torch.uint8).view(-1))
    return blob


def unpack(
    blob: Tensor, hidden: int, width: int, format: ExpertFormat, dtype: torch.dtype, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """uint8 [>= blob_bytes] -> w13 [2I, H] and w2 [H, I] of `dtype`, or into `out` (of any strides and float type).

    What it makes itself is laid out along rows (strides (1, rows)), as slots are; natural order into such memory is the fast
    case. A float format read as its own type without `out` is a view of the blob. ValueError for a blob too short.
    """
    parts = _split(blob, hidden, width, format)
    shapes = (2 * width, hidden), (hidden, width)
    if not format.quantised:
        stored = [part.view(_FLOATS[format.kind]).view(shape[::-1]).t() for part, shape in zip(parts, shapes, strict=False)]
        results = (
            [matrix.to(dtype) for matrix in stored] if out is None else [to.copy_(s) for to, s in zip(out, stored, strict=True)]
        )
        return results[0], results[1]
    matrices = out or (_turned(shapes[0], dtype, blob.device), _turned(shapes[1], dtype, blob.device))
    for index, matrix in enumerate(matrices):
        codes, scales = parts[index], parts[index + 2].view(torch.float16)
        if format.order == "fragment":
            whole, scales = fragments.restore(codes, scales, matrix.shape, format.group, format.bits, paired=index == 0)
            _scale(whole.t().view(scales.shape[1], -1, len(whole)), scales.t(), matrix)
        else:
            _unpack_natural(codes, scales, format, matrix)
    return matrices[0], matrices[1]


def quantise(matrix: Tensor, format: ExpertFormat) -> tuple[Tensor, Tensor]:
    """[rows, inputs] -> codes int8 of that shape, scales float16 [rows, inputs / group]. ValueError: a scale is not finite."""
    group, largest = format.group_of(matrix.shape[1]), _LARGEST[format.kind]
    grouped = matrix.float().reshape(len(matrix), -1, group)
    scales = (grouped.abs().amax(2) / largest).half()
    if not scales.isfinite().all():
        raise ValueError("an expert's weights are not finite or too large for float16 scales")
    steps = scales.float().clamp_min(torch.finfo(torch.float32).tiny)  # a scale of zero gives zero whatever the code
    codes = (grouped / steps[..., None]).round().clamp(-largest - (format.kind == "int4"), largest)
    return codes.to(torch.int8).flatten(1), scales


def _parts(hidden: int, width: int, format: ExpertFormat) -> list[int]:
    """Bytes of the blob's parts in their order."""
    if hidden < 1 or width < 1 or (format.order == "fragment" and (hidden % 128 or width % 128)):
        raise ValueError(f"{format.order} order cannot hold an expert of {hidden} x {width}")
    if format.quantised and (hidden % 2 or width % 2):
        raise ValueError(f"{format.kind} needs even sizes, not {hidden} x {width}")
    matrices = (2 * width, hidden), (hidden, width)
    codes = [rows * inputs * format.bits // 8 for rows, inputs in matrices]
    scales = [rows * inputs // format.group_of(inputs) * 2 for rows, inputs in matrices]
    return codes + scales if format.quantised else codes


def _split(blob: Tensor, hidden: int, width: int, format: ExpertFormat) -> list[Tensor]:
    sizes = _parts(hidden, width, format)
    if blob.dtype != torch.uint8 or blob.numel() < sum(sizes):
        raise ValueError(f"a blob of {blob.numel()} x {blob.dtype} is no {format} expert of {hidden} x {width}")
    return list(blob[: sum(sizes)].split_with_sizes(sizes))


def _turned(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape[::-1], dtype=dtype, device=device).t()


def _pack_natural(codes: Tensor, scales: Tensor, format: ExpertFormat) -> tuple[Tensor, Tensor]:
    along = codes.t().contiguous()  # [inputs, rows]
    if format.kind == "int4":
        low, high = along.view(scales.shape[1], 2, -1, len(codes)).unbind(1)
        along = (low & 15) | (high << 4)
    return along, scales.t().contiguous()


def _unpack_natural(codes: Tensor, scales: Tensor, format: ExpertFormat, matrix: Tensor) -> None:
    rows, inputs = matrix.shape
    group = format.group_of(inputs)
    packed = codes.view(torch.int8).view(inputs // group, -1, rows)
    if format.kind == "int4":
        whole = torch.empty(inputs // group, 2, group // 2, rows, dtype=torch.int8, device=codes.device)
        torch.bitwise_left_shift(packed, 4, out=whole[:, 0])
        whole[:, 0] >>= 4
        torch.bitwise_right_shift(packed, 4, out=whole[:, 1])
        packed = whole.view(inputs // group, group, rows)
    _scale(packed, scales.view(-1, rows), matrix)


def _scale(codes: Tensor, scales: Tensor, matrix: Tensor) -> None:
    """codes [groups, group, rows] int8 * scales [groups, rows] -> matrix [rows, inputs]. In float32: one rounding."""
    exact = matrix.dtype if matrix.dtype == torch.float64 else torch.float32
    torch.mul(codes, scales.to(exact)[:, None], out=matrix.t().view(codes.shape))


def _pack_fragment(codes: Tensor, scales: Tensor, format: ExpertFormat, index: int) -> tuple[Tensor, Tensor]:
    return fragments.arrange(codes, scales, format.group, format.bits, paired=index == 0)
