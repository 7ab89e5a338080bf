"""Settings of an expert worker."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, cast

from forefetch.errors import ConfigError
from forefetch.kernels.grouped_mlp.formats import ExpertFormat, Kind
from forefetch.rounding import check, rounding
from forefetch.settings import ServiceConfig, setting


@dataclass(frozen=True)
class ExpertConfig(ServiceConfig):
    """An expert worker: holds a shard of a model's routed experts and evaluates them for routers."""

    PROG: ClassVar[str] = "python -m expert_worker"
    ENV: ClassVar[str] = "FOREFETCH_EXPERT_"

    model: str = setting(
        "", "Folder with the checkpoint: config.json and safetensors files. Only this shard is read.", form="DIR"
    )
    allow_synthetic: bool = setting(
        False,
        "Serve --model synthetic:NAME, a known model's shapes with random weights: for measuring, not for answers.",
    )
    device: str = setting(
        "auto", "Where experts are evaluated: cpu, cuda, cuda:1, or auto (cuda if there is one).", form="DEVICE"
    )
    dtype: str = setting(
        "auto",
        """Type of rows and of resident experts; routers must use the same. auto: float32 on a CPU, the checkpoint's own type on
        a GPU.""",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    shard: int = setting(0, "Which of --shards equal parts of every layer's experts this worker holds, from 0.")
    shards: int = setting(1, "Workers that the experts are spread over, at most one for each expert of a layer.")
    placement: str = setting(
        "",
        """Placement file that `forefetch place` made from measured load: says which experts each of --shards workers holds, hot
        ones on several. Unset: equal parts.""",
        form="FILE",
    )
    placed: bool = setting(
        False,
        """Hold no expert at first, but those that the routers' planner names, which may change while this worker runs. --shard
        and --shards are ignored then.""",
    )
    max_experts: int = setting(
        0,
        """Most experts a --placed worker may be given, all layers together: it has memory for so many, from the start. They are
        shared out evenly over layers; while experts move, old and new holders have both. 0: all of the model's.""",
    )
    slots: str = setting(
        "100%",
        """Experts resident on the device at once: a count, or a percentage of those the worker holds. Below 100% all experts
        wait in host memory, hints have some copied into slots ahead of time, and a call waits for what it misses while the
        rest runs; one that needs more experts than there are slots runs in waves. Answers are the same, to the bit.""",
        form="N|N%",
    )
    experts: str = setting(
        "stored",
        """How experts wait in host memory. stored: as in the checkpoint, nothing is rounded. int8 and int4 take a half and a
        quarter of 16-bit memory and of the time of copies; they round weights, so answers change, and every answer names it.
        Slots hold the compute type in any case.""",
        choices=("stored", "int8", "int4"),
    )
    miss: str = setting(
        "auto",
        """How an expert that is in no slot is evaluated. auto: in-place on a router's own GPU, whose steps can then be
        recorded, else wait. wait: once the host has copied it into one; decode steps of a router on a CPU with all
        experts in its process evaluate what is not expected back soon from host memory, to the same bits. in-place:
        where it is. A GPU's kernels read it from pinned host memory, at about the speed of a copy, and which experts
        come into slots is decided and done by the GPU (--placed, and placements that differ between layers, wait
        instead); a CPU makes no slots for experts as stored, since they would be copies in the same memory (of no
        effect there with --experts int8 and int4, which slots hold unpacked). GPUs only: cpu: on the CPU, from host
        memory; sooner: wait or cpu, whichever ends sooner by measured times. Answers of wait and in-place repeat bit
        for bit; cpu forms sums in another order, so near-ties may fall either way. shadow: from a copy in 4 bits, which
        stays in fast memory, while the expert comes in behind if it is used often enough; an approximation, counted and
        named in every answer (not with --placed or --experts int4).
        Routers must be told, with their --miss.""",
        choices=("auto", "in-place", "wait", "cpu", "sooner", "shadow"),
    )
    cache_dir: str = setting(
        "~/.cache/forefetch",
        """Folder that keeps experts converted to --experts int8 or int4, named by what they were made from; none: convert at
        each start. Damaged files are made again; a folder that cannot be written costs a warning.""",
        form="DIR",
    )
    check_copies: bool = setting(
        False, "Compare every slot with host memory after it was filled; one that differs fails the call. Slow; for debugging."
    )
    threads: int = setting(0, "CPU threads for one product; 0 leaves the choice to OMP_NUM_THREADS and torch.")
    max_rows: int = setting(
        4096,
        """Most rows in one frame; a router whose steps may be larger is refused. Scratch memory grows with it: rows x top-k x
        (2 hidden + 3 expert width) elements.""",
    )
    spin_us: int = setting(
        -1,
        """Microseconds that a shared-memory link watches for the next frame before it sleeps. Waking up costs about 30 us;
        spinning costs others the core. -1: 50 where this host has more cores than workers (the router needs one), else 0.""",
    )

    def validate(self) -> None:
        """Raises ConfigError naming the bad setting or pair."""
        super().validate()
        if not self.model:
            raise ConfigError("--model: name the folder of a checkpoint")
        if self.shards < 1 or not 0 <= self.shard < self.shards:
            raise ConfigError(f"--shard {self.shard} and --shards {self.shards}: the shard must be within 0 and shards - 1")
        for name, least in (("threads", 0), ("max_rows", 1), ("spin_us", -1), ("max_experts", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"--{name.replace('_', '-')}: must be at least {least}")
        if self.placed and self.placement:
            raise ConfigError("--placed and --placement: a worker is told by the routers' planner or by a file")
        check(self.experts, self.miss)
        if self.miss == "shadow" and self.placed:
            raise ConfigError("--miss shadow and --placed: experts that come and go have no shadows")
        self.slot_count(100)

    @property
    def rounding(self) -> str:
        """How weights may have been rounded, for routers."""
        return rounding(self.experts, self.miss)

    @property
    def expert_format(self) -> ExpertFormat | None:
        """The host format; None: as stored."""
        return None if self.experts == "stored" else ExpertFormat(cast(Kind, self.experts))

    @property
    def cache_folder(self) -> Path | None:
        """The folder of converted experts; None: there is none."""
        return None if self.cache_dir == "none" else Path(self.cache_dir).expanduser()

    def slot_count(self, experts: int) -> int:
        """Slots for a worker that holds `experts` of them. Raises ConfigError, with the arithmetic, when there is none."""
        number, percent = self.slots.removesuffix("%"), self.slots.endswith("%")
        try:
            count = int(experts * float(number) / 100) if percent else int(number)
        except (ValueError, OverflowError):
            raise ConfigError(f"--slots: {self.slots!r} is neither a count nor a percentage") from None
        if count < 1:
            detail = f" of {experts} experts" if percent else ""
            raise ConfigError(f"--slots: {self.slots}{detail} makes {count} slots; at least 1 is needed")
        return min(count, experts)


def spin_ns(spin_us: int, workers: int) -> int:
    """The setting in nanoseconds. -1: 50 us if this host has more cores than workers, so that the router keeps one."""
    if spin_us < 0:
        spin_us = 50 if len(os.sched_getaffinity(0)) > workers else 0
    return spin_us * 1000
