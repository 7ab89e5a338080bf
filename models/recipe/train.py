"""Train the reference model: `python -m models.recipe.train --data DIR --out DIR --minutes 8.5`.

Stops itself by the clock. The schedule runs over `--total-minutes`, so that a run can stop in the middle, leave a
checkpoint (weights, both optimizers, time spent) and be continued by the same command. `--smoke` runs a tiny model on
a CPU in seconds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.recipe import batches, export, pack, report
from models.recipe.corpus import DOMAINS
from models.recipe.model import Model, ModelConfig
from models.recipe.optimizer import Optimizer, learning_rate

SMOKE = ModelConfig(vocabulary=8192, hidden=128, layers=2, heads=2, kv_heads=1, experts=8, top_k=2, expert_width=32)


@dataclass(frozen=True)
class TrainConfig:
    """How one model is trained.

    rate: peak learning rate of both optimizers.
    tokens: tokens in a batch; more makes better use of the GPU, fewer gives more steps in the same time.
    length, long_length: tokens in a sequence, before and after `long_from` of the total time.
    balance, z: weights of the router's load-balance and logit-size losses, each averaged over layers.
    shares: part of each batch by domain.
    """

    rate: float = 6e-3
    tokens: int = 131_072
    length: int = 1024
    long_length: int = 4096
    long_from: float = 0.85
    balance: float = 0.01
    z: float = 1e-4
    seed: int = 1
    shares: dict[str, float] = field(default_factory=lambda: {"conversation": 0.06, "code": 0.58, "prose": 0.36})


class Trainer:
    """One model, its optimizers and its clock."""

    def __init__(self, model: Model, config: TrainConfig, data: dict[str, dict[str, pack.Stream]]) -> None:
        self.model, self.config = model, config
        self.device = model.embedding.device
        self.optimizer = Optimizer(model)
        self.mixture = batches.Mixture(data["training"], config.shares, self.device, config.seed)
        self.heldout = data["heldout"]
        self.steps = self.seen = 0
        self.spent = 0.0  # seconds of training in earlier processes
        self.log: list[dict[str, Any]] = []

    def compile(self) -> None:
        """One forward and backward pass before the clock starts, so that no training time goes into compilation."""
        length = self.config.length
        ids = torch.zeros(self.config.tokens // length, length + 1, dtype=torch.long, device=self.device)
        self.model(ids)[0].backward()
        self.model.zero_grad()

    def step(self, ids: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        """One update on windows [B, S+1]; returns the language loss and the balance loss."""
        loss, routing = self.model(ids)
        balance = torch.stack([r.balance for r in routing]).mean()
        z = torch.stack([r.z for r in routing]).mean()
        (loss + self.config.balance * balance + self.config.z * z).backward()
        self.optimizer.step(rate)
        self.steps += 1
        self.seen += ids.shape[0] * (ids.shape[1] - 1)
        return loss.detach(), balance.detach()

    def run(self, seconds: float, total: float, eval_every: float) -> None:
        """Train until `seconds` have passed here, on a schedule of `total` seconds over all processes."""
        began = time.monotonic()
        config, next_eval, marked = self.config, 0.0, (0.0, self.seen)
        source: Iterator[Tensor] | None = None
        long = False
        while (elapsed := time.monotonic() - began) < seconds:
            progress = (self.spent + elapsed) / total
            if source is None or (progress >= config.long_from and not long):
                long = progress >= config.long_from
                length = config.long_length if long else config.length
                source = self.mixture.batches(config.tokens // length, length)
            rate = learning_rate(self.steps, progress, config.rate)
            loss, balance = self.step(next(source), rate)
            if self.steps % 10 == 0:
                loss.item()  # the clock must not run ahead of the device
            if elapsed >= next_eval and self.steps > 1:
                next_eval = elapsed + eval_every
                speed = (self.seen - marked[1]) / max(elapsed - marked[0], 1.0)
                marked = (elapsed, self.seen)
                self.note(progress, rate, speed, float(loss), float(balance))
        self.spent += time.monotonic() - began

    def note(self, progress: float, rate: float, speed: float, loss: float, balance: float) -> None:
        """Print and keep one line of the loss curve with held-out losses."""
        heldout = {d: round(self.quick_loss(d), 4) for d in self.heldout}
        line = {"step": self.steps, "progress": round(progress, 4), "tokens": self.seen, "rate": round(rate, 6)}
        line |= {"tokens/s": round(speed), "loss": round(loss, 4), "balance": round(balance, 4), **heldout}
        self.log.append(line)
        print(json.dumps(line), flush=True)

    def quick_loss(self, domain: str) -> float:
        """Held-out loss on one training-shaped batch of a domain."""
        length = self.config.length
        ids = batches.even_windows(self.heldout[domain], length, self.config.tokens // length, self.device)
        if ids.shape[0] < self.config.tokens // length:  # one shape, one compilation
            ids = ids.repeat(-(-(self.config.tokens // length) // ids.shape[0]), 1)[: self.config.tokens // length]
        return float(self.model(ids)[0].detach())  # with gradients on: the compiled graph of training serves

    def save(self, path: Path) -> None:
        """Everything needed to continue."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state(), "log": self.log}
        torch.save(state | {"steps": self.steps, "seen": self.seen, "spent": self.spent}, path)

    def load(self, path: Path) -> None:
        """Continue from `save`."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load(state["optimizer"])
        self.steps, self.seen, self.spent, self.log = state["steps"], state["seen"], state["spent"], state["log"]
        self.mixture.rng = np.random.default_rng(self.config.seed + self.steps)  # other windows than the first process


def read_data(folder: Path) -> dict[str, dict[str, pack.Stream]]:
    """Token streams by split and domain."""
    return {split: {domain: pack.load(folder, f"{split}-{domain}") for domain in DOMAINS} for split in ("training", "heldout")}


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that `prepare` wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights and the log")
    parser.add_argument("--checkpoint", type=Path, default=None, help="continue from this file if it exists; write it")
    parser.add_argument("--minutes", type=float, default=8.5, help="training time of this process")
    parser.add_argument("--total-minutes", type=float, default=None, help="length of the schedule (default: --minutes)")
    parser.add_argument("--rate", type=float, default=TrainConfig.rate)
    parser.add_argument("--tokens", type=int, default=TrainConfig.tokens)
    parser.add_argument("--eval-every", type=float, default=30.0, help="seconds between held-out losses")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="tiny model and batches")
    return parser.parse_args()


def main() -> None:
    """Train, save, report."""
    arguments = parse()
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    config = TrainConfig(rate=arguments.rate, tokens=arguments.tokens)
    if arguments.smoke:
        config = TrainConfig(rate=arguments.rate, tokens=1024, length=128, long_length=256)
    dtype = torch.bfloat16 if cuda else torch.float32
    model = Model(SMOKE if arguments.smoke else ModelConfig(), dtype, compiled=cuda and not arguments.no_compile)
    trainer = Trainer(model.to(device), config, read_data(arguments.data))
    if arguments.checkpoint and arguments.checkpoint.exists():
        trainer.load(arguments.checkpoint)
    trainer.compile()
    trainer.run(arguments.minutes * 60, (arguments.total_minutes or arguments.minutes) * 60, arguments.eval_every)
    arguments.out.mkdir(parents=True, exist_ok=True)
    export.save_parts(model, arguments.out)
    if arguments.checkpoint:
        trainer.save(arguments.checkpoint)
    summary = {"steps": trainer.steps, "tokens": trainer.seen, "seconds": round(trainer.spent, 1), "log": trainer.log}
    summary["device"] = torch.cuda.get_device_name() if cuda else "cpu"
    summary |= report.final(model, trainer.heldout, arguments.data)
    (arguments.out / "training.json").write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
