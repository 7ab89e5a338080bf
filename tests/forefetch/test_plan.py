"""The arithmetic of `forefetch plan`: against the formats' own sizes, a real file, and measured rows."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forefetch import plan
from forefetch.errors import ConfigError
from forefetch.families import read_spec
from forefetch.plan import HARDWARE, Wanted, fit, sizes, speed
from forefetch.shapes import synthetic_config
from forefetch.spec import ModelSpec

ROOT = Path(__file__).resolve().parents[2]
H200, CPU = HARDWARE["h200"], HARDWARE["cpu"]


def shape(name: str) -> ModelSpec:
    return read_spec(synthetic_config(f"synthetic:{name}"), {}, name)


QWEN = shape("qwen3-30b-a3b")


def test_sizes_are_those_of_the_published_model() -> None:
    """30.5 billion parameters, 3.3 of them active for a token, as its card says."""
    size = sizes(QWEN, Wanted())
    assert (size.trunk + size.experts * size.expert) / 2 == pytest.approx(30.5e9, rel=0.01)
    active = size.step + len(QWEN.moe_layers) * QWEN.top_k * size.expert
    assert active / 2 == pytest.approx(3.3e9 - QWEN.vocab_size * QWEN.hidden_size, rel=0.1)


@pytest.mark.parametrize("name", list(plan.PAGE_BYTES))
def test_bytes_of_sealed_pages_are_those_of_the_format(name: str) -> None:
    from forefetch.kernels.kv_codec.formats import KvFormat

    assert KvFormat(name, thirds=32 if name == "mixed" else 0).blob_bytes == plan.PAGE_BYTES[name]


@pytest.mark.parametrize("name", list(plan.EXPERT_BYTES))
def test_bytes_of_experts_are_those_of_the_format(name: Any) -> None:
    from forefetch.kernels.grouped_mlp.formats import ExpertFormat, blob_bytes

    mine = sizes(QWEN, Wanted(expert_format=name)).expert
    assert mine == pytest.approx(blob_bytes(QWEN.hidden_size, QWEN.expert_width, ExpertFormat(name)), rel=1e-3)


def test_bytes_of_the_reference_model_are_those_of_its_file() -> None:
    from forefetch.weights import Checkpoint

    folder = ROOT / "models" / "reference"
    spec, checkpoint = ModelSpec.load(folder), Checkpoint(folder)
    size = sizes(spec, Wanted(context=100))
    stored = sum(checkpoint.read(name).numel() for name in checkpoint.names) * 2
    assert size.trunk + size.experts * size.expert == pytest.approx(stored, rel=0.001)


def test_a_long_context_costs_a_seventh_in_two_bits() -> None:
    dense, sealed = (plan.kv_bytes(QWEN, name, 32_000) for name in ("float16", "e2m0"))
    assert 6 < dense / sealed < 7
    assert plan.kv_bytes(QWEN, "e2m0", 100) == plan.kv_bytes(QWEN, "float16", 100), "a short one is all tail"


def test_all_rows_together_touch_what_they_can() -> None:
    assert plan.touched(QWEN, 1) == pytest.approx(8)
    assert plan.touched(QWEN, 64) == pytest.approx(126, abs=1)  # 126.5 in the study's routings
    assert plan.touched(QWEN, 4096) <= 128


def test_what_fits() -> None:
    whole = fit(QWEN, Wanted(batch=16), H200)
    assert (whole.fits, whole.slots, whole.host) == (True, 48 * 128, 0)
    small = replace(H200, memory_gib=24.0)
    part = fit(QWEN, Wanted(batch=4), small)
    assert part.fits
    assert 0 < part.per_layer < 128
    assert part.router <= 22 * plan.GIB
    assert part.host == pytest.approx(54 * plan.GIB, rel=0.01)
    none = fit(QWEN, Wanted(batch=200), small)
    assert not none.fits
    assert "GiB" in none.problem


def test_the_batch_that_fits_fits_and_one_more_does_not() -> None:
    wanted = Wanted(batch=1, context=8192, slots=0.5)
    most = fit(QWEN, wanted, H200).max_batch
    assert fit(QWEN, replace(wanted, batch=most), H200).fits
    assert not fit(QWEN, replace(wanted, batch=most + 1), H200).fits


def test_workers_take_the_experts_out_of_the_router() -> None:
    alone = fit(QWEN, Wanted(batch=4), H200)
    spread = fit(QWEN, Wanted(batch=4, workers=4, link="shm"), H200)
    assert alone.router - spread.router == pytest.approx(alone.worker)
    assert spread.worker == pytest.approx(alone.worker / 4)


def ms(wanted: Wanted, hardware: plan.Hardware = H200, spec: ModelSpec = QWEN) -> plan.Speed:
    return speed(spec, wanted, hardware, fit(spec, wanted, hardware))


def test_hints_hide_copies_behind_the_rest_but_not_more_than_the_rest() -> None:
    base = Wanted(batch=1, slots=0.5, expert_format="int4")
    none, some = ms(base), ms(replace(base, recall=0.95))
    resident = ms(replace(base, slots=1.0))
    assert none.limit == "expert copies"
    assert resident.token_ms <= some.token_ms < none.token_ms
    full = ms(replace(base, recall=1.0, batch=64))
    rest = sum(value for name, value in full.terms.items() if name != "expert copies")
    copies = ms(replace(base, batch=64)).terms["expert copies"]
    assert full.terms["expert copies"] == pytest.approx(max(0.0, copies - rest))


def slot_rates() -> list[tuple[int, float, float]]:
    """(streams, share of slots, share of needed experts that was in none) of expert_worker/README.md: its own rule."""
    text = (ROOT / "expert_worker" / "README.md").read_text()
    found = []
    for streams, *cells in re.findall(r"^\| [a-z ]+ \| (\d+) \| (.*?) \| (.*?) \| (.*?) \|$", text, re.M):
        hits = [float(match[1]) for cell in cells if (match := re.search(r"\*\*([\d.]+)\*\*", cell))]
        found += [(int(streams), share, 1 - hit / 100) for share, hit in zip((0.25, 0.5, 0.75), hits, strict=True)]
    return found


def test_even_routing_is_the_worst_that_was_measured_and_what_was_measured_can_be_said() -> None:
    rates = slot_rates()
    assert len(rates) >= 18
    for streams, share, missed in rates:
        assert missed < 1 - share, f"{streams} streams at {share:.0%}"
        base = Wanted(batch=streams, slots=share, expert_format="int4")
        said = ms(replace(base, missed=missed)).terms["expert copies"]
        assert said == pytest.approx(ms(base).terms["expert copies"] * missed / (1 - share), rel=1e-3)
    assert ms(Wanted(slots=1.0, missed=0.2)).terms["expert copies"] == 0, "what is resident is not missed"


def test_the_limit_moves_with_the_work() -> None:
    assert ms(Wanted(batch=64, expert_format="int4", kv_format="e2m0")).limit == "expert weights"
    assert ms(Wanted(batch=24, context=32_000, expert_format="int4", kv_format="float16")).limit == "KV"
    assert ms(Wanted(batch=1, context=128, expert_format="int4")).limit == "layers"


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch": 0},
        {"context": 10**9},
        {"slots": 0.0},
        {"recall": 1.5},
        {"missed": -0.1},
        {"kv_format": "fp5"},
        {"expert_format": "int5"},
        {"link": "shm"},
        {"workers": 2},
    ],
)
def test_nonsense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--"):
        Wanted(**wrong).validate(QWEN)


# Measured microseconds of a layer's experts (routing, int4 products, sum) on an H200, by rows; Qwen3-30B-A3B shapes. A study's
# figures; 15 us beyond the bytes, of those that a whole layer takes, were set by looking at them.
STUDY = {64: 92.3, 16: 64.6, 4: 32.4, 1: 15.8}


@pytest.mark.parametrize(("rows", "measured"), STUDY.items())
def test_experts_on_a_gpu_are_within_a_third_of_what_was_measured(rows: int, measured: float) -> None:
    layers = len(QWEN.moe_layers)
    predicted = 1e3 * ms(Wanted(batch=rows, expert_format="int4")).terms["expert weights"] / layers + 15
    assert measured / 1.33 < predicted < measured * 1.33


def captured() -> dict[tuple[str, int], float]:
    """(KV format, batch) -> measured median milliseconds of a step: int4 experts, 4,096 tokens of context, one H200; the
    newest, of `decode` or of what `p2p` compares itself with, and of the newest day: steps take half of what they once did."""
    sizes = r"synthetic:qwen3-30b-a3b int4 experts, (\w+) KV, "
    shape = re.compile(f"{sizes}(?:batch (\\d+), context 4096|context 4096, batch (\\d+), one GPU, running ahead)")
    with (ROOT / "benchmarks" / "results.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["benchmark"] in {"decode", "p2p"} and row["metric"] == "p50"]
    found = [(shape.fullmatch(row["case"]), row) for row in rows if "H200" in row["hardware"]]
    day = max(row["date"] for match, row in found if match)
    return {(match[1], int(match[2] or match[3])): float(row["value"]) for match, row in found if match and row["date"] == day}


def test_a_step_on_a_gpu_is_within_a_quarter_of_what_was_measured() -> None:
    """The one figure that is fitted is the time per layer, from 24 us (batch 1) to 44 (batch 64)."""
    rows = captured()
    assert {batch for _, batch in rows} >= {1, 16, 64}
    for (kv_format, batch), measured in rows.items():
        if kv_format in plan.KV_FORMATS:
            predicted = ms(Wanted(batch=batch, kv_format=kv_format, expert_format="int4")).token_ms
            assert 0.8 < predicted / measured < 1.25, f"{kv_format}, batch {batch}: {predicted:.2f} ms of {measured:.2f}"


def lanes(how: str) -> dict[tuple[str, int], float]:
    """(expert format, batch) -> measured median milliseconds of a step on two GPUs, over lanes; the newest."""
    sizes = r"synthetic:qwen3-30b-a3b (\w+) experts, e2m0 KV, context 4096, batch (\d+), two GPUs"
    shape = re.compile(f"{sizes}, {how}(?:, running ahead)?")
    with (ROOT / "benchmarks" / "results.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["benchmark"] == "p2p" and row["metric"] == "p50"]
    found = [(shape.fullmatch(row["case"]), float(row["value"])) for row in rows]
    return {(match[1], int(match[2])): value for match, value in found if match}


@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_on_two_gpus_is_within_a_quarter_of_what_was_measured(parts: int) -> None:
    """The hop was measured by itself; these rows were not used. Halves hide hops, which the plan does not count on."""
    rows = lanes(f"rows in {parts}")
    assert {batch for _, batch in rows} >= {16, 64}
    for (kind, batch), measured in rows.items():
        wanted = Wanted(batch=batch, kv_format="e2m0", expert_format=kind, workers=1, link="p2p", apart=True)
        predicted = ms(wanted).token_ms
        assert 0.8 < predicted / measured < 1.25, f"batch {batch}, {parts} parts: {predicted:.2f} ms of {measured:.2f}"


def test_experts_on_two_gpus_are_within_a_quarter_of_what_was_measured() -> None:
    """No figure was fitted to these rows: 0.95 to 1.14. But one stream's few int4 experts (1.43): there the time per layer,
    which is fitted to all batches, is most of the step, and the hop overlaps what the plan adds it to."""
    rows = lanes("experts on both")
    assert {("int4", 1), ("int4", 16), ("int4", 64), ("bfloat16", 1), ("bfloat16", 64)} <= set(rows)
    for (kind, batch), measured in rows.items():
        wanted = Wanted(batch=batch, kv_format="e2m0", expert_format=kind, workers=1, link="p2p")
        predicted, most = ms(wanted).token_ms, 1.5 if (kind, batch) == ("int4", 1) else 1.25
        assert 0.8 < predicted / measured < most, f"{kind}, batch {batch}: {predicted:.2f} ms of {measured:.2f}"


def test_over_lanes_a_part_of_the_experts_lies_beside_the_trunk_if_all_fit() -> None:
    p2p = Wanted(batch=4, workers=3, link="p2p")
    apart, over = fit(QWEN, replace(p2p, apart=True), H200), fit(QWEN, p2p, H200)
    assert (apart.shares, over.shares) == (3, 4)
    assert over.worker * 4 == pytest.approx(apart.worker * 3)
    assert over.router - apart.router == pytest.approx(over.worker)
    assert over.max_batch < apart.max_batch
    full = replace(p2p, batch=apart.max_batch)
    assert fit(QWEN, full, H200).shares == 3, "K and V need the room"
    assert fit(QWEN, replace(p2p, slots=0.5), H200).shares == 3, "lanes carry no experts that come and go"
    with pytest.raises(ConfigError, match="--apart"):
        replace(p2p, link="shm", apart=True).validate(QWEN)


# (needed experts in no slot, recall of hints) -> measured milliseconds of the captured step: int4 experts in half the slots,
# e2m0, 4,096 tokens, batch 1, one H200 (benchmarks/LOG.md, "Experts in slots on a GPU"; in the first 189.3 of 384 experts were
# read in place).
SLOTS = {(189.3 / 384, 0.0): 12.61, (0.176, 0.0): 5.69, (0.176, 0.95): 5.91}


@pytest.mark.parametrize(("missed", "recall"), SLOTS)
def test_experts_in_slots_on_a_gpu_against_what_was_measured(missed: float, recall: float) -> None:
    """On demand within a quarter. With hints the plan says the best that they could do, and that has not been reached yet."""
    wanted = Wanted(batch=1, kv_format="e2m0", expert_format="int4", slots=0.5, missed=missed, recall=recall)
    factor = ms(wanted).token_ms / SLOTS[missed, recall]
    assert 0.6 < factor < 1 if recall else 0.8 < factor < 1.25, f"{factor:.2f} of the measured"


RANDOM = {
    **{"model_type": "qwen3_moe", "dtype": "float32", "vocab_size": 8192, "hidden_size": 512, "num_hidden_layers": 8},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 64, "num_experts_per_tok": 8},
    **{"moe_intermediate_size": 128, "intermediate_size": 1024, "max_position_embeddings": 4096, "norm_topk_prob": True},
}


def measured() -> dict[tuple[str, int], float]:
    """(case, batch) -> tokens per second, the newest rows of decoding on a CPU."""
    with (ROOT / "benchmarks" / "results.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["benchmark"] == "decode_throughput" and "Xeon" in row["hardware"]]
    return {(row["case"], int(row["metric"].removeprefix("batch "))): float(row["value"]) for row in rows}


# Two figures of HARDWARE["cpu"] are fitted to both models in one process, and a time per layer to each link. They were 1.09 to
# 1.28 of what was measured with the reference model, 0.78 to 1.20 with the random one.
TOLERANCE = {
    "reference local": 1.35,
    "random-120m local": 1.35,
    "reference 2 workers, shm": 1.6,
    "reference 2 workers, grpc": 1.6,
}


@pytest.mark.parametrize("case", TOLERANCE)
@pytest.mark.parametrize("batch", [1, 8, 32])
def test_decoding_on_a_cpu_is_within_the_stated_factor(case: str, batch: int) -> None:
    spec = ModelSpec.load(ROOT / "models" / "reference") if "reference" in case else read_spec(RANDOM, {}, "random")
    # Both workers share the router's cores and memory, so they are no second device: one process, plus the link.
    hardware = replace(CPU, layer_us=CPU.layer_us + CPU.link_us[case.split(", ")[1]]) if "," in case else CPU
    wanted = Wanted(batch=batch, context=80, kv_format="float32", expert_format="float32")
    predicted = 1e3 * batch / ms(wanted, hardware, spec).token_ms
    factor = predicted / measured()[case, batch]
    assert 1 / TOLERANCE[case] < factor < TOLERANCE[case], f"{predicted:.0f} tokens/s predicted, {factor:.2f} of the measured"
