"""The frame of `expert.proto`, encoded and decoded in place.

A frame is a 96-byte header and raw little-endian sections, each aligned to 32 bytes from the frame's start; the layout
stands beside `ForwardRequest` in the proto. Encoders write into a writable memoryview that the link owns. Decoders check
everything a peer could get wrong and raise BadRequest or Mismatch naming the header's field; rows alias the buffer, so a
frame in shared memory is computed from, and answered, where it lies.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from forefetch.errors import BadRequest, ForefetchError, LinkDown, Mismatch
from forefetch.v1 import expert_pb2

MAGIC = 0x31524646  # "FFR1"
REQUEST, REPLY, ERROR = 1, 2, 3
HEADER = struct.Struct("<IHHQIIIIQQQII25s7x")
HEADER_BYTES = HEADER.size
TRACE_BYTES = 25
HEADROOM = 32  # bytes before a frame that `seal` may use; keeps the frame's alignment
_UNTRACED = bytes(TRACE_BYTES)

# Values of DataType in tensor.proto, google.rpc.Code for errors.
DTYPES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
_DTYPE_OF = {code: dtype for dtype, code in DTYPES.items()}
_CODES = {"INVALID_ARGUMENT": 3, "RESOURCE_EXHAUSTED": 8, "FAILED_PRECONDITION": 9, "INTERNAL": 13, "UNAVAILABLE": 14}
_ERROR_BYTES = 1024  # longest message of an error frame; every link's buffer is at least ERROR_FRAME_BYTES
ERROR_FRAME_BYTES = HEADER_BYTES + _ERROR_BYTES


@dataclass(slots=True)
class LayerCall:
    """Token rows of one layer for one worker, and the (row, expert) pairs it has to evaluate."""

    step: int
    layer: int
    x: Tensor  # [N, H]
    pair_row: Tensor  # [P] int32, index into x
    pair_expert: Tensor  # [P] int32, the model's expert index; the worker must hold it
    pair_weight: Tensor  # [P] float32 gate weight
    trace: bytes = b""  # trace id 16, span id 8, flags 1; empty when the step is not sampled


@dataclass(slots=True)
class LayerReply:
    """Sum over each row's pairs of weight * expert(row). `rows` may alias the link's buffer until its next submit."""

    rows: Tensor  # [N, H], dtype of the call's x
    queue_ns: int  # waiting for other routers' calls
    copy_wait_ns: int  # waiting for experts that were not resident
    compute_ns: int
    round_trip_ns: int = 0  # submit to reply as the router saw it


@dataclass(frozen=True, slots=True)
class Shape:
    """What both ends of a link agreed on when it was opened."""

    hidden: int
    dtype: torch.dtype
    max_rows: int


def _aligned(offset: int) -> int:
    return (offset + 31) & ~31


def _offsets(rows: int, hidden: int, pairs: int, itemsize: int) -> tuple[int, int, int, int]:
    """Where pair rows, pair experts and pair weights begin, and where a request ends."""
    row = _aligned(HEADER_BYTES + rows * hidden * itemsize)
    expert = _aligned(row + 4 * pairs)
    weight = _aligned(expert + 4 * pairs)
    return row, expert, weight, weight + 4 * pairs


def request_bytes(rows: int, hidden: int, pairs: int, dtype: torch.dtype) -> int:
    """Bytes of a request frame."""
    return _offsets(rows, hidden, pairs, dtype.itemsize)[3]


def reply_bytes(rows: int, hidden: int, dtype: torch.dtype) -> int:
    """Bytes of a reply frame; never less than an error frame may need."""
    return max(HEADER_BYTES + rows * hidden * dtype.itemsize, ERROR_FRAME_BYTES)


def _view(buf: memoryview, dtype: torch.dtype, offset: int, *shape: int) -> Tensor:
    count = 1
    for extent in shape:
        count *= extent
    if count == 0:  # frombuffer refuses empty views
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buf, dtype=dtype, count=count, offset=offset).view(shape)


def encode_request(buf: memoryview, call: LayerCall) -> int:
    """Writes `call` into `buf` and returns the frame's bytes. Tensors may live on any device. BadRequest if it does not fit."""
    rows, hidden = call.x.shape
    pairs = call.pair_row.numel()
    at_row, at_expert, at_weight, end = _offsets(rows, hidden, pairs, call.x.dtype.itemsize)
    if end > len(buf):
        raise BadRequest("rows", f"a frame of {rows} rows and {pairs} pairs takes {end} bytes; the link holds {len(buf)}")
    trace = call.trace or _UNTRACED
    dtype = DTYPES[call.x.dtype]
    HEADER.pack_into(
        buf, 0, MAGIC, REQUEST, dtype, call.step, call.layer, rows, hidden, pairs, 0, 0, 0, 0, end - HEADER_BYTES, trace
    )
    _view(buf, call.x.dtype, HEADER_BYTES, rows, hidden).copy_(call.x)
    _view(buf, torch.int32, at_row, pairs).copy_(call.pair_row)
    _view(buf, torch.int32, at_expert, pairs).copy_(call.pair_expert)
    _view(buf, torch.float32, at_weight, pairs).copy_(call.pair_weight)
    return end


def decode_request(buf: memoryview, shape: Shape | None = None) -> LayerCall:
    """Reads a request frame. `x` aliases `buf`; the pairs are copied, so that what was checked cannot change afterwards.

    Mismatch when dtype or width differ from `shape`; BadRequest for anything malformed.
    """
    header = _header(buf)
    _, kind, code, step, layer, rows, hidden, pairs, *_, body, trace = header
    if kind != REQUEST:
        raise BadRequest("kind", f"expected {REQUEST} (request), got {kind}")
    dtype = _dtype(code)
    if shape is not None:
        _check_shape(shape, dtype, hidden, rows)
    at_row, at_expert, at_weight, end = _offsets(rows, hidden, pairs, dtype.itemsize)
    _check_body(buf, body, end)
    x = _view(buf, dtype, HEADER_BYTES, rows, hidden)
    pair_row = np.frombuffer(buf, np.int32, pairs, at_row).copy()
    pair_expert = np.frombuffer(buf, np.int32, pairs, at_expert).copy()
    weight = np.frombuffer(buf, np.float32, pairs, at_weight).copy()
    if pairs and int(pair_row.view(np.uint32).max()) >= rows:  # as unsigned, a negative index is too large as well
        raise BadRequest("pair_row", f"a row index is outside 0..{rows - 1}")
    if not np.isfinite(weight).all():
        raise BadRequest("pair_weight", "a gate weight is not finite")
    tensors = torch.from_numpy(pair_row), torch.from_numpy(pair_expert), torch.from_numpy(weight)
    return LayerCall(step, layer, x, *tensors, b"" if trace == _UNTRACED else trace)


def reply_rows(buf: memoryview, rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
    """Where `encode_reply` expects the rows [N, H] of a frame in `buf`: compute into it and nothing is copied."""
    need = HEADER_BYTES + rows * hidden * dtype.itemsize
    if need > len(buf):
        raise BadRequest("rows", f"a reply of {rows} rows takes {need} bytes; the link holds {len(buf)}")
    return _view(buf, dtype, HEADER_BYTES, rows, hidden)


def encode_reply(
    buf: memoryview, step: int, layer: int, rows: Tensor, queue_ns: int, copy_wait_ns: int, compute_ns: int
) -> int:
    """Writes a reply frame and returns its bytes. `rows` [N, H] is copied unless it is `reply_rows(buf, ...)` itself."""
    count, hidden = rows.shape
    place = reply_rows(buf, count, hidden, rows.dtype)
    if place.data_ptr() != rows.data_ptr():
        place.copy_(rows)
    body = rows.numel() * rows.itemsize
    times = queue_ns, copy_wait_ns, compute_ns
    HEADER.pack_into(buf, 0, MAGIC, REPLY, DTYPES[rows.dtype], step, layer, count, hidden, 0, *times, 0, body, _UNTRACED)
    return HEADER_BYTES + body


def encode_error(buf: memoryview, step: int, layer: int, error: ForefetchError) -> int:
    """Writes an error frame with the error's google.rpc.Code and text (cut to 1 KiB), and returns its bytes."""
    text = str(error).encode()[:_ERROR_BYTES]
    status = _CODES.get(error.code, _CODES["INTERNAL"])
    HEADER.pack_into(buf, 0, MAGIC, ERROR, 0, step, layer, 0, 0, 0, 0, 0, 0, status, len(text), _UNTRACED)
    buf[HEADER_BYTES : HEADER_BYTES + len(text)] = text
    return HEADER_BYTES + len(text)


def decode_reply(buf: memoryview, call: LayerCall) -> LayerReply:
    """Reads the answer to `call`; rows alias `buf`. Raises what an error frame carries, Mismatch if it answers another."""
    _, kind, code, step, layer, rows, hidden, _, queue_ns, copy_wait_ns, compute_ns, status, body, _ = _header(buf)
    if kind == ERROR:
        _check_body(buf, body, HEADER_BYTES + body)
        raise _error(status, bytes(buf[HEADER_BYTES : HEADER_BYTES + body]).decode(errors="replace"))
    if kind != REPLY:
        raise BadRequest("kind", f"expected {REPLY} (reply), got {kind}")
    dtype = _dtype(code)
    expected = call.step, call.layer, *call.x.shape, call.x.dtype
    if (step, layer, rows, hidden, dtype) != expected:
        raise Mismatch(f"the worker answered step {step}, layer {layer}, {rows} rows x {hidden} {dtype}; asked was {expected}")
    _check_body(buf, body, HEADER_BYTES + rows * hidden * dtype.itemsize)
    return LayerReply(_view(buf, dtype, HEADER_BYTES, rows, hidden), queue_ns, copy_wait_ns, compute_ns)


def peek(buf: memoryview) -> tuple[int, int]:
    """(step, layer) of a frame that may be malformed, to address an error frame; zeros when too short."""
    if len(buf) < HEADER_BYTES:
        return 0, 0
    return HEADER.unpack_from(buf, 0)[3:5]


def buffer(size: int) -> memoryview:
    """Memory for frames, aligned as torch aligns. Pages are used up only where frames reach."""
    return torch.empty(size, dtype=torch.uint8).numpy().data


def seal(buf: memoryview, size: int) -> bytes:
    """The ForwardRequest (or ForwardResponse: same layout) of the frame of `size` bytes that lies HEADROOM into `buf`.

    Protobuf's own classes would copy the frame twice on each side; a message of one `bytes` field is a tag, a length and the
    bytes.
    """
    length, head = size, bytearray(b"\x0a")  # field 1, length-delimited
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    start = HEADROOM - len(head)
    buf[start:HEADROOM] = head
    return bytes(buf[start : HEADROOM + size])


def unseal(message: bytes) -> memoryview:
    """The frame in a serialised ForwardRequest or ForwardResponse, read-only. BadRequest when it is neither."""
    if message[:1] == b"\x0a":
        size = shift = 0
        for at in range(1, min(len(message), 6)):
            size |= (message[at] & 0x7F) << shift
            shift += 7
            if message[at] < 0x80:
                if at + 1 + size == len(message):
                    return memoryview(message)[at + 1 :]
                break
    try:  # unusual, but perhaps legal: unknown fields, say
        return memoryview(expert_pb2.ForwardRequest.FromString(message).frame)
    except DecodeError:
        raise BadRequest("frame", "the message is not a ForwardRequest") from None


def _header(buf: memoryview) -> tuple[int, int, int, int, int, int, int, int, int, int, int, int, int, bytes]:
    if len(buf) < HEADER_BYTES:
        raise BadRequest("frame", f"{len(buf)} bytes are less than a header of {HEADER_BYTES}")
    header = HEADER.unpack_from(buf, 0)
    if header[0] != MAGIC:
        raise BadRequest("magic", f"expected {MAGIC:#x}, got {header[0]:#x}")
    return header


def _dtype(code: int) -> torch.dtype:
    if code not in _DTYPE_OF:
        raise BadRequest("dtype", f"{code} is no DataType that rows can have")
    return _DTYPE_OF[code]


def _check_shape(shape: Shape, dtype: torch.dtype, hidden: int, rows: int) -> None:
    if dtype != shape.dtype:
        raise Mismatch(f"dtype: this worker computes in {shape.dtype}, the frame carries {dtype}")
    if hidden != shape.hidden:
        raise Mismatch(f"hidden: this worker's rows are {shape.hidden} wide, the frame's {hidden}")
    if rows > shape.max_rows:
        raise BadRequest("rows", f"{rows} exceed the limit of {shape.max_rows} rows")


def _check_body(buf: memoryview, body: int, end: int) -> None:
    if body != end - HEADER_BYTES:
        raise BadRequest("body", f"the header's sizes make {end - HEADER_BYTES} bytes, it says {body}")
    if end > len(buf):
        raise BadRequest("body", f"the frame ends after {len(buf)} of {end} bytes")


def _error(status: int, text: str) -> ForefetchError:
    if status == _CODES["INVALID_ARGUMENT"]:
        field, _, message = text.partition(": ")
        return BadRequest(field, message)
    if status == _CODES["FAILED_PRECONDITION"]:
        return Mismatch(text)
    if status == _CODES["UNAVAILABLE"]:
        return LinkDown(-1, text)
    return ForefetchError(text)
