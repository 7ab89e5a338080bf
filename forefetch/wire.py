"""The frame of `expert.proto`, encoded and decoded in place.

A frame is a 96-byte header and raw little-endian sections, each aligned to 32 bytes from the frame's start; the layout
stands beside `ForwardRequest` in the proto. Decoders check everything in a header that a peer could get wrong and raise
BadRequest or Mismatch naming the field. What they return aliases the buffer: a frame in shared memory is computed from, and
answered, where it lies.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from forefetch.errors import BadRequest, ForefetchError, LinkDown, Mismatch
from forefetch.frames import HEADER_BYTES, Floats, FrameBuffer, Ints, Sections, layout

MAGIC = 0x31524646  # "FFR1"
REQUEST, REPLY, ERROR = 1, 2, 3
HEADER = struct.Struct("<IHHQIIIIQQQII32s")
VERIFIED = struct.Struct("<HHHHQQQ")  # in a reply, where a request has its trace
_TRACE_BYTES = 25
_UNTRACED = bytes(_TRACE_BYTES)

Header = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int, bytes]

# Values of DataType in tensor.proto, google.rpc.Code for errors.
DTYPES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
_DTYPE_OF = {code: dtype for dtype, code in DTYPES.items()}
_CODES = {"INVALID_ARGUMENT": 3, "RESOURCE_EXHAUSTED": 8, "FAILED_PRECONDITION": 9, "INTERNAL": 13, "UNAVAILABLE": 14}
_ERROR_BYTES = 1024  # longest message of an error frame


@dataclass(slots=True)
class LayerCall:
    """Token rows of one layer for one worker, and the (row, expert) pairs it has to evaluate."""

    step: int
    layer: int
    x: Tensor  # [N, H]
    pair_row: Ints  # [P] int32, index into x
    pair_expert: Ints  # [P] int32, the model's expert index; the worker must hold it
    pair_weight: Floats  # [P] float32 gate weight
    trace: bytes = b""  # trace id 16, span id 8, flags 1; empty when the step is not sampled
    sizes: tuple[int, int, int] = field(init=False)  # N, H, P: torch is asked for them once

    def __post_init__(self) -> None:
        self.sizes = (*self.x.shape, self.pair_row.size)  # what is no matrix is refused later


class Verified(NamedTuple):
    """A call's distinct experts against where they were when it came, and the copies since the call before."""

    hits: int = 0  # hinted, and here when the call came
    late: int = 0  # hinted, not here yet
    misses: int = 0  # not hinted, not here
    resident: int = 0  # not hinted, but here
    wasted_bytes: int = 0  # copied for a hint and gone again unused
    copied_bytes: int = 0
    copy_ns: int = 0  # what those copies took; what of it is not copy_wait_ns passed while something else went on
    shadowed: int = 0  # of those late and missed, evaluated from copies in fewer bits (--miss shadow)


_UNVERIFIED = Verified()
_NOTHING = VERIFIED.pack(*_UNVERIFIED[:-1])


@dataclass(slots=True)
class LayerReply:
    """Sum over each row's pairs of weight * expert(row). `rows` may alias the link's buffer until its next submit."""

    rows: Tensor  # [N, H], dtype of the call's x
    queue_ns: int  # waiting for other routers' calls
    copy_wait_ns: int  # waiting for experts that were not resident
    compute_ns: int
    round_trip_ns: int = 0  # submit to reply as the router saw it
    hits: int = 0  # this and what follows: see Verified
    late: int = 0
    misses: int = 0
    resident: int = 0
    wasted_bytes: int = 0
    copied_bytes: int = 0
    copy_ns: int = 0
    shadowed: int = 0


class Shape(NamedTuple):
    """What both ends of a link agreed on when it was opened."""

    hidden: int
    dtype: torch.dtype
    max_rows: int


def request_bytes(rows: int, hidden: int, pairs: int, dtype: torch.dtype) -> int:
    """Bytes of a request frame."""
    return layout(rows, hidden, pairs, dtype.itemsize).end


def reply_bytes(rows: int, hidden: int, dtype: torch.dtype) -> int:
    """Bytes of a reply frame; never less than an error frame may need."""
    return HEADER_BYTES + max(rows * hidden * dtype.itemsize, _ERROR_BYTES)


def encode_request(frame: FrameBuffer, call: LayerCall) -> int:
    """Writes `call` and returns the frame's bytes. x may live on any device. BadRequest if it does not fit."""
    x = call.x
    (rows, hidden, pairs), dtype = call.sizes, x.dtype
    at = layout(rows, hidden, pairs, dtype.itemsize)
    size = at.end
    if size > len(frame):
        raise BadRequest("rows", f"a frame of {rows} rows and {pairs} pairs takes {size} bytes; the link holds {len(frame)}")
    sizes = rows, hidden, pairs, 0, 0, 0, 0, size - HEADER_BYTES
    trace = call.trace or _UNTRACED
    HEADER.pack_into(frame.memory, 0, MAGIC, REQUEST, DTYPES[dtype], call.step, call.layer, *sizes, trace)
    frame.write(at, x, call.pair_row, call.pair_expert, call.pair_weight)
    return size


def decode_request(frame: FrameBuffer, size: int, shape: Shape) -> LayerCall:
    """Reads a request in the first `size` bytes. Mismatch when dtype or width are not `shape`'s; BadRequest if malformed.

    The pairs' values are not looked at: whoever evaluates them has to. The call is good until the next frame is read.
    """
    magic, kind, code, step, layer, rows, hidden, pairs, _, _, _, _, body, last = _header(frame, size)
    key = shape, magic, kind, code, rows, hidden, pairs, body, size
    call = frame.accepted.get(key)
    if call is None:
        call = frame.accept(key, LayerCall(step, layer, *_request_sections(frame, *key)))
    call.step, call.layer = step, layer
    call.trace = b"" if last.startswith(_UNTRACED) else last[:_TRACE_BYTES]
    return call


def _request_sections(
    frame: FrameBuffer, shape: Shape, magic: int, kind: int, code: int, rows: int, hidden: int, pairs: int, body: int, size: int
) -> Sections:
    _check_kind(magic, kind, REQUEST, "request")
    dtype = _dtype(code)
    _check_shape(shape, dtype, hidden, rows)
    _check_body(size, body, request_bytes(rows, hidden, pairs, dtype))
    return frame.sections(rows, hidden, pairs, dtype)


def reply_rows(frame: FrameBuffer, call: LayerCall) -> Tensor:
    """Where the rows [N, H] of the reply to `call` belong. BadRequest when they do not fit."""
    key = call.sizes, call.x.dtype
    found: Tensor | None = frame.accepted.get(key)
    return frame.accept(key, _place_of_rows(frame, call)) if found is None else found


def _place_of_rows(frame: FrameBuffer, call: LayerCall) -> Tensor:
    (rows, hidden, _), dtype = call.sizes, call.x.dtype
    need = HEADER_BYTES + rows * hidden * dtype.itemsize
    if need > len(frame):
        raise BadRequest("rows", f"a reply of {rows} rows takes {need} bytes; the link holds {len(frame)}")
    return frame.sections(rows, hidden, 0, dtype).x


def encode_reply(
    frame: FrameBuffer,
    call: LayerCall,
    queue_ns: int,
    copy_wait_ns: int,
    compute_ns: int,
    verified: Verified = _UNVERIFIED,
) -> int:
    """Writes the header over rows that were computed into `reply_rows`, and returns the frame's bytes."""
    x = call.x
    (rows, hidden, _), body = call.sizes, x.nbytes
    last = _NOTHING if verified == _UNVERIFIED else VERIFIED.pack(*verified[:-1])
    sizes = rows, hidden, 0, queue_ns, copy_wait_ns, compute_ns, verified.shadowed, body
    HEADER.pack_into(frame.memory, 0, MAGIC, REPLY, DTYPES[x.dtype], call.step, call.layer, *sizes, last)
    return HEADER_BYTES + body


def encode_error(frame: FrameBuffer, step: int, layer: int, error: ForefetchError) -> int:
    """Writes an error frame with the error's google.rpc.Code and text (cut to 1 KiB), and returns its bytes."""
    text = str(error).encode()[:_ERROR_BYTES]
    status = _CODES.get(error.code, _CODES["INTERNAL"])
    sizes = 0, 0, 0, 0, 0, 0, status, len(text)
    HEADER.pack_into(frame.memory, 0, MAGIC, ERROR, 0, step, layer, *sizes, _UNTRACED)
    frame.memory[HEADER_BYTES : HEADER_BYTES + len(text)] = text
    return HEADER_BYTES + len(text)


def decode_reply(frame: FrameBuffer, size: int, call: LayerCall) -> LayerReply:
    """Reads the answer to `call`. Raises what an error frame carries, Mismatch if it answers another call."""
    header = _header(frame, size)
    magic, kind, code, step, layer, rows, hidden, _, queue_ns, copy_wait_ns, compute_ns, status, body, last = header
    key = magic, kind, code, rows, hidden, body, size, call.sizes, call.x.dtype
    found = frame.accepted.get(key)
    if found is None or step != call.step or layer != call.layer:
        found = frame.accept(key, _reply_rows(frame, header, size, call))
    return LayerReply(found, queue_ns, copy_wait_ns, compute_ns, 0, *VERIFIED.unpack(last), status)  # type: ignore[call-arg]


def _reply_rows(frame: FrameBuffer, header: Header, size: int, call: LayerCall) -> Tensor:
    """Checks all of a reply's header."""
    magic, kind, code, step, layer, rows, hidden, _, _, _, _, status, body, _ = header
    if magic == MAGIC and kind == ERROR:
        _check_body(size, body, HEADER_BYTES + body)
        raise _error(status, bytes(frame.memory[HEADER_BYTES : HEADER_BYTES + body]).decode(errors="replace"))
    _check_kind(magic, kind, REPLY, "reply")
    dtype = _dtype(code)
    expected = call.step, call.layer, *call.sizes[:2], call.x.dtype
    if (step, layer, rows, hidden, dtype) != expected:
        raise Mismatch(f"the worker answered step {step}, layer {layer}, {rows} rows x {hidden} {dtype}; asked was {expected}")
    _check_body(size, body, HEADER_BYTES + rows * hidden * dtype.itemsize)
    return frame.sections(rows, hidden, 0, dtype).x


def peek(frame: FrameBuffer, size: int) -> tuple[int, int]:
    """(step, layer) of a frame that may be malformed, to address an error frame; zeros when it is too short."""
    if size < HEADER_BYTES:
        return 0, 0
    step, layer = HEADER.unpack_from(frame.memory)[3:5]
    return step, layer


def _header(frame: FrameBuffer, size: int) -> Header:
    if size < HEADER_BYTES:
        raise BadRequest("frame", f"{size} bytes are less than a header of {HEADER_BYTES}")
    return HEADER.unpack_from(frame.memory)


def _check_kind(magic: int, kind: int, expected: int, name: str) -> None:
    if magic != MAGIC:
        raise BadRequest("magic", f"expected {MAGIC:#x}, got {magic:#x}")
    if kind != expected:
        raise BadRequest("kind", f"expected {expected} ({name}), got {kind}")


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


def _check_body(size: int, body: int, end: int) -> None:
    if body != end - HEADER_BYTES:
        raise BadRequest("body", f"the header's sizes make {end - HEADER_BYTES} bytes, it says {body}")
    if end > size:
        raise BadRequest("body", f"the frame ends after {size} of {end} bytes")


def _error(status: int, text: str) -> ForefetchError:
    if status == _CODES["INVALID_ARGUMENT"]:
        field, _, message = text.partition(": ")
        return BadRequest(field, message)
    if status == _CODES["FAILED_PRECONDITION"]:
        return Mismatch(text)
    if status == _CODES["UNAVAILABLE"]:
        return LinkDown(-1, text)
    return ForefetchError(text)
