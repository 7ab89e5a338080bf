"""What `--miss shadow` costs a model's predictions: held-out text, experts in few slots, absent ones from copies in four bits.

    python -m benchmarks.shadow_quality [--model models/reference] [--tokens 1024] [--window 512] [--slots 25 50 75] [--write]

Each layer has a worker's `ShadowedExperts` of its own with a share of slots, and meets a window's tokens one by one, as in
decoding at one stream; no hints, so this is the worst share of absent experts. Between tokens what was missed comes in, or is
not worth it. Compared in one run: everything exact; everything from shadows (`--experts int4`). Perplexity relative to exact,
its 95 % interval, greedy agreement, and the share of experts that were shadowed.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.results import Row, append
from expert_worker.experts import Experts, Storage
from expert_worker.shadowed import ShadowedExperts
from forefetch.kernels.grouped_mlp.formats import ExpertFormat
from forefetch.weights import Checkpoint
from forefetch.wire import LayerCall
from router_service.quality.cells import Cell
from router_service.quality.measure import Meter, windows
from router_service.quality.setups import Setup

CPU = torch.device("cpu")


class TokenByToken:
    """The trunk's experts, those of each layer by themselves. share: percent in slots; 0: all of them int4, in slots."""

    def __init__(self, meter: Meter, checkpoint: Checkpoint, share: int) -> None:
        spec = meter.spec
        self.needed = self.shadowed = 0
        storage = Storage(spec.num_experts * share // 100) if share else Storage(10**6, ExpertFormat("int4"))
        self._of: dict[int, Experts] = {}
        for layer in spec.moe_layers:
            held = {each: tuple(range(spec.num_experts)) if each == layer else () for each in spec.moe_layers}
            kind = ShadowedExperts if share else Experts
            self._of[layer] = kind(spec, checkpoint, held, storage, device=CPU, dtype=torch.float32)

    def send(self, batch: Any, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        """One token after the other."""
        experts, self._rows = self._of[layer], torch.empty_like(x)
        row = np.zeros(ids.shape[1], np.int32)
        for token in range(len(x)):
            one = slice(token, token + 1)
            call = LayerCall(token, layer, x[one], row, ids[token].int().numpy(), weights[token].float().numpy())
            _, found = experts.forward(call, self._rows[one])
            self.needed += ids.shape[1]
            self.shadowed += found.shadowed
            while experts.residency is not None and (experts.residency.later or experts.residency.flying):
                time.sleep(0)

    def add(self, out: Tensor, layer: int, stamps: Any) -> int:
        """Adds what `send` computed."""
        out += self._rows
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/reference"))
    parser.add_argument("--tokens", type=int, default=1024, help="of each text (%(default)s)")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--slots", type=int, nargs="+", default=[25, 50, 75], metavar="PERCENT")
    parser.add_argument("--write", action="store_true", help="add rows to results.csv")
    args = parser.parse_args()
    meter, checkpoint, exact, rows = Meter(args.model, CPU), Checkpoint(args.model), Setup("fp16", None), list[Row]()
    texts = windows(args.model, sorted((args.model / "heldout").glob("*.txt")), args.window, args.tokens)
    with torch.inference_mode():
        plain = [meter.score(exact, window) for window in texts]
        for share in (0, *args.slots):
            meter._experts = experts = TokenByToken(meter, checkpoint, share)  # type: ignore[assignment]
            cell = Cell()
            for window, (nats, likeliest) in zip(texts, plain, strict=True):
                found, chosen = meter.score(exact, window)
                cell.add(found, nats, chosen == likeliest)
            shadowed = experts.shadowed / experts.needed if share else 1.0
            name = f"{share}% slots" if share else "all experts int4"
            print(
                f"{name:18} perplexity {cell.change.percent()} %  same greedy token {cell.agreement:.1%}  "
                f"shadowed {shadowed:.1%}",
                flush=True,
            )
            values = {"perplexity change": cell.change.value, "greedy agreement": cell.agreement, "shadowed": shadowed}
            case = f"{args.model.name}, {len(texts)} windows of {args.window}, {name}"
            rows += [Row("shadow_quality", case, metric, 100 * value, "%") for metric, value in values.items()]
    if args.write:
        append(rows)


if __name__ == "__main__":
    main()
