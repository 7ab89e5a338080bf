"""Errors, and the one table that maps them to gRPC status codes.

    ForefetchError                    base; str(error) is safe to show to a client
    |- BadRequest                     the caller's fault                         INVALID_ARGUMENT
    |- Unauthenticated                the caller did not prove who it is         UNAUTHENTICATED
    |- NotFound                       no such thing (any more)                   NOT_FOUND
    |- Mismatch                       the two sides do not fit together          FAILED_PRECONDITION
    |  |- StaleEpoch                  someone else has taken this over         FAILED_PRECONDITION
    |  `- UnsupportedModel            a family, flag or rope type we do not run  FAILED_PRECONDITION
    |- Overloaded                     the queue is full; come back later         RESOURCE_EXHAUSTED
    |- Unread                         the caller left its stream unread          RESOURCE_EXHAUSTED
    |- Unavailable                    a part of the cluster is missing           UNAVAILABLE
    |  |- LinkDown                    a worker link broke; its step is replayed  UNAVAILABLE
    |  `- Draining                    this process is going away                 UNAVAILABLE
    |- DeadlineExceeded               the caller's deadline passed               DEADLINE_EXCEEDED
    |- Cancelled                      the caller went away                       CANCELLED
    `- ConfigError                    a setting or pair of settings is wrong     (process exits with 2)

Anything else that escapes a handler is a defect: clients get INTERNAL without its text, the log gets all of it.
This module knows no gRPC, so that pure code can raise and tests can catch; `rpc.py` holds the transport's side.
"""

from __future__ import annotations


class ForefetchError(Exception):
    """Base of every error raised on purpose. The message must be fit for a client: no paths, no internals."""

    code = "INTERNAL"


class BadRequest(ForefetchError):
    """The request is wrong. `field` is the dotted name of the request's field, `limit` what would have been right."""

    code = "INVALID_ARGUMENT"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class Unauthenticated(ForefetchError):
    """The call carries no credential, or none that is known."""

    code = "UNAUTHENTICATED"


class NotFound(ForefetchError):
    """What was asked for is not there, or no longer."""

    code = "NOT_FOUND"


class Mismatch(ForefetchError):
    """Both sides are sound but do not belong together: another model, dtype, shape or host."""

    code = "FAILED_PRECONDITION"


class StaleEpoch(Mismatch):
    """Another process has taken over what the caller holds; it must stop writing."""


class UnsupportedModel(Mismatch):
    """The checkpoint uses something Forefetch does not run; the message names it."""


class Overloaded(ForefetchError):
    """Admission refused. `retry_after_s` estimates when a place will be free, in seconds."""

    code = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unread(ForefetchError):
    """The caller did not take what was ready for it, for longer than the router keeps it."""

    code = "RESOURCE_EXHAUSTED"


class Unavailable(ForefetchError):
    """A part of the cluster that the request needs is missing."""

    code = "UNAVAILABLE"


class LinkDown(Unavailable):
    """The link to one worker broke, or it did not answer within its bound. `worker` is its index in the router's table."""

    def __init__(self, worker: int, message: str) -> None:
        super().__init__(message)
        self.worker = worker


class Moved(Unavailable):
    """An expert is not held here any more; whoever asked should find out who holds it now, and ask again."""


class Draining(Unavailable):
    """The process no longer takes new work."""


class DeadlineExceeded(ForefetchError):
    """The caller's deadline passed."""

    code = "DEADLINE_EXCEEDED"


class Cancelled(ForefetchError):
    """The caller went away."""

    code = "CANCELLED"


class ConfigError(ForefetchError):
    """A setting is out of range, or two settings do not go together; the message names them."""
