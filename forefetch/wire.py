"""The frame of `expert.proto`, encoded and decoded in place.

A frame is a 96-byte header and raw little-endian sections, each aligned to 32 bytes from the frame's start; the layout
stands beside `ForwardRequest` in the proto. Decoders check everything in a header that a peer could get wrong and raise
BadRequest or Mismatch naming the field. What they return aliases the buffer: a frame in shared memory is computed from, and
answered, where it lies.

Decode steps repeat their shapes, so nearly all of a header is the same bytes call after call. `Form` keeps those, and one call
of `struct` writes or reads a frame with them: between two waits for a peer the processor has forgotten everything, so what
counts is how many calls there are, and into how many libraries. A view of a memoryview costs more than a struct then.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from forefetch.errors import BadRequest, ForefetchError, LinkDown, Mismatch
from forefetch.frames import HEADER_BYTES, KEPT, Floats, FrameBuffer, Ints, Layout, bytes_of, envelope, layout

MAGIC = 0x31524646  # "FFR1"
REQUEST, REPLY, ERROR = 1, 2, 3
HEADER = struct.Struct("<IHHQIIIIQQQII32s")
_REQUEST = struct.Struct("<8sQI44s32s")  # what is before the step; step, layer; rows to body; trace
_REPLY = struct.Struct("<8sQI8s4xQQQII32s")  # the same; rows and hidden; times, shadowed, body; VERIFIED
VERIFIED = struct.Struct("<HHHHQQQ")  # in a reply, where a request has its trace
_TRACE_BYTES = 25
_UNTRACED, _AFTER_TRACE = bytes(32), bytes(32 - _TRACE_BYTES)


# Values of DataType in tensor.proto, google.rpc.Code for errors.
DTYPES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
_DTYPE_OF = {code: dtype for dtype, code in DTYPES.items()}
_CODES = {"INVALID_ARGUMENT": 3, "RESOURCE_EXHAUSTED": 8, "FAILED_PRECONDITION": 9, "INTERNAL": 13, "UNAVAILABLE": 14}
_ERROR_BYTES = 1024  # longest message of an error frame


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """What frames of calls of one shape have in common."""

    sizes: tuple[int, ...]  # N, H, P; more or fewer of what is no matrix, which links refuse
    hidden: int  # H; -1 of what is no matrix
    dtype: torch.dtype
    at: Layout
    request: bytes  # of a request's header: what is before the step
    request_sizes: bytes  # rows to body
    reply: bytes
    reply_sizes: bytes  # rows and hidden
    message_start: bytes  # of a request's message, up to the step
    message: struct.Struct  # all of it: start; step, layer; sizes; trace; rows; pairs


@lru_cache(KEPT)
def form_of(shape: tuple[int, ...], pairs: int, dtype: torch.dtype) -> Form:
    """The form of calls with rows of this shape."""
    rows, hidden = shape if len(shape) == 2 else (0, 0)
    at, code = layout(rows, hidden, pairs, dtype.itemsize), DTYPES.get(dtype, 0)
    sizes = rows, hidden, pairs, 0, 0, 0, 0, at.end - HEADER_BYTES
    request, _, _, sized, _ = _REQUEST.unpack(HEADER.pack(MAGIC, REQUEST, code, 0, 0, *sizes, b""))
    reply, *_ = _REQUEST.unpack(HEADER.pack(MAGIC, REPLY, code, 0, 0, *sizes, b""))
    start = envelope(at.end).head + request
    gap = at.row - HEADER_BYTES - at.rows_bytes
    message = struct.Struct(f"<{len(start)}sQI44s32s{at.rows_bytes}s{gap}x{at.pairs.format}")
    width = hidden if len(shape) == 2 else -1
    return Form((*shape, pairs), width, dtype, at, request, sized, reply, sized[:8], start, message)


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
    form: Form = field(init=False)  # torch is asked for sizes and type once

    def __post_init__(self) -> None:
        self.form = form_of(self.x.shape, self.pair_row.size, self.x.dtype)


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


NOTHING = Verified()
"""Where nothing moves."""
_NOTHING = bytes(32)


@dataclass(slots=True)
class LayerReply:
    """Sum over each row's pairs of weight * expert(row). `rows` may alias the link's buffer until its next submit."""

    rows: Tensor  # [N, H], dtype of the call's x
    queue_ns: int  # waiting for other routers' calls
    copy_wait_ns: int  # waiting for experts that were not resident
    compute_ns: int
    round_trip_ns: int = 0  # submit to reply as the router saw it
    verified: Verified = NOTHING


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


def request_message(room: int, call: LayerCall) -> bytes:
    """The serialised ForwardRequest with `call`'s frame. x may live on any device. BadRequest if it takes more than `room`."""
    form = call.form
    at = form.at
    if at.end > room:
        raise _too_large(form, room)
    last = call.trace + _AFTER_TRACE if call.trace else _UNTRACED
    pairs = at.pair_parts(call.pair_row, call.pair_expert, call.pair_weight)
    rows = bytes_of(call.x, at.rows_bytes)
    return form.message.pack(form.message_start, call.step, call.layer, form.request_sizes, last, rows, *pairs)


def encode_request(frame: FrameBuffer, call: LayerCall) -> int:
    """Writes `call` and returns the frame's bytes. x may live on any device. BadRequest if it does not fit."""
    form = call.form
    if form.at.end > len(frame):
        raise _too_large(form, len(frame))
    last = call.trace + _AFTER_TRACE if call.trace else _UNTRACED
    _REQUEST.pack_into(frame.memory, 0, form.request, call.step, call.layer, form.request_sizes, last)
    frame.write(form.at, call.x, call.pair_row, call.pair_expert, call.pair_weight)
    return form.at.end


def _too_large(form: Form, room: int) -> BadRequest:
    rows, *_, pairs = form.sizes
    return BadRequest("rows", f"a frame of {rows} rows and {pairs} pairs takes {form.at.end} bytes; the link holds {room}")


class Known(NamedTuple):
    """A shape that was read before."""

    call: LayerCall
    first: bytes
    shape: Shape
    size: int


def decode_request(frame: FrameBuffer, size: int, shape: Shape) -> LayerCall:
    """Reads a request in the first `size` bytes. Mismatch when dtype or width are not `shape`'s; BadRequest if malformed.

    The pairs' values are not looked at: whoever evaluates them has to. The call is good until the next frame is read.
    """
    if size < HEADER_BYTES:
        raise _no_header(size)
    first, step, layer, sizes, last = _REQUEST.unpack_from(frame.memory)
    known: Known | None = frame.accepted.get(sizes)
    if known is None or known.first != first or known.size != size or known.shape != shape:
        known = frame.accept(sizes, Known(_request(frame, size, shape), first, shape, size))
    call = known.call
    call.step, call.layer = step, layer
    call.trace = b"" if last == _UNTRACED else last[:_TRACE_BYTES]
    return call


def _request(frame: FrameBuffer, size: int, shape: Shape) -> LayerCall:
    """Checks all of a request's header."""
    magic, kind, code, step, layer, rows, hidden, pairs, _, _, _, _, body, _ = HEADER.unpack_from(frame.memory)
    _check_kind(magic, kind, REQUEST, "request")
    dtype = _dtype(code)
    _check_shape(shape, dtype, hidden, rows)
    _check_body(size, body, request_bytes(rows, hidden, pairs, dtype))
    return LayerCall(step, layer, *frame.sections(rows, hidden, pairs, dtype))


def reply_rows(frame: FrameBuffer, call: LayerCall) -> Tensor:
    """Where the rows [N, H] of the reply to `call` belong. BadRequest when they do not fit."""
    form = call.form
    found: Tensor | None = frame.accepted.get(form)
    return frame.accept(form, _place_of_rows(frame, form)) if found is None else found


def _place_of_rows(frame: FrameBuffer, form: Form) -> Tensor:
    rows, need = form.sizes[0], HEADER_BYTES + form.at.rows_bytes
    if need > len(frame):
        raise BadRequest("rows", f"a reply of {rows} rows takes {need} bytes; the link holds {len(frame)}")
    return frame.sections(rows, form.hidden, 0, form.dtype).x


def encode_reply(
    frame: FrameBuffer,
    call: LayerCall,
    queue_ns: int,
    copy_wait_ns: int,
    compute_ns: int,
    verified: Verified = NOTHING,
) -> int:
    """Writes the header over rows that were computed into `reply_rows`, and returns the frame's bytes."""
    form = call.form
    body, last = form.at.rows_bytes, _NOTHING if verified == NOTHING else VERIFIED.pack(*verified[:-1])
    spent = queue_ns, copy_wait_ns, compute_ns, verified.shadowed, body, last
    _REPLY.pack_into(frame.memory, 0, form.reply, call.step, call.layer, form.reply_sizes, *spent)
    return HEADER_BYTES + body


def encode_error(frame: FrameBuffer, step: int, layer: int, error: ForefetchError) -> int:
    """Writes an error frame with the error's google.rpc.Code and text (cut to 1 KiB), and returns its bytes."""
    text = str(error).encode()[:_ERROR_BYTES]
    status = _CODES.get(error.code, _CODES["INTERNAL"])
    sizes = 0, 0, 0, 0, 0, 0, status, len(text)
    HEADER.pack_into(frame.memory, 0, MAGIC, ERROR, 0, step, layer, *sizes, b"")
    frame.memory[HEADER_BYTES : HEADER_BYTES + len(text)] = text
    return HEADER_BYTES + len(text)


def decode_reply(frame: FrameBuffer, size: int, call: LayerCall) -> LayerReply:
    """Reads the answer to `call`. Raises what an error frame carries, Mismatch if it answers another call."""
    if size < HEADER_BYTES:
        raise _no_header(size)
    form = call.form
    first, step, layer, sizes, queue_ns, copy_wait_ns, compute_ns, shadowed, body, last = _REPLY.unpack_from(frame.memory)
    if first != form.reply or step != call.step or layer != call.layer or sizes != form.reply_sizes:
        raise _other_answer(frame, size, call)
    if body != form.at.rows_bytes or size < HEADER_BYTES + body:
        _check_body(size, body, HEADER_BYTES + form.at.rows_bytes)
    verified = NOTHING if last == _NOTHING and not shadowed else Verified(*VERIFIED.unpack(last), shadowed)  # type: ignore[call-arg]
    return LayerReply(reply_rows(frame, call), queue_ns, copy_wait_ns, compute_ns, 0, verified)


def _other_answer(frame: FrameBuffer, size: int, call: LayerCall) -> ForefetchError:
    """What a header says that does not begin as the answer to `call` would."""
    magic, kind, code, step, layer, rows, hidden, _, _, _, _, status, body, _ = HEADER.unpack_from(frame.memory)
    if magic == MAGIC and kind == ERROR:
        _check_body(size, body, HEADER_BYTES + body)
        return _error(status, bytes(frame.memory[HEADER_BYTES : HEADER_BYTES + body]).decode(errors="replace"))
    _check_kind(magic, kind, REPLY, "reply")
    asked = f"step {call.step}, layer {call.layer}, {call.form.sizes[0]} rows x {call.form.hidden} {call.form.dtype}"
    return Mismatch(f"the worker answered step {step}, layer {layer}, {rows} rows x {hidden} {_dtype(code)}; asked was {asked}")


def peek(frame: FrameBuffer, size: int) -> tuple[int, int]:
    """(step, layer) of a frame that may be malformed, to address an error frame; zeros when it is too short."""
    if size < HEADER_BYTES:
        return 0, 0
    step, layer = HEADER.unpack_from(frame.memory)[3:5]
    return step, layer


def _no_header(size: int) -> BadRequest:
    return BadRequest("frame", f"{size} bytes are less than a header of {HEADER_BYTES}")


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
