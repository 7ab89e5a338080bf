"""Settings of a cluster on one host, and what they come to for its processes. No torch, no gRPC."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from forefetch.errors import ConfigError
from forefetch.families import read_spec
from forefetch.settings import Config, setting
from forefetch.shapes import PREFIX, synthetic_config
from forefetch.spec import ModelSpec


@dataclass(frozen=True)
class ClusterConfig(Config):
    """A cluster on this host: a router, expert workers and a KV service, each a process."""

    PROG: ClassVar[str] = "forefetch up"
    ENV: ClassVar[str] = "FOREFETCH_"

    model: str = setting("", "Folder with the checkpoint: config.json, safetensors files, tokenizer.json.", form="DIR")
    allow_synthetic: bool = setting(
        False,
        "Serve --model synthetic:NAME, a known model's shapes with random weights: for measuring, not for answers.",
    )
    workers: int = setting(
        2,
        """Expert workers. The routed experts are spread over them evenly; their number need not divide the experts. With
        --link=local there are none: the router holds the experts itself.""",
    )
    device: str = setting(
        "auto", "Where the router and the workers compute: cpu, cuda, cuda:1, or auto (cuda if there is one).", form="DEVICE"
    )
    link: str = setting(
        "auto",
        """How the router reaches its workers. auto takes shared memory where both see the same one, else gRPC; local puts the
        experts into the router's own process; p2p has recorded steps cross between GPUs without the hosts, see --gpus.""",
        choices=("auto", "local", "shm", "grpc", "p2p"),
    )
    gpus: str = setting(
        "",
        """GPUs of this node by number, as 0,1: the router computes on the first, each of the others has a worker, each holds a
        part of the experts (see --apart), and recorded steps cross between their memories (link p2p) where GPUs reach one
        another's. Instead of --workers and --device. 0,0 puts both on one GPU, where they take turns of milliseconds: to see
        that it works, never to be fast.""",
        form="N,N,...",
    )
    spread: bool = setting(
        False,
        """The router's process holds a part of the experts too, on its own device, as large a one as each worker's, and
        evaluates it while the workers evaluate theirs. With --gpus that is so anyway, see --apart.""",
    )
    apart: bool = setting(
        False,
        """With --gpus: no experts on the router's GPU. Otherwise every GPU holds as large a part, with --gpus 0,1 half, so
        that each reads fewer weights in a step, for as much less room for K and V on the router's. None are there anyway where
        --slots leaves experts in host memory, with --placement, and over other links than p2p.""",
    )
    kv_format: str = setting(
        "auto",
        """How keys and values are kept. auto keeps them in the compute type. Smaller types, and sealed formats of 2 to 4 bits
        with float16 outliers, sinks and tail, hold more tokens in the same memory and are named in every answer as an
        approximation.""",
        choices=("auto", "float32", "float16", "bfloat16", "e2m0", "asym2", "asym3", "mixed", "fp4"),
    )
    slots: str = setting(
        "100%",
        """Experts that each worker keeps on its device at once: a count, or a percentage of those it holds. Others wait in host
        memory and are copied when they are needed.""",
        form="N|N%",
    )
    miss: str = setting(
        "auto",
        """How a worker evaluates an expert that is in no slot: once it was copied (wait; auto on a CPU), where it is (in-place;
        auto on a router's GPU and with --gpus), on a GPU's host (cpu, sooner), or from a copy in 4 bits (shadow: an
        approximation, which answers name); `python -m expert_worker --help` says more.""",
        choices=("auto", "in-place", "wait", "cpu", "sooner", "shadow"),
    )
    placement: str = setting(
        "", "Placement file that `forefetch place` made: which worker holds which experts. Unset: equal parts.", form="FILE"
    )
    planned: bool = setting(
        False,
        """Have the router say which worker holds which experts, and move and replicate single ones by measured load while
        streams run. Instead of equal parts or --placement; not over p2p lanes.""",
    )
    experts: str = setting(
        "stored",
        """How experts wait in host memory. stored: as in the checkpoint. int8 and int4 take less memory and less time to copy,
        round weights, and are named in every answer as an approximation.""",
        choices=("stored", "int8", "int4"),
    )
    trunk: str = setting(
        "stored",
        """How the router keeps the trunk's matrices. int8 halves what a GPU reads of them in a decode step, rounds weights, and
        is named in every answer as an approximation.""",
        choices=("stored", "int8"),
    )
    hints: str = setting(
        "auto",
        """Naming the experts of later layers to workers ahead of time. auto: when that is measured to pay.
        The router's --help says more.""",
        choices=("auto", "plain", "attention", "off"),
    )
    port: int = setting(50051, "Port of the router on loopback; 0 takes a free one.")
    listen: str = setting(
        "",
        "host:port where the router listens, instead of --port on loopback. Its own settings say who may call then.",
        form="HOST:PORT",
    )
    inherit: bool = setting(
        False,
        """Router and workers take their settings from their own variables (FOREFETCH_ROUTER_..., FOREFETCH_EXPERT_...), as
        services of a pod do; only addresses, devices, shards, the link and --drain-s come from here.""",
    )
    drain_s: float = setting(30.0, "Seconds that running requests get to finish when the cluster is stopped.")
    metrics_port: int = setting(0, "Port on loopback for the router's /metrics (Prometheus). 0: not served.")
    kv: bool = setting(True, "Start a KV service, which keeps sealed KV blocks beyond the router's life.")
    kv_dir: str = setting(
        "", "Folder where the KV service keeps blocks and sessions beyond its own life. Unset: in memory.", form="DIR"
    )
    kv_nice: int = setting(
        19,
        """How far the KV service leaves this host's cores to the others, 0 to 19: steps wait less for cores that it holds, and
        cached blocks come late where all cores are always busy. `python -m kv_service --help` says more.""",
    )
    otlp_endpoint: str = setting(
        "", "host:port of an OTLP/gRPC collector for spans of all services. Unset: no spans are sent.", form="HOST:PORT"
    )
    start_s: float = setting(600.0, "Seconds that the services get to load and become ready.")

    def validate(self) -> None:
        """Raises ConfigError naming the bad setting."""
        super().validate()
        if not self.model:
            raise ConfigError("--model: name the folder of a checkpoint")
        if not self.model.startswith(PREFIX) and not (Path(self.model) / "config.json").is_file():
            raise ConfigError(f"--model: {self.model} holds no config.json")
        if self.workers < 1:
            raise ConfigError("--workers: at least 1")
        self.resolved()
        if self.planned and (self.placement or self.link == "local" or self.gpus):
            raise ConfigError("--planned: not with --placement, --link local or --gpus")
        if self.spread and (self.planned or self.placement or self.link == "local"):
            raise ConfigError("--spread: not with --planned, --placement or --link local")
        if self.apart and (self.spread or not self.gpus):
            raise ConfigError("--apart: only with --gpus, and not with --spread")
        for name, port in (("--port", self.port), ("--metrics-port", self.metrics_port)):
            if not 0 <= port <= 65535:
                raise ConfigError(f"{name}: must be within 0 and 65535")

    @property
    def gpu_numbers(self) -> tuple[int, ...]:
        """Those of --gpus, by process, the router's first. ConfigError unless they are at least two."""
        parts = [part.strip() for part in self.gpus.split(",") if part.strip()]
        if not all(part.isdecimal() for part in parts) or len(parts) == 1:
            raise ConfigError("--gpus: must be two or more numbers like 0,1")
        return tuple(map(int, parts))

    @property
    def _distinct(self) -> tuple[int, ...]:
        """GPUs of --gpus, each once, in the order of their first processes."""
        return tuple(dict.fromkeys(self.gpu_numbers))

    def resolved(self) -> ClusterConfig:
        """With --gpus spelled out: how many workers there are, over which link, and whether the router holds experts."""
        gpus = self.gpu_numbers
        if not gpus:
            return self
        if self.device != "auto":
            raise ConfigError("--gpus and --device: --gpus says where everything computes")
        if self.link == "local":
            raise ConfigError("--gpus and --link local: local has everything on one GPU, named by --device")
        link = "p2p" if self.link == "auto" else self.link
        usual = link == "p2p" and self.slots == "100%" and not self.placement
        spread = self.spread or (usual and not self.apart)
        miss = "in-place" if link == "p2p" and self.miss == "auto" else self.miss  # lanes have no host to wait for
        return replace(self, workers=len(gpus) - 1, link=link, spread=spread, miss=miss)

    @property
    def shards(self) -> int:
        """Parts that the experts are cut into."""
        return self.workers + self.spread

    def check_model(self) -> None:
        """Reads config.json before anything is started for it: services would say the same, each after its own start.

        Raises UnsupportedModel, and ConfigError for more parts than the model has experts."""
        synthetic = self.model.startswith(PREFIX)
        spec = read_spec(synthetic_config(self.model), {}, self.model) if synthetic else ModelSpec.load(Path(self.model))
        most = spec.num_experts - self.spread
        if self.link != "local" and self.workers > most and not self.placement:
            raise ConfigError(
                f"--workers: at most {most}, got {self.workers}: {spec.num_experts} experts, one for each at least"
            )

    def device_of(self, place: int) -> str:
        """The device of the router (0) or of worker place - 1, as processes number what `visible` leaves them."""
        return f"cuda:{self._distinct.index(self.gpu_numbers[place])}" if self.gpus else self.device

    def visible(self, already: str | None) -> dict[str, str]:
        """What makes a process see the GPUs of --gpus in their order, so that the router's is its first. already: this
        process's CUDA_VISIBLE_DEVICES, which --gpus counts in."""
        if not self.gpus:
            return {}
        names = already.split(",") if already else None
        if names is not None and max(self.gpu_numbers) >= len(names):
            raise ConfigError(f"--gpus {self.gpus}: {len(names)} are visible to this process")
        return {"CUDA_VISIBLE_DEVICES": ",".join(names[n] if names else str(n) for n in self._distinct)}
