"""The step that a GPU replays, run here without recording: padded, with pages and lengths read as a graph reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference_model import CASES, Oracle
from trunk_rig import PAGE, Rig, close

from forefetch.kernels.gate import choose
from forefetch.spec import ModelSpec
from forefetch.weights import Checkpoint, load_expert
from forefetch.wire import Verified
from router_service.captured import CapturedTrunk, Recorder, Replay
from router_service.layouts import LayoutBuffers


class PlainResident:
    """Every expert as a dense product over all rows: nothing depends on values, as in a graph."""

    shadows = False

    def __init__(self, spec: ModelSpec, checkpoint: Checkpoint, device: torch.device) -> None:
        self._spec, self._num_experts = spec, spec.num_experts
        self.fault = torch.zeros(1, dtype=torch.int32, device=device)
        self._weights = {
            (layer, expert): tuple(t.float().to(device) for t in load_expert(checkpoint, spec, layer, expert))
            for layer in spec.moe_layers
            for expert in range(spec.num_experts)
        }

    def route(self, layer: int, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return self.run(layer, x, *choose(logits, self._spec.top_k, self._spec.gate_rule, self._spec.renormalise))

    def unsummed(self, layer: int, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return self.route(layer, x, logits)

    @property
    def counters(self) -> torch.Tensor:
        return self.fault[:0]

    def verified(self, counters: torch.Tensor) -> Verified:
        return Verified()

    def check(self) -> None:
        """Nothing goes wrong here."""

    def begin(self, idle: torch.Tensor) -> None:
        """Nobody asks which rows are padding."""

    def settle(self, idle: torch.Tensor) -> None:
        """Nobody asks for the load."""

    def run(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in range(self._num_experts):
            w13, w2 = self._weights[layer, expert]
            gate, up = (x @ w13.T).chunk(2, dim=-1)
            share = weights.where(ids == expert, 0.0).sum(-1, keepdim=True)
            out += torch.where(share != 0, share * ((torch.nn.functional.silu(gate) * up) @ w2.T), 0.0)
        return out


class CapturedRig(Rig):
    """A Rig whose decode steps are recorded for up to 8 rows."""

    def __init__(self, folder: Path, recorder: Recorder | None, on: str = "cpu", rounded: bool = False) -> None:
        super().__init__(folder, on=on, rounded=rounded)
        device = torch.device(on)
        sizes = {"max_tokens": 64, "max_batch": 8, "max_pages": 16, "page_size": PAGE}
        self.buffers = LayoutBuffers(**sizes, device=device, buckets=(1, 4, 8), chunk_rows=(4, 64))
        experts = PlainResident(self.spec, Checkpoint(folder), device)
        self.trunk = CapturedTrunk(self.trunk, experts, self.buffers, recorder)  # type: ignore[assignment]
        self.trunk.warm_up()  # type: ignore[attr-defined]


class Spy:
    """Records nothing; counts what would be replayed."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, step: Callable[[], None]) -> Replay:
        step()

        def replay() -> None:
            self.replays += 1
            step()

        return replay


def follows_the_oracle(rig: Rig, case: str, oracle: Oracle) -> None:
    """Three requests that come and go: their tokens and logits are those of each one alone."""
    prompt, count = CASES[case].prompt, 6
    prompts = [prompt, prompt[:7], prompt[: PAGE * 2]]
    requests = [rig.add(p, max_tokens=count + n) for n, p in enumerate(prompts)]
    while rig.step() is not None:
        assert rig.trunk._ran[(rig.steps - 1) % 2].replayed  # type: ignore[attr-defined]  # prompts, mixtures and decode steps alike
    for n, (p, request) in enumerate(zip(prompts, requests, strict=True)):
        assert request.tokens[len(p) :] == oracle.greedy(p, count + n)


@pytest.mark.parametrize("case", ["qwen3", "qwen2-shared", "granite"])
def test_replayed_steps_are_the_trunks(case: str, checkpoint: Callable[[str], Path], oracle: Callable[[str], Oracle]) -> None:
    spy = Spy()
    follows_the_oracle(CapturedRig(checkpoint(case), spy), case, oracle(case))
    assert spy.replays >= 6


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", ["qwen2-shared", "qwen3-dense-first"])
def test_a_rounded_trunk_is_replayed_as_it_is_written(case: str, device: str, checkpoint: Callable[[str], Path]) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    recorder = Spy() if device == "cpu" else None
    rigs = [Rig(checkpoint(case), rounded=True), CapturedRig(checkpoint(case), recorder, device, rounded=True)]
    written, replayed = (rig.add(CASES[case].prompt, max_tokens=6) for rig in rigs)
    for rig in rigs:
        rig.run()
    assert replayed.tokens == written.tokens


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CASES)
def test_graphs_on_a_gpu(case: str, checkpoint: Callable[[str], Path], oracle: Callable[[str], Oracle]) -> None:
    follows_the_oracle(CapturedRig(checkpoint(case), None, "cuda"), case, oracle(case))


@pytest.mark.parametrize("unrecorded", [False, True])
def test_steps_in_layouts_that_nobody_replays(
    unrecorded: bool, checkpoint: Callable[[str], Path], oracle: Callable[[str], Oracle]
) -> None:
    """The trunk as written over the same buffers, as where experts in slots wait for the host: padded steps or plain ones."""
    rig, prompt = Rig(checkpoint("qwen3"), max_step_tokens=20), CASES["qwen3"].prompt
    sizes = {"max_tokens": 20, "max_batch": 8, "max_pages": 16, "page_size": PAGE}
    buffers = rig.buffers = LayoutBuffers(**sizes, device=torch.device("cpu"), buckets=(1, 4, 8), chunk_rows=(20,))
    if unrecorded:
        buffers.unrecorded()
    requests = [rig.add(p, max_tokens=4) for p in (prompt, prompt[:7])]
    rig.run()
    assert [r.tokens[len(r.prompt) :] for r in requests] == [oracle("qwen3").greedy(list(r.prompt), 4) for r in requests]


def test_idle_rows_change_nothing(checkpoint: Callable[[str], Path], oracle: Callable[[str], Oracle]) -> None:
    """One request in a bucket of four: the logits are those of the prompt's end."""
    rig = CapturedRig(checkpoint("qwen3"), Spy())
    rig.buffers.decode_rows = rig.buffers.buckets = (4, 8)  # type: ignore[attr-defined]
    prompt = CASES["qwen3"].prompt
    rig.add(prompt[:-1], max_tokens=2)
    rig.step()
    rig.scheduler.running[0].tokens[-1] = prompt[-1]
    logits = rig.step()
    assert logits is not None
    close(logits[0], oracle("qwen3").prefill_logits(prompt)[len(prompt) - 1])


def test_the_device_says_where_a_steps_time_went(checkpoint: Callable[[str], Path]) -> None:
    """Parts of a marked step are its own; those of the next are the same shares of its time; nothing is lost."""
    rig, shares = CapturedRig(checkpoint("qwen3"), Spy()), list[list[float]]()
    rig.add(CASES["qwen3"].prompt, max_tokens=4)
    rig.step()
    # Seconds, so that the marked step, which really ran, fits into its time on a busy machine.
    for rig.steps, total_ns in ((128, 5_000_000_000), (129, 10_000_000_000)):
        rig.step()
        stamps = rig.ring.begin(rig.steps, 0)
        rest = rig.trunk.timed(rig.steps - 1, stamps, 0, 1, total_ns)
        timings = stamps.finish(total_ns, rest, 1, 1)
        parts = (timings.attention_ns, timings.gate_ns, timings.link_ns, timings.combine_ns)
        assert min(parts) > 0
        assert sum(parts) + rest == pytest.approx(total_ns, abs=1000)
        shares.append([part / total_ns for part in parts])
    assert shares[0] == pytest.approx(shares[1], rel=1e-3)
