"""Decode attention on one GPU: every KV format and shape, checked and timed in one run beside cuDNN's SDPA in BF16.

    python -m benchmarks.kv_attention [--formats e2m0,asym2] [--shapes 64x32768x32x4] [--write]

A shape is rows x tokens x query heads x KV heads. Times are medians of CUDA-graph replays, inputs rotated when they would fit
in L2. Sealed formats read pages, float16 tail and sinks, and include the merge; "ragged": lengths of 1/2 to 1 of the shape's.
Beside them: registers and spilled bytes of the Hopper kernels that ran, and what sealing costs a decode step.
Errors are relative L2 against float64 over the very same dequantised values, beside FP16 SDPA's own error on them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks.results import Row, append
from forefetch.kernels.attention import decode_sealed
from forefetch.kernels.attention import triton as dense
from forefetch.kernels.attention.sealed import SealedKv, SealedPlan, decode_sealed_ref, gather_row
from forefetch.kernels.kv_codec import KvFormat, seal

DEVICE = "cuda"
SHAPES = ("64x32768x32x4", "16x32768x32x8", "1x131072x32x8", "64x4096x32x4", "64x2048x32x4", "1x2048x32x8", "1x8192x32x4")
FORMATS = {
    "e2m0": KvFormat("e2m0"),
    "asym2": KvFormat("asym2"),
    "mixed": KvFormat("mixed", thirds=32),
    "asym3": KvFormat("asym3"),
    "fp4": KvFormat("fp4"),
}
L2_BYTES = 60e6
STEP = 7.5e-3  # seconds that a decode step of 64 rows over 4k tokens aims at; sealing should take less than 2 % of it
GOALS = {
    "e2m0": {"64x32768x32x4": 5.0, "16x32768x32x8": 5.0, "1x131072x32x8": 4.2, "64x4096x32x4": 4.0},
    "asym3": {"64x32768x32x4": 3.0},
    "mixed": {"64x32768x32x4": 3.5},
    "fp4": {"64x32768x32x4": 2.5},
}


@dataclass(frozen=True)
class Shape:
    rows: int
    tokens: int
    heads: int
    kv_heads: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        return cls(*map(int, text.split("x")))

    def __str__(self) -> str:
        return f"{self.rows}x{self.tokens}x{self.heads}x{self.kv_heads}"

    @property
    def bf16_bytes(self) -> float:
        return 4.0 * self.rows * self.tokens * self.kv_heads * 128


def graph_time(calls: list[Callable[[], object]], replays: int = 9) -> float:
    """Median seconds per call of a captured round of calls."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    rounds = max(1, 6 // len(calls))
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / (rounds * len(calls)))
    return statistics.median(times)


def baseline(shape: Shape) -> float:
    """cuDNN SDPA, BF16, dense rows of equal length."""
    kv = (shape.rows, shape.kv_heads, shape.tokens, 128)
    sets = [
        [torch.randn(s, device=DEVICE, dtype=torch.bfloat16) for s in ((shape.rows, shape.heads, 1, 128), kv, kv)]
        for _ in range(_copies(shape.bf16_bytes))
    ]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return graph_time([lambda s=s: sdpa(*s, enable_gqa=True) for s in sets])


def _copies(size: float) -> int:
    return max(1, min(8, round(3 * L2_BYTES / size)))


@dataclass(frozen=True)
class Case:
    """One set of inputs of a sealed format."""

    q: Tensor
    kv: SealedKv
    plan: SealedPlan
    format: KvFormat

    @property
    def bytes(self) -> float:
        """What a kernel has to read."""
        sealed, lengths = self.plan.sealed.sum().item(), self.plan.lengths.sum().item()
        half = lengths - sealed * self.format.page + self.format.sinks * len(self.q)
        return len(self.kv.pages) * (sealed * self.format.blob_bytes + half * 512.0)

    def run(self) -> Tensor:
        return decode_sealed(self.q, self.kv, self.plan, self.format, 128**-0.5)


def random_pages(format: KvFormat, shape: tuple[int, int], seed: int) -> Tensor:
    """Pages [Hkv, n, blob] with random codes and bits; scales and zeros as sealing leaves them for unit normal values."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    pages = torch.randint(0, 256, (*shape, format.blob_bytes), dtype=torch.uint8, device=DEVICE, generator=generator)

    def uniform(low: float, high: float, count: int) -> Tensor:
        return torch.rand((*shape, count), device=DEVICE, generator=generator) * (high - low) + low

    step = 1.0 / max(format.levels) ** 0.5
    channel = torch.randint(0, 128, (*shape, format.outliers), device=DEVICE, generator=generator, dtype=torch.int32)
    for name, section in format.sections.items():
        part = pages[..., section.offset : section.offset + section.size]
        if name in ("k_scale", "v_scale"):
            scale = uniform(0.3 * step, step, section.size // (1 if format.name == "fp4" else 2))
            if name == "k_scale":  # an outlier's codes count for nothing
                scale.view(*shape, -1, 128).scatter_(
                    3, channel.long()[..., None, :].expand(-1, -1, scale.shape[-1] // 128, -1), 0
                )
            part.copy_(scale.to(torch.float8_e4m3fn if format.name == "fp4" else torch.float16).view(torch.uint8))
        elif name in ("k_zero", "v_zero", "outliers"):
            values = uniform(-1.0, 1.0, section.size // 2) * (3.0 if name == "outliers" else 0.5)
            if name == "k_zero":
                values.scatter_(2, channel.long(), 0.0)
            part.copy_(values.half().view(torch.uint8))
        elif name == "meta":
            part.zero_()
            part[..., :8].copy_(torch.ones((*shape, 2), device=DEVICE).view(torch.uint8))
            part[..., 8 : 8 + 4 * format.outliers].copy_(channel.view(torch.uint8))
            if format.thirds:
                some = torch.rand((*shape, 128), device=DEVICE, generator=generator).argsort(-1)[..., : format.thirds]
                part[..., 32 : 32 + format.thirds].copy_(some.sort(-1).values.to(torch.uint8))
    return pages


def cases(shape: Shape, format: KvFormat, ragged: bool = False) -> Iterator[Case]:
    """Input sets, together several times as large as the L2 cache."""
    lengths = torch.full((shape.rows,), shape.tokens)
    if ragged:
        lengths = (shape.tokens * (0.5 + 0.5 * torch.rand(shape.rows, generator=torch.Generator().manual_seed(3)))).long()
    sealed = torch.tensor([format.sealed_pages(int(length) - 1) for length in lengths])
    size = shape.kv_heads * int(sealed.sum()) * format.blob_bytes
    for seed in range(_copies(size)):
        generator = torch.Generator(DEVICE).manual_seed(seed)
        pages = random_pages(format, (shape.kv_heads, int(sealed.sum())), seed)
        table = torch.zeros((shape.rows, int(sealed.max())), dtype=torch.int32)
        order, at = torch.randperm(int(sealed.sum())).int(), 0
        for row, count in enumerate(sealed.tolist()):
            table[row, :count], at = order[at : at + count], at + count
        half = [
            torch.randn((shape.kv_heads, shape.rows, n, 128), device=DEVICE, generator=generator).half()
            for n in (format.tail_tokens, format.tail_tokens, format.sinks, format.sinks)
        ]
        plan = SealedPlan(*(t.int().to(DEVICE) for t in (table, sealed, lengths, torch.randperm(shape.rows))))
        q = torch.randn((shape.rows, shape.heads, 128), device=DEVICE, generator=generator).bfloat16()
        yield Case(q, SealedKv(pages, *half), plan, format)


def errors(case: Case) -> tuple[float, float]:
    """(the kernel's, FP16 SDPA's) relative error over the first and the last row."""
    case = replace(case, q=case.q.half())  # an output in BF16 would hide the kernel's error behind its own rounding
    out = case.run()
    mine: list[Tensor] = []
    theirs: list[Tensor] = []
    exact: list[Tensor] = []
    for row in {0, len(case.q) - 1}:
        plan = replace(
            case.plan, **{n: getattr(case.plan, n)[row : row + 1] for n in ("page_table", "sealed", "lengths", "tail")}
        )
        query = case.q[row : row + 1]
        exact.append(decode_sealed_ref(query.double(), case.kv, plan, case.format, 128**-0.5))
        mine.append(out[row : row + 1].double())
        k, v = (part[None].half() for part in gather_row(case.kv, plan, 0, case.format, torch.float32))
        theirs.append(sdpa(query.half()[:, :, None], k, v, enable_gqa=True)[:, :, 0].double())
    truth = torch.cat(exact)
    return tuple(float((torch.cat(part) - truth).norm() / truth.norm()) for part in (mine, theirs))  # type: ignore[return-value]


def measure_sealed(shape: Shape, name: str, reference: float, ragged: bool = False) -> list[Row]:
    some, known = list(cases(shape, FORMATS[name], ragged)), compiled()
    error, theirs = errors(some[0])
    registers, spills, _ = max(compiled() - known, default=(0, 0, ""))
    seconds = graph_time([case.run for case in some])
    case, speed = f"{name} {shape}{' ragged' if ragged else ''}", reference / seconds
    rate = statistics.mean(c.bytes for c in some) / seconds
    goal = "" if ragged else GOALS.get(name, {}).get(str(shape), "")
    print(
        f"{case:32s} {seconds * 1e6:8.1f} us  {speed:5.2f}x {f'(goal {goal})' if goal else '':11s} {rate / 1e12:5.2f} TB/s"
        f"  error {error:.1e} (FP16 SDPA {theirs:.1e})"
        + (f"  {registers} registers, {spills} bytes spilled" if registers else ""),
        flush=True,
    )
    figures = [("time", seconds * 1e6, "us"), ("speed-up over cuDNN BF16", speed, "x"), ("read", rate / 1e12, "TB/s")]
    figures += [("error against float64", error, ""), ("FP16 SDPA's error", theirs, "")]
    figures += [("registers", registers, ""), ("spilled bytes", spills, "")] if registers else []
    return [Row("kv_attention", case, metric, value, unit) for metric, value, unit in figures]


def measure_dense(shape: Shape, reference: float) -> list[Row]:
    """`decode_paged` in BF16, pages of 128."""
    pages = shape.rows * shape.tokens // 128
    sets = []
    for _ in range(_copies(shape.bf16_bytes)):
        k, v = (torch.randn((shape.kv_heads, pages, 128, 128), device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        table = torch.randperm(pages, device=DEVICE).int().view(shape.rows, -1)
        q = torch.randn((shape.rows, shape.heads, 128), device=DEVICE, dtype=torch.bfloat16)
        sets.append((q, k, v, table))
    lengths = torch.full((shape.rows,), shape.tokens, device=DEVICE, dtype=torch.int32)
    scratch = dense.plan_scratch(shape.rows, shape.heads, shape.kv_heads, 128, shape.tokens, DEVICE)
    out = torch.empty_like(sets[0][0])
    q, k, v, table = sets[0]
    dense.decode_paged(q, k, v, table, lengths, 128**-0.5, out, scratch)
    first = [pool[:, table[0].long()].flatten(1, 2)[None].double() for pool in (k, v)]
    truth = sdpa(q[:1, :, None].double(), *first, enable_gqa=True)[:, :, 0]
    error = float((out[:1].double() - truth).norm() / truth.norm())
    del first
    seconds = graph_time([lambda s=s: dense.decode_paged(*s, lengths, 128**-0.5, out, scratch) for s in sets])
    print(
        f"{f'bf16 paged {shape}':32s} {seconds * 1e6:8.1f} us  {reference / seconds:5.2f}x {'':11s}"
        f" {shape.bf16_bytes / seconds / 1e12:5.2f} TB/s  error {error:.1e}",
        flush=True,
    )
    figures = [
        ("time", seconds * 1e6, "us"),
        ("speed-up over cuDNN BF16", reference / seconds, "x"),
        ("error against float64", error, ""),
    ]
    return [Row("kv_attention", f"bf16 paged {shape}", metric, value, unit) for metric, value, unit in figures]


def measure_seal() -> list[Row]:
    """What sealing costs a decode step of 64 rows: each row seals a page of 48 layers x 4 KV heads every 128 steps."""
    k, v = (torch.randn((48 * 4, 128, 128), device=DEVICE).half() for _ in range(2))
    rows = []
    for name, format in FORMATS.items():
        each = graph_time([lambda format=format: seal(k, v, format)]) * 64 / 128
        print(
            f"{f'seal {name}':32s} {each * 1e6:8.1f} us a step of 64 rows, 48 layers, 4 KV heads: {each / STEP:.2%} of 7.5 ms",
            flush=True,
        )
        rows.append(Row("kv_attention", f"seal {name}", "time per step of 64 rows, 48 x 4 heads", each * 1e6, "us"))
        rows.append(Row("kv_attention", f"seal {name}", "share of a step of 7.5 ms", 100 * each / STEP, "%"))
    return rows


def compiled() -> set[tuple[int, int, str]]:
    """(registers, spilled bytes, hash) of the Hopper kernels compiled so far."""
    from forefetch.kernels.attention.gluon.kernel import split_sealed

    kernels = split_sealed.device_caches[torch.cuda.current_device()][0].values()
    return {(kernel.n_regs, kernel.n_spills, kernel.hash) for kernel in kernels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--no-dense", action="store_true", help="leave out the dense paged kernel")
    parser.add_argument("--no-seal", action="store_true", help="leave out sealing")
    parser.add_argument("--write", action="store_true", help="add the rows to results.csv")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    for shape in map(Shape.parse, arguments.shapes.split(",")):
        rows, reference = [], baseline(shape)
        torch.cuda.empty_cache()
        print(
            f"{f'cuDNN SDPA bf16 {shape}':32s} {reference * 1e6:8.1f} us  {shape.bf16_bytes / reference / 1e12:.2f} TB/s",
            flush=True,
        )
        rows.append(Row("kv_attention", f"cuDNN bf16 {shape}", "time", reference * 1e6, "us"))
        if not arguments.no_dense:
            rows += measure_dense(shape, reference)
        for name in filter(None, arguments.formats.split(",")):
            rows += measure_sealed(shape, name, reference)
            torch.cuda.empty_cache()
            if name == "e2m0" and shape.rows > 1:
                rows += measure_sealed(shape, name, reference, ragged=True)
        if arguments.write:
            append(rows)
    sealing = [] if arguments.no_seal else measure_seal()
    if arguments.write:
        append(sealing)


if __name__ == "__main__":
    main()
