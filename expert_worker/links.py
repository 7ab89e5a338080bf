"""A link to an expert worker, and its first form: `local`, in this process. `wired.py` has `shm` and `grpc`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from time import perf_counter_ns
from typing import Literal

import torch

from expert_worker.core import Core, WorkerInfo
from forefetch.errors import ForefetchError, LinkDown, Mismatch
from forefetch.hints import ExpertHint
from forefetch.wire import LayerCall, LayerReply


class Link(ABC):
    """One worker as a router sees it. Not for concurrent use."""

    kind: Literal["local", "shm", "grpc"]

    def __init__(self, address: str, info: WorkerInfo) -> None:
        self.address, self.info = address, info

    @abstractmethod
    def submit(self, call: LayerCall) -> None:
        """Sends a call and does not wait for the worker (a local link computes here). x may lie on any device.

        Mismatch or BadRequest when x does not fit what was agreed on; nothing is outstanding then.
        """

    @abstractmethod
    def collect(self, timeout_s: float) -> LayerReply:
        """The reply to the submitted call; its rows are valid until the next submit.

        LinkDown when the worker died or did not answer in time: the link is of no more use then. Mismatch, BadRequest or
        another ForefetchError when the worker refused the call: the link can be used further.
        """

    @property
    @abstractmethod
    def alive(self) -> bool:
        """False once the other side is known to be gone, also between calls. True proves nothing."""

    @abstractmethod
    def hint(self, hint: ExpertHint) -> None:
        """Tells the worker what a later layer will probably need, at any time, from any thread. Never blocks, never raises; a
        hint that cannot be delivered is dropped and counted in `hints_dropped`."""

    @property
    @abstractmethod
    def hints_dropped(self) -> int:
        """Hints that never left."""

    @abstractmethod
    def close(self) -> None:
        """Gives up the link. A collect under way in another thread ends in LinkDown."""


class SingleLink(Link):
    """One way to a worker: one call at a time."""

    def __init__(self, address: str, info: WorkerInfo) -> None:
        super().__init__(address, info)
        self._call: LayerCall | None = None
        self._since_ns = 0
        self._down = ""  # why the link can no longer be used

    def submit(self, call: LayerCall) -> None:
        """As Link.submit; RuntimeError while a call is outstanding."""
        if self._call is not None:
            raise RuntimeError("the previous call has not been collected")
        info, form = self.info, call.form
        if form.hidden != info.hidden_size or form.dtype != info.dtype:
            agreed = f"{info.hidden_size} x {info.dtype}"
            raise Mismatch(f"rows are {tuple(call.x.shape)} {call.x.dtype}, the worker's {agreed}")
        self._since_ns = perf_counter_ns()
        self._send(call)
        self._call = call

    def collect(self, timeout_s: float) -> LayerReply:
        """As Link.collect; RuntimeError when no call is outstanding."""
        if self._call is None:
            raise RuntimeError("no call was submitted")
        call, self._call = self._call, None
        if self._down:
            raise LinkDown(-1, self._down)
        try:
            reply = self._receive(call, timeout_s)
        except LinkDown as error:
            self._down = str(error)
            raise
        reply.round_trip_ns = perf_counter_ns() - self._since_ns
        return reply

    @property
    def alive(self) -> bool:
        """See Link."""
        return not self._down

    @abstractmethod
    def _send(self, call: LayerCall) -> None:
        """Puts the call on its way."""

    @abstractmethod
    def _receive(self, call: LayerCall, timeout_s: float) -> LayerReply:
        """Waits for the answer to `call`."""


class LocalLink(SingleLink):
    """A worker in this process. It computes during submit; on a GPU that only launches."""

    kind = "local"

    def __init__(self, core: Core) -> None:
        super().__init__("local", core.info)
        self.core = core
        self._answer: LayerReply | ForefetchError | None = None

    def _send(self, call: LayerCall) -> None:
        out = torch.empty_like(call.x)
        try:
            queue_ns, copy_wait_ns, compute_ns, verified = self.core.forward(call, out)
            self._answer = LayerReply(out, queue_ns, copy_wait_ns, compute_ns, 0, verified)
        except ForefetchError as error:
            self._answer = error

    def _receive(self, call: LayerCall, timeout_s: float) -> LayerReply:
        answer, self._answer = self._answer, None
        assert answer is not None
        if isinstance(answer, ForefetchError):
            raise answer
        return answer

    def hint(self, hint: ExpertHint) -> None:
        """Straight to the worker."""
        self.core.hint(hint)

    @property
    def hints_dropped(self) -> int:
        """There is nothing between to drop any."""
        return 0

    def close(self) -> None:
        """Nothing to give up."""
