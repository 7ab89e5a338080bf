"""The sealed cache against attention over whole sequences whose old pages went through the codec."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from forefetch.kernels.kv_codec import KvFormat, open_pages, seal
from forefetch.spec import ModelSpec, RopeSpec
from router_service.admission import Admitted, SamplingParams
from router_service.batch import StepBatch, StepBuffers
from router_service.pages import PagePool
from router_service.scheduler import Request, Scheduler
from router_service.sealed import SealedCache

T, DIM, LAYERS, HEADS, KV_HEADS, ROWS = 32, 16, 3, 4, 2, 48
SCALE = 0.5


def make_spec(layers: int = LAYERS) -> ModelSpec:
    from forefetch.spec import ExpertNames

    return ModelSpec(
        family="f",
        name="n",
        dtype="float32",
        vocab_size=8,
        hidden_size=16,
        layers=layers,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=DIM,
        context_length=4096,
        rms_eps=1e-6,
        rope=RopeSpec(1e4),
        num_experts=2,
        top_k=1,
        expert_width=4,
        moe_layers=(),
        dense_width=4,
        expert_names=ExpertNames(),
        gate_name="g",
    )


@dataclasses.dataclass
class Text:
    """A request's q, k, v of every position and layer [L, n, heads, D], drawn from its seed."""

    request: Request
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor  # what attention gave [L, n, Hq, D]

    @property
    def shown(self) -> Tensor:
        return self.out[:, : self.request.computed]


class Rig:
    """A sealed cache, a scheduler and random projections in the place of a trunk."""

    def __init__(self, format: KvFormat, exempt: Sequence[int] = (), max_step_tokens: int = ROWS) -> None:
        self.format, pages = format, 40
        spec = make_spec()
        self.cache = SealedCache(
            spec, format, exempt=exempt, pages=pages, lanes=4, max_rows=max_step_tokens, device=torch.device("cpu")
        )
        for pool in (self.cache.tails, self.cache.sinks, self.cache.rows, *self.cache.exact.k, *self.cache.exact.v):
            pool.fill_(float("nan"))
        self.cache.pages.fill_(0xFF)
        self.scheduler = Scheduler(
            PagePool(pages),
            page_size=format.page,
            max_batch=4,
            max_step_tokens=max_step_tokens,
            max_waiting=8,
            recent=format.recent,
        )
        self.buffers = StepBuffers(
            max_tokens=max_step_tokens, max_batch=4, max_pages=16, page_size=format.page, device=torch.device("cpu"), buckets=()
        )
        self.texts: list[Text] = []

    def add(self, prompt: int, answer: int, seed: int) -> Text:
        admitted = Admitted((1,) * prompt, answer, False, SamplingParams(), (), frozenset(), "r")
        request = Request(len(self.texts), "r", (1,) * prompt, admitted, arrival=0.0)
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (
            torch.randn(LAYERS, prompt + answer, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        text = Text(request, q, 2 * k + 3 * k[:, :1], v, torch.full_like(q, torch.nan))
        self.texts.append(text)
        self.scheduler.submit(request)
        self.scheduler.admit(0.0)
        return text

    def step(self, replays: int = 0) -> list[tuple[Request, int]] | None:
        plan = self.scheduler.plan()
        if plan is None:
            return None
        batch = self.buffers.fill(0, plan)
        for attempt in range(replays + 1):  # those before the last one write something else
            self._attend(plan, batch, noise=replays - attempt)
        self.cache.commit(batch)
        sealed = self.scheduler.commit(plan, [1] * len(batch.logit_rows))
        for chunk in plan.chunks:
            if chunk.request.generated == chunk.request.admitted.max_tokens:
                self.scheduler.remove(chunk.request, 0.0)
        return sealed

    def _attend(self, plan, batch: StepBatch, noise: int) -> None:  # type: ignore[no-untyped-def]
        texts = [self.texts[chunk.request.key] for chunk in plan.chunks]
        spans = [slice(chunk.start, chunk.start + chunk.count) for chunk in plan.chunks]
        attention = self.cache.step(batch, torch.float32, SCALE)
        for layer in range(LAYERS):
            q, k, v = (
                torch.cat([getattr(text, name)[layer, span] for text, span in zip(texts, spans, strict=True)]) for name in "qkv"
            )
            out, at = attention(layer, q, k + noise, v + noise), 0
            for text, span in zip(texts, spans, strict=True):
                count = span.stop - span.start
                text.out[layer, span] = out[at : at + count]
                at += count

    def run(self, replays: int = 0) -> None:
        while self.step(replays) is not None:
            pass


def expected(text: Text, format: KvFormat, exempt: Sequence[int] = (), loaded: int = 0) -> Tensor:
    """[L, n, Hq, D] of the positions that were computed, in float64."""
    count = text.q.shape[1] - 1 if text.out[:, -1].isnan().all() else text.q.shape[1]
    out = torch.full(text.out.shape, torch.nan, dtype=torch.float64)
    for layer in range(LAYERS):
        plain = [x[layer].half().transpose(0, 1) for x in (text.k, text.v)]  # [Hkv, n, D]
        opened = [x.double() for x in plain]
        for page in range(count // format.page if layer not in exempt else 0):
            span = slice(page * format.page, (page + 1) * format.page)
            blobs = seal(plain[0][:, span], plain[1][:, span], format, skip=0 if page else format.sinks)
            for part, sealed in zip(opened, open_pages(blobs, format, torch.float64), strict=True):
                part[:, span] = sealed
        for part, whole in zip(opened, plain, strict=True):
            part[:, : format.sinks] = whole[:, : format.sinks].double()
        for position in range(count):
            edge = max(format.sealed_pages(position), loaded) * format.page
            k, v = (torch.cat((a[:, :edge], b[:, edge : position + 1].double()), 1) for a, b in zip(opened, plain, strict=True))
            q = text.q[layer, position].double().view(KV_HEADS, -1, DIM)
            out[layer, position] = ((q @ k.mT * SCALE).softmax(-1) @ v).flatten(0, 1)
    return out


def same(actual: Tensor, truth: Tensor) -> None:
    """Scores of at most a hundred in float32 are off by 1e-5, which moves a mix of values below 8 by as much."""
    seen = ~truth.isnan()
    assert seen.any()
    assert (actual[seen] - truth[seen]).abs().max() < 2e-4
    assert torch.equal(actual.isnan(), ~seen)


def make_format(name: str = "e2m0", recent: int = 9, sinks: int = 4) -> KvFormat:
    return KvFormat(name, DIM, page=T, outliers=1, thirds=0, sinks=sinks, recent=recent)


@pytest.mark.parametrize("name", ["e2m0", "asym2", "asym3", "fp4"])
@pytest.mark.parametrize(
    ("prompt", "answer"), [(1, 80), (T - 1, 3), (T, 3), (T + 1, 3), (2 * T, 3 * T), (100, 40), (3 * T + 9, 2)]
)
def test_a_request_is_answered_over_sealed_pages(name: str, prompt: int, answer: int) -> None:
    rig = Rig(make_format(name))
    text = rig.add(prompt, answer, seed=1)
    rig.run()
    same(text.out, expected(text, rig.format))


@pytest.mark.parametrize(("recent", "sinks"), [(0, 4), (T, 0), (2 * T + 5, 3), (0, 0)])
def test_recent_and_sinks(recent: int, sinks: int) -> None:
    rig = Rig(make_format(recent=recent, sinks=sinks))
    text = rig.add(70, 90, seed=2)
    rig.run()
    same(text.out, expected(text, rig.format))


def test_exempt_layers_are_float16() -> None:
    rig = Rig(make_format(), exempt=[1])
    text = rig.add(70, 40, seed=3)
    rig.run()
    same(text.out, expected(text, rig.format, exempt=[1]))


@pytest.mark.parametrize("replays", [0, 2])
def test_ragged_batches_with_rows_that_come_and_go(replays: int) -> None:
    rig = Rig(make_format())
    texts = [rig.add(prompt, answer, seed) for seed, (prompt, answer) in enumerate([(5, 60), (64, 5), (33, 33), (90, 50)])]
    for _ in range(8):
        rig.step(replays)
    texts[3].request.cancelled = True
    rig.scheduler.reap(0.0)
    left = texts[3].request.computed
    texts.append(rig.add(40, 40, 9))
    rig.run(replays)
    for index, text in enumerate(texts):
        truth = expected(text, rig.format)
        if index == 3:
            truth[:, left:] = torch.nan
        same(text.out, truth)


def test_chunks_and_batches_do_not_change_a_byte() -> None:
    blocks = []
    for rows, others in ((ROWS, 0), (160, 0), (7, 0), (20, 3)):
        rig = Rig(make_format(), max_step_tokens=rows)
        text = rig.add(130, 30, seed=4)
        pages = text.request.pages
        for seed in range(others):
            rig.add(20 + seed, 30, seed=50 + seed)
        rig.run()
        blocks.append([rig.cache.read_block(page) for page in pages[: rig.scheduler.sealed(text.request.computed)]])
    assert len(blocks[0]) == 4
    assert all(found == blocks[0] for found in blocks)


@pytest.mark.parametrize("exempt", [(), (0, 2)])
def test_blocks_travel(exempt: Sequence[int]) -> None:
    """A request behind a loaded prefix sees what the first one sealed; with recent 0, exactly what it computed itself."""
    format = make_format(recent=0)
    first = Rig(format, exempt)
    text = first.add(3 * T, 20, seed=5)
    pages = text.request.pages
    first.run()
    data = [first.cache.read_block(page) for page in pages[:2]]
    assert len(data[1]) == first.cache.block_bytes
    second = Rig(format, exempt)
    again = second.add(3 * T, 20, seed=5)
    for page, block in zip(again.request.pages, data, strict=False):
        second.cache.write_block(page, block)
    again.request.loaded_blocks = 2
    again.request.resume_at(2 * T)
    own = again.request.pages
    second.run()
    same(again.out[:, 2 * T :], text.out[:, 2 * T :].double())
    assert second.cache.read_block(own[0]) == data[0]
    assert second.cache.read_block(own[2]) == first.cache.read_block(pages[2])


def test_a_loaded_prefix_is_read_sealed_even_where_it_is_recent() -> None:
    format = make_format(recent=20)
    first = Rig(format)
    text = first.add(3 * T, 30, seed=6)
    pages = text.request.pages
    first.run()
    second = Rig(format)
    again = second.add(3 * T, 30, seed=6)
    for page, old in zip(again.request.pages[:2], pages, strict=False):
        second.cache.write_block(page, first.cache.read_block(old))
    again.request.loaded_blocks = 2
    again.request.resume_at(2 * T)
    second.run()
    truth = expected(text, format, loaded=2)
    truth[:, : 2 * T] = torch.nan
    same(again.out, truth)


def test_a_block_of_another_length_is_refused() -> None:
    cache = Rig(make_format()).cache
    with pytest.raises(ValueError, match="a block has"):
        cache.write_block(1, b"0" * (cache.block_bytes + 1))


def test_memory_is_what_the_arithmetic_says() -> None:
    format, spec = make_format(), make_spec()
    cache = Rig(format, exempt=[1]).cache
    pages, lanes = 40, 4
    held = sum(pool.nbytes for pool in (cache.pages, *cache.exact.k, *cache.exact.v))
    assert held == pages * SealedCache.page_bytes(spec, format, [1])
    copies = 2 * cache.sinks.nbytes  # at most, on the host
    assert cache.tails.nbytes + cache.sinks.nbytes + copies == (lanes + 1) * SealedCache.lane_bytes(spec, format, [1])
    entries = -(-ROWS // format.tail_tokens)
    held = cache.rows.nbytes + entries * cache.sinks.nbytes // (lanes + 1)
    assert held == SealedCache.rows_bytes(spec, format, [1], ROWS)
    assert cache.rows.shape[3] >= ROWS


def test_a_void_commit_seals_nothing() -> None:
    """Behind a step that was lost under way: no page of a request, no tail but the idle lane's."""
    cache = Rig(make_format()).cache
    void, before = torch.ones(1, dtype=torch.int32), (cache.tails[:, :, :, :4].view(torch.int16).clone(), cache.pages.clone())
    cache.heed(void)
    cache._seal_tails([(2, 7, 1)])
    assert torch.equal(cache.tails[:, :, :, :4].view(torch.int16), before[0])
    assert torch.equal(cache.pages[:, :, 1:], before[1][:, :, 1:])
    cache.tails[:] = 1.0
    void.zero_()
    cache._seal_tails([(2, 7, 1)])
    assert not torch.equal(cache.pages[:, :, 7], before[1][:, :, 7])


def test_copies_of_sinks_do_not_grow() -> None:
    rig = Rig(make_format())
    for seed in range(20):
        rig.add(2 * T, 12, seed)
        rig.run()
    assert len(rig.cache._first) <= 8
