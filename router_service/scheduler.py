"""Which tokens the next step computes. Pure: time and sizes are arguments, nothing here waits, sends or computes.

A step's plan is one token of every decoding request, then chunks of prompts in order of arrival, up to `max_step_tokens`.
Planning changes nothing, so a step that fails half-way is simply planned again. Once a step is launched, `advance` moves its
requests on, so that the next one can be planned while it runs; `land` adds its tokens when they are known.

A request is admitted only when pages for its worst case (prompt + max_tokens) are free. It can therefore always run to
its end: no preemption, no recomputation, no refusal half-way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from forefetch.errors import Cancelled, DeadlineExceeded, ForefetchError, Overloaded
from router_service.admission import Admitted
from router_service.journal import Tail
from router_service.pages import PagePool


@dataclass(eq=False)
class Request:
    """A request in the engine. `tokens` is the prompt followed by the answer. K and V of the first `computed` positions are
    there for whatever is launched next.

    `in_flight`: launched steps with rows of it that have not landed. `owed`: tokens that they choose, which nobody has read;
    the newest is choice number `source` of the last launched step.
    `lane`: a number that no other running request has, below the largest batch.
    `known`: tokens of the answer that were there when the request came, because it goes on with a session. `loading`: its
    cached prefix is on its way, nothing is computed for it. `cached`: tokens that came from a cache. `error`: why it is to end.
    `tenant`: whom its blocks belong to. `tail`: what its session's log has of the cache behind the last block. `rows_due`:
    positions, ascending, behind which rows of the cache are wanted when they are computed (`rows.py`).
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
    shadow_experts: int = 0  # evaluated from copies in fewer bits, in steps that it took part in
    tenant: str = ""
    known: tuple[int, ...] = ()
    tail: Tail | None = None
    rows_due: list[int] = field(default_factory=list)
    loading: bool = False
    loaded_blocks: int = 0
    cached: int = 0
    lane: int = 0
    in_flight: int = 0
    owed: int = 0
    source: int = 0

    def __post_init__(self) -> None:
        self.tokens = [*self.prompt, *self.known]

    @property
    def generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - len(self.prompt)

    @property
    def decoding(self) -> bool:
        """Only the answer's last token is left to compute."""
        return self.generated + self.owed > 0 and self.computed == len(self.tokens) + self.owed - 1

    @property
    def spent(self) -> bool:
        """The tokens that it is owed are its last ones."""
        return self.owed > 0 and self.generated + self.owed >= self.admitted.max_tokens

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
    """Positions start .. start + count of one request. `samples`: they reach the end of its tokens, so that the last row
    chooses the next one."""

    request: Request
    start: int
    count: int
    samples: bool = True

    @property
    def end(self) -> int:
        """Behind the last position."""
        return self.start + self.count


@dataclass(frozen=True)
class Plan:
    """One step: rows of the decoding requests first, then chunks of prompts."""

    decodes: tuple[Chunk, ...]
    prefills: tuple[Chunk, ...]

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """All chunks in row order."""
        return self.decodes + self.prefills

    @property
    def tokens(self) -> int:
        """Rows of the step."""
        return len(self.decodes) + sum(chunk.count for chunk in self.prefills)

    @cached_property
    def choosing(self) -> tuple[Chunk, ...]:
        """The chunks that choose a token, in row order."""
        return tuple(chunk for chunk in self.chunks if chunk.samples)

    def without(self, requests: Collection[Request]) -> Plan:
        """The plan but for these requests' chunks."""
        kept = [tuple(c for c in part if c.request not in requests) for part in (self.decodes, self.prefills)]
        return Plan(*kept)


class Scheduler:
    """The admission queue and the running batch. Not thread-safe: its owner locks.

    `recent`: newest tokens that no block holds. `prompt_rows`: most prompt tokens of a step while anybody decodes; 0: what
    decoding leaves of `max_step_tokens`."""

    def __init__(
        self,
        pool: PagePool,
        *,
        page_size: int,
        max_batch: int,
        max_step_tokens: int,
        max_waiting: int,
        recent: int = 0,
        prompt_rows: int = 0,
    ) -> None:
        self.pool = pool
        self.page_size = page_size
        self.recent = recent
        self.max_batch = max_batch
        self.max_step_tokens = max_step_tokens
        self.prompt_rows = prompt_rows
        self.max_waiting = max_waiting
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._lanes = list(reversed(range(max_batch)))
        self._leaving: dict[Request, tuple[int, ...]] = {}  # ended, but a launched step still writes to these pages
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
            if request.error is not None:
                ended.append((request, request.error))
            elif request.deadline is not None and now >= request.deadline:  # of which gRPC makes a cancellation as well
                ended.append((request, DeadlineExceeded("the request's deadline passed")))
            elif request.cancelled:
                ended.append((request, Cancelled("cancelled by the client")))
        for request, _ in ended:
            self.remove(request, now)
        return ended

    def admit(self, now: float) -> list[Request]:
        """Starts waiting requests, oldest first, while the batch and the page pool have room for their worst case."""
        started: list[Request] = []
        while self.waiting and self._lanes:
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
        prompts = []
        for request in self.running:
            if request.loading or request.spent:
                continue
            if request.decoding:
                decodes.append(Chunk(request, request.computed, 1))
            else:
                prompts.append(request)
        left -= len(decodes)
        if decodes and self.prompt_rows:
            left = min(left, self.prompt_rows)
        for request in prompts:
            if left > 0:
                remaining = len(request.tokens) - request.computed
                count = self._reach(request, min(left, remaining))
                prefills.append(Chunk(request, request.computed, count, samples=count == remaining))
                left -= count
        return Plan(tuple(decodes), tuple(prefills)) if decodes or prefills else None

    def _reach(self, request: Request, count: int) -> int:
        """A chunk ends where rows are wanted, unless they are still there at its own end."""
        end = request.computed + count
        for position in request.rows_due:
            if request.computed < position < end and self.sealed(position) < self.sealed(end):
                return position - request.computed
        return count

    def sealed(self, tokens: int) -> int:
        """Blocks that are final when `tokens` are committed."""
        return max(0, tokens - self.recent) // self.page_size

    def commit(self, plan: Plan, sampled: Sequence[int]) -> list[tuple[Request, int, int]]:
        """`advance` and `land` in one, for a step that has been run and read."""
        self.advance(plan)
        return self.land(plan, sampled)

    def advance(self, plan: Plan) -> None:
        """The step is launched: its requests are where it leaves them, and owed the tokens that it chooses."""
        row = 0
        for chunk in plan.chunks:
            request = chunk.request
            request.in_flight += 1
            request.computed = chunk.end
            if chunk.samples:
                request.owed, request.source, row = request.owed + 1, row, row + 1

    def void(self, chunk: Chunk) -> None:
        """A launched row took a token that turned out to be another: its request stands before it again."""
        chunk.request.computed = chunk.start
        chunk.request.owed -= chunk.samples

    def land(self, plan: Plan, sampled: Sequence[int], dropped: Collection[Request] = ()) -> list[tuple[Request, int, int]]:
        """A launched step was read. `sampled`: the new tokens of its sampling chunks in row order; those of `dropped` requests
        (ended, or void) count nothing.

        Returns (request, index of its first block that this step sealed, index behind the last) for requests that sealed one.
        """
        sealed, tokens = [], iter(sampled)
        for chunk in plan.chunks:
            request, token = chunk.request, next(tokens, -1) if chunk.samples else None
            request.in_flight -= 1
            if request in self._leaving and not request.in_flight:
                self._free(request.lane, self._leaving.pop(request))
            if request in dropped:
                continue
            if token is not None:
                request.tokens.append(token)
                request.owed -= 1
            before, after = self.sealed(chunk.start), self.sealed(chunk.end)
            if after > before:
                sealed.append((request, before, after))
        return sealed

    def remove(self, request: Request, now: float) -> None:
        """Takes a request out, finished or not, and frees its pages: once no launched step has rows of it."""
        pages, request.pages = request.pages, ()
        if request not in self.running:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        self._service_s += 0.2 * (now - (request.started or now) - self._service_s)
        if request.in_flight:
            self._leaving[request] = pages
        else:
            self._free(request.lane, pages)

    def _free(self, lane: int, pages: tuple[int, ...]) -> None:
        self._lanes.append(lane)
        self.pool.release(pages)
