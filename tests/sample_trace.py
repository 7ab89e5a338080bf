"""A realistic request, recorded through the real ring and book: 24 layers, the first dense, two workers, one cold step."""

from __future__ import annotations

import random

from forefetch.telemetry.book import RequestBook
from forefetch.telemetry.ring import StepRing
from forefetch.v1 import router_pb2

US = 1_000
LAYERS = 24


def sample(tokens: int = 48, request_id: str = "story-7", seed: int = 1) -> router_pb2.GetTraceResponse:
    draw = random.Random(seed)
    ring = StepRing(256, LAYERS, 2)
    book = RequestBook(ring, 8, ["10.1.0.4:7101", "10.1.0.5:7102"])
    now = 8_000_000_000
    book.arrive(request_id, 1_764_425_000_000_000_000, now, None, sampled=True)
    now += 420 * US
    book.admitted(request_id, now)
    kinds: list[tuple[int | None, int]] = [(None, 512), (0, 171), *((token, 0) for token in range(1, tokens))]
    for step, (token, prefill) in enumerate(kinds, start=300):
        rows = prefill or draw.choice((1, 1, 2, 3))
        cold = token in (17, 31)
        start, now = now, _step(ring, draw, step, now, rows, cold)
        book.worked(request_id, step, token, prefill)
        now += draw.randint(5, 40) * US
        assert now > start
    book.finished(request_id, now, "OK", prompt_tokens=683, completion_tokens=tokens)
    return book.trace(request_id)


def _step(ring: StepRing, draw: random.Random, step: int, start: int, rows: int, cold: bool) -> int:
    stamps, now = ring.begin(step, start), start + 30 * US
    scale = 1 + rows / 40

    def about(us: float) -> int:
        return int(us * scale * draw.lognormvariate(0, 0.18) * US)

    for layer in range(LAYERS):
        begun, attention, gate, combine = now, about(60), about(9), about(11)
        experts = 0
        if layer:
            for worker in range(2):
                if rows == 1 and draw.random() < 0.12:
                    continue
                copy_wait = about(900) if cold and draw.random() < 0.3 else 0
                queue, compute = about(4), about(85)
                trip = queue + copy_wait + compute + about(48)
                stamps.call(layer, worker, rows, trip, queue, copy_wait, compute)
                if layer > 1:
                    stamps.verified(layer, worker, 3, 0, int(copy_wait > 0), 1, 0, 4096, copy_wait + 40_000, 0)
                experts = max(experts, trip + about(6))
        else:
            gate, combine = 0, about(70)
        stamps.layer(layer, begun, attention, gate, experts, combine)
        if layer > 1:
            stamps.hints(layer, 8, 10, 7, 10, 7, 0, 0, 0, 0)
        heads = about(5) if layer else 0
        stamps.lookahead(layer, heads, about(20) if layer else 0)
        now += attention + gate + experts + combine + heads + about(3)
    head, sampling = about(150), about(60)
    stamps.head(head)
    now += head + sampling + 40 * US
    stamps.finish(now, sampling, rows if rows < 9 else 1, rows)
    return now
