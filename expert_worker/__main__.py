"""Starts an expert worker: `python -m expert_worker --model DIR --shard 0 --shards 2 --listen 127.0.0.1:0`."""

from __future__ import annotations

import sys

import torch

from expert_worker.config import ExpertConfig, spin_ns
from expert_worker.loading import Loader
from expert_worker.placer import Placer
from expert_worker.server import MAX_THREADS, SERVICE, ExpertService
from forefetch import rpc, settings, shm
from forefetch.errors import ConfigError, UnsupportedModel
from forefetch.telemetry.metrics import ExpertMetrics, new_registry

STUCK_S = 60.0
"""A worker whose call has not ended in this time says that it does not live."""


def serve(config: ExpertConfig) -> None:
    """Binds, loads the shard, and serves until a signal."""
    service, registry = ExpertService(spin_ns(config.spin_us, config.shards)), new_registry()
    ExpertMetrics(registry, service.stats)
    shm.reclaim()
    # A call of any size ends within the router's step timeout; one that takes three times as long will not end.
    pulse = rpc.Pulse(lambda: service.core.calls if service.core else 0, lambda: service.busy, STUCK_S)
    server = rpc.serve_sync(
        config,
        SERVICE,
        service.register,
        max_workers=MAX_THREADS,
        busy=lambda: service.busy,
        registry=registry,
        vitals=rpc.Vitals(alive=pulse),
    )
    try:
        with rpc.loading("experts") as on_progress:
            core = Loader(config).core(on_progress)
        if config.placed:
            service.placer = Placer(core)
        rpc.settle()
        service.core = core
        server.run()
    except UnsupportedModel as error:
        raise ConfigError(f"--model: {error}") from error
    finally:
        server.stop()


def main() -> int:
    """Entry point of the process."""
    config = settings.parse(ExpertConfig)
    rpc.setup_logging(config.log_level)
    if config.threads:
        torch.set_num_threads(config.threads)
    return rpc.run_main(config.PROG, lambda: serve(config))


if __name__ == "__main__":
    sys.exit(main())
