"""Errors on the wire, both ways: the error tree -> rich gRPC status -> the error tree.

A status carries ErrorInfo (reason = the error's class, domain "forefetch") plus BadRequest.FieldViolation or RetryInfo where
they apply. What is not a ForefetchError is a defect: its text stays in the log.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any, NoReturn, TypeVar, cast
from urllib.parse import unquote

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from forefetch import errors
from forefetch.errors import BadRequest, ForefetchError, LinkDown, Overloaded

_log = logging.getLogger(__name__)
_DOMAIN = "forefetch"
# Text travels twice in the trailers, percent-encoded and inside the rich status; both must fit the metadata limit.
_TEXT_LIMIT = 2_000

F = TypeVar("F", bound=Callable[..., Any])


def _reason(kind: type[ForefetchError]) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).upper()


_KINDS: dict[str, type[ForefetchError]] = {
    _reason(kind): kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ForefetchError)
}
# What a status without our ErrorInfo becomes: gRPC's own, or a proxy's.
_BY_CODE: dict[str, type[ForefetchError]] = {
    kind.code: kind
    for kind in (
        errors.BadRequest,
        errors.Unauthenticated,
        errors.NotFound,
        errors.Mismatch,
        errors.Overloaded,
        errors.Unavailable,
        errors.DeadlineExceeded,
        errors.Cancelled,
    )
}


def status_of(error: BaseException) -> grpc.Status:
    """The rich status (code, details, trailing_metadata) of `error`. A defect is logged with a traceback, told as INTERNAL."""
    if not isinstance(error, ForefetchError):
        _log.error("defect in a handler", exc_info=error)
        error = ForefetchError("internal error")
    status = status_pb2.Status(code=code_pb2.Code.Value(error.code), message=str(error)[:_TEXT_LIMIT])
    info = error_details_pb2.ErrorInfo(reason=_reason(type(error)), domain=_DOMAIN)
    if isinstance(error, LinkDown):
        info.metadata["worker"] = str(error.worker)
    status.details.add().Pack(info)
    if isinstance(error, BadRequest):
        message = str(error).removeprefix(f"{error.field}: ")[:_TEXT_LIMIT]
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=message)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, Overloaded):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        status.details.add().Pack(retry)
    return rpc_status.to_status(status)


def error_of(error: grpc.RpcError) -> ForefetchError:
    """The error that the other side meant; `error` is what a call of grpc or grpc.aio raised. Raise it `from None`."""
    call = cast(Any, error)
    code, text = call.code().name, _plain(call.details() or "") or call.code().name
    if code == "UNIMPLEMENTED":
        text = "what listens there has no such call: it is another service, or of another release"
    details = _details(call)
    info, kind = details.get("ErrorInfo"), None
    if info is not None and info.domain == _DOMAIN:
        kind = _KINDS.get(info.reason)
    kind = kind or _BY_CODE.get(code, ForefetchError)
    if issubclass(kind, BadRequest):
        violations = details["BadRequest"].field_violations if "BadRequest" in details else ()
        return kind(violations[0].field, violations[0].description) if violations else kind("request", text)
    if issubclass(kind, Overloaded):
        return kind(text, details["RetryInfo"].retry_delay.ToNanoseconds() / 1e9 if "RetryInfo" in details else 1.0)
    if issubclass(kind, LinkDown):
        worker = info.metadata.get("worker", "") if info is not None else ""
        return kind(int(worker) if worker.isdigit() else -1, text)
    return kind(text)


# gRPC's words for a server that is not there, up to the cause: "failed to connect to all addresses; last error: UNKNOWN:
# ipv4:127.0.0.1:50051: Failed to connect to remote host: Connection refused".
_NOBODY = re.compile(
    r"failed to connect to all addresses; last error: \w+: (?:ipv[46]:)?(\S+): (?:Failed to connect to remote host: )?"
)


def _plain(text: str) -> str:
    """gRPC's text, said shorter where it says who does not answer and why."""
    match = _NOBODY.match(text)
    return f"{unquote(match[1])} does not answer: {text[match.end() :]}" if match else text


def _details(call: Any) -> dict[str, Any]:
    """The rich status' details by message name; empty when there is none or it makes no sense."""
    found: dict[str, Any] = {}
    for key, value in call.trailing_metadata() or ():
        if key != "grpc-status-details-bin":
            continue
        try:
            for packed in status_pb2.Status.FromString(value).details:
                kind = packed.TypeName().rpartition(".")[2]
                if kind in ("ErrorInfo", "BadRequest", "RetryInfo"):
                    found[kind] = getattr(error_details_pb2, kind).FromString(packed.value)
        except DecodeError:
            return {}
    return found


def time_left(context: grpc.ServicerContext | grpc.aio.ServicerContext[Any, Any], at_most: float) -> float:
    """Seconds for a call this handler makes on its caller's behalf: gRPC does not forward deadlines to the next hop."""
    left = context.time_remaining()
    return at_most if left is None else max(0.0, min(left, at_most))


def sync_handler(method: F) -> F:
    """For servicer methods of a sync server, unary or generator: errors become rich statuses."""

    @functools.wraps(method)
    def unary(self: Any, request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return method(self, request, context)
        except Exception as error:
            _abort(context, error)

    @functools.wraps(method)
    def stream(self: Any, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            yield from method(self, request, context)
        except Exception as error:
            _abort(context, error)

    return cast(F, stream if inspect.isgeneratorfunction(method) else unary)


def _abort(context: grpc.ServicerContext, error: Exception) -> NoReturn:
    # After an abort, or with the caller gone, the call already has its status.
    if cast(Any, context).code() is not None or not context.is_active():
        raise error
    context.abort_with_status(status_of(error))


def aio_handler(method: F) -> F:
    """For servicer methods of an asyncio server, coroutine or async generator: errors become rich statuses.

    asyncio.CancelledError passes: grpc.aio cancels a handler whose caller went away or whose deadline passed.
    """

    @functools.wraps(method)
    async def unary(self: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            _check_parsed(request)
            return await cast(Awaitable[Any], method(self, request, context))
        except Exception as error:
            await _aio_abort(context, error)

    @functools.wraps(method)
    async def stream(self: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            _check_parsed(request)
            async with aclosing(method(self, request, context)) as replies:  # ends with the call, not when it is collected
                async for reply in replies:
                    yield reply
        except Exception as error:
            await _aio_abort(context, error)

    return cast(F, stream if inspect.isasyncgenfunction(method) else unary)


async def _aio_abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    status = status_of(error)
    await context.abort(status.code, status.details, status.trailing_metadata)


class _Unparsed:
    """Stands for a request whose bytes are no message, until a handler can say so."""


def _check_parsed(request: Any) -> None:
    if isinstance(request, _Unparsed):
        raise BadRequest("request", "is not a message of this call")


class Parsing(grpc.aio.ServerInterceptor):
    """Bytes that are no message end in BadRequest. grpc.aio by itself shows the parser's exception to the caller, as UNKNOWN.
    A reply may be a message, or its bytes already.

    For unary requests to our own services, whose handlers are all wrapped by `aio_handler`.
    """

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(details)
        if handler is None or handler.request_streaming or not details.method.startswith("/forefetch."):
            return handler
        parse, serialise = handler.request_deserializer, handler.response_serializer

        def tolerant(data: bytes) -> Any:
            try:
                return parse(data)
            except DecodeError:
                return _Unparsed()

        def once(reply: Any) -> bytes:
            return reply if isinstance(reply, bytes) else cast(bytes, serialise(reply))

        return handler._replace(request_deserializer=tolerant, response_serializer=once)
