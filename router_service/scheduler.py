"""Which tokens the next step computes. Pure: time and sizes are arguments, nothing here waits, sends or computes.

A step's plan is one token of every decoding request, then chunks of prompts in order of arrival, up to `max_step_tokens`.
Planning changes nothing; `commit` alone advances a request. So a step that fails half-way is simply planned again.

A request is admitted only when pages for its worst case (prompt + max_tokens) are free. It can therefore always run to
its end: no preemption, no recomputation, no refusal half-way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from forefetch.errors import Cancelled, DeadlineExceeded, ForefetchError, Overloaded
from router_service.admission import Admitted
from router_service.journal import Tail
from router_service.pages import PagePool


@dataclass(eq=False)
class Request:
    """A request in the engine. `tokens` is the prompt followed by the answer; K and V of `tokens[:computed]` are committed.

    `lane`: a number that no other running request has, below the largest batch.
    `known`: tokens of the answer that were there when the request came, because it goes on with a session. `loading`: its
    cached prefix is on its way, nothing is computed for it. `cached`: tokens that came from a cache. `error`: why it is to end.
    `tenant`: whom its blocks belong to. `tail`: what its session's log has of the cache behind the last block. `loads`: set for
    an answer that is gone on with, the blocks that came from a cache when it began.
    """

    key: int
    request_id: str
    prompt: tuple[int, ...]
    admitted: Admitted
    arrival: float  # monotonic seconds
    deadline: float | None = None  # monotonic seconds
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    pages: tuple[int, ...] = ()
    started: float | None = None
    cancelled: bool = False
    error: ForefetchError | None = None
    replayed_steps: int = 0
    tenant: str = ""
    known: tuple[int, ...] = ()
    tail: Tail | None = None
    loads: int | None = None
    loading: bool = False
    loaded_blocks: int = 0
    cached: int = 0
    lane: int = 0

    def __post_init__(self) -> None:
        self.tokens = [*self.prompt, *self.known]

    @property
    def generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - len(self.prompt)

    @property
    def decoding(self) -> bool:
        """Only the answer's last token is left to compute."""
        return self.generated > 0 and self.computed == len(self.tokens) - 1

    @property
    def first(self) -> bool:
        """Whether the last token is the first that was generated here."""
        return self.generated == len(self.known) + 1

    def resume_at(self, tokens: int) -> None:
        """K and V of the first `tokens` are in the pages. The last token's are computed in any case: its row is what chooses
        the next one."""
        self.cached = self.computed = min(tokens, len(self.tokens) - 1)
        self.loading = False

    def worst_case_tokens(self) -> int:
        """Positions whose K and V may be written: the last token's never are."""
        return len(self.prompt) + self.admitted.max_tokens - 1


@dataclass(frozen=True)
class Chunk:
    """Positions start .. start + count of one request."""

    request: Request
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the end of the known tokens, so that its last row chooses the next one."""
        return self.start + self.count == len(self.request.tokens)


@dataclass(frozen=True)
class Plan:
    """One step: rows of the decoding requests first, then chunks of prompts."""

    decodes: tuple[Chunk, ...]
    prefills: tuple[Chunk, ...]

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """All chunks in row order."""
        return self.decodes + self.prefills

    @property
    def tokens(self) -> int:
        """Rows of the step."""
        return len(self.decodes) + sum(chunk.count for chunk in self.prefills)


class Scheduler:
    """The admission queue and the running batch. Not thread-safe: its owner locks.

    `recent`: newest tokens that no block holds."""

    def __init__(
        self, pool: PagePool, *, page_size: int, max_batch: int, max_step_tokens: int, max_waiting: int, recent: int = 0
    ) -> None:
        self.pool = pool
        self.page_size = page_size
        self.recent = recent
        self.max_batch = max_batch
        self.max_step_tokens = max_step_tokens
        self.max_waiting = max_waiting
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._lanes = list(reversed(range(max_batch)))
        self._service_s = 1.0  # smoothed time from start to end of a request, for retry hints

    def submit(self, request: Request) -> None:
        """Queues a request. Overloaded, with an estimate of when a place is free, when the queue is full.

        Requests that the next step will start do not wait: a burst into an idle router fills its batch, then the queue.
        """
        if len(self.waiting) >= self.max_waiting + max(0, self.max_batch - len(self.running)):
            retry = max(0.05, self._service_s * (len(self.waiting) + 1) / self.max_batch)
            raise Overloaded(f"the queue is full ({self.max_waiting} waiting)", retry_after_s=retry)
        self.waiting.append(request)

    def reap(self, now: float) -> list[tuple[Request, ForefetchError]]:
        """Takes cancelled, failed and expired requests out, frees their pages, and says why each ended."""
        ended: list[tuple[Request, ForefetchError]] = []
        for request in (*self.waiting, *self.running):
            if request.cancelled:
                ended.append((request, Cancelled("cancelled by the client")))
            elif request.error is not None:
                ended.append((request, request.error))
            elif request.deadline is not None and now >= request.deadline:
                ended.append((request, DeadlineExceeded("the request's deadline passed")))
        for request, _ in ended:
            self.remove(request, now)
        return ended

    def admit(self, now: float) -> list[Request]:
        """Starts waiting requests, oldest first, while the batch and the page pool have room for their worst case."""
        started: list[Request] = []
        while self.waiting and len(self.running) < self.max_batch:
            pages = self.pool.allocate(-(-self.waiting[0].worst_case_tokens() // self.page_size))
            if pages is None:
                break  # strictly first come, first served: nothing overtakes a large request forever
            request = self.waiting.popleft()
            request.pages, request.started, request.lane = pages, now, self._lanes.pop()
            self.running.append(request)
            started.append(request)
        return started

    def plan(self) -> Plan | None:
        """The next step, or None when nothing runs."""
        decodes, prefills, left = [], [], self.max_step_tokens
        ready = [request for request in self.running if not request.loading]
        for request in ready:
            if request.decoding:
                decodes.append(Chunk(request, request.computed, 1))
        left -= len(decodes)
        for request in ready:
            if not request.decoding and left > 0:
                count = min(left, len(request.tokens) - request.computed)
                prefills.append(Chunk(request, request.computed, count))
                left -= count
        return Plan(tuple(decodes), tuple(prefills)) if decodes or prefills else None

    def sealed(self, tokens: int) -> int:
        """Blocks that are final when `tokens` are committed."""
        return max(0, tokens - self.recent) // self.page_size

    def commit(self, plan: Plan, sampled: Sequence[int]) -> list[tuple[Request, int]]:
        """Advances the plan's requests; `sampled` are the new tokens of its sampling chunks in row order.

        Returns (request, index of its first block that this step sealed) for requests that sealed one.
        """
        sealed, tokens = [], iter(sampled)
        for chunk in plan.chunks:
            request, before = chunk.request, self.sealed(chunk.request.computed)
            samples = chunk.samples
            request.computed = chunk.start + chunk.count
            if samples:
                request.tokens.append(next(tokens))
            if self.sealed(request.computed) > before:
                sealed.append((request, before))
        return sealed

    def remove(self, request: Request, now: float) -> None:
        """Takes a request out, finished or not, and frees its pages."""
        if request in self.running:
            self.running.remove(request)
            self._lanes.append(request.lane)
            self._service_s += 0.2 * (now - (request.started or now) - self._service_s)
        else:
            self.waiting.remove(request)
        pages, request.pages = request.pages, ()
        self.pool.release(pages)
