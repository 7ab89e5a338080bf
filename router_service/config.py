"""Settings of the router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from forefetch.errors import ConfigError
from forefetch.rounding import check, rounding
from forefetch.rpc.auth import AuthConfig
from forefetch.settings import flag, setting
from router_service.cache_config import CacheConfig, addresses_of
from router_service.discovery_config import DiscoveryConfig, service_of

CUDA_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class RouterConfig(AuthConfig, DiscoveryConfig, CacheConfig):
    """The router: attention, gating and sampling, and the API that users call."""

    PROG: ClassVar[str] = "python -m router_service"
    ENV: ClassVar[str] = "FOREFETCH_ROUTER_"

    model: str = setting(
        "",
        "Folder of the checkpoint in Hugging Face form. The router reads everything but routed experts. Required.",
        form="DIR",
    )
    allow_synthetic: bool = setting(
        False,
        "Serve --model synthetic:NAME, a known model's shapes with random weights: for measuring, not for answers.",
    )
    device: str = setting("auto", "Where the trunk runs: cpu, cuda, cuda:1, or auto (cuda if there is one).", form="DEVICE")
    dtype: str = setting(
        "auto",
        """Type the trunk computes in; workers must use the same. auto: float32 on a CPU (CPUs are slow at 16 bits),
        the checkpoint's own type on a GPU.""",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    workers: str = setting(
        "local",
        """Expert workers as host:port,host:port. Together they must hold every expert. local: one worker inside this
        process, holding all experts, without a wire between. local,host:port: the others hold a part of the experts and
        this process, on its own device, as large a one: that of --shard 0 if local is named first, of as many --shards as
        names. kubernetes:NAMESPACE/SERVICE: those of a headless Service, which may come and go; one of its routers says
        which worker holds what.""",
        form="HOST:PORT,...",
    )
    link: str = setting(
        "auto",
        """Data path to workers. auto: shared memory where router and worker can map the same segment, else gRPC.
        Forcing shm fails at connect time where it cannot work. p2p: recorded steps cross between the memories of the GPUs
        of one node, without the hosts; other steps, and all while such lanes are down, as with auto. On CPUs p2p runs the
        same protocol through shared memory, which is for trying it out: auto is faster there.""",
        choices=("auto", "shm", "grpc", "p2p"),
    )
    p2p_patience_s: float = setting(
        2.0,
        """link p2p: seconds that router or worker waits for a signal of the other inside a step before it gives the lanes
        up; the step is then computed again over the other link. Must exceed the slowest layer of a prompt's chunk.""",
    )
    p2p_halves_from: int = setting(
        16,
        """link p2p: decode steps of at least so many rows, padding included, cross in two halves that take turns: one's
        attention runs while the workers evaluate the other's experts, whose weights are then read twice. 0: never, as with
        a local worker beside others: the router's device evaluates its own share meanwhile.""",
    )
    halves_from: int = setting(
        0,
        """links shm and grpc: decode steps of at least so many rows cross in two halves that take turns, as over p2p; a
        worker then has two connections to the router, and experts that both halves choose are read twice. It pays where
        workers do not compute on the router's cores. Steps that heads watch (--hints) are not divided. 0: never.""",
    )
    slots: str = setting(
        "100%",
        """Device slots of the local worker: a share of its experts, or a count. Ignored when --workers names
        addresses.""",
        form="N|N%",
    )
    miss: str = setting(
        "auto",
        """How the local worker evaluates an expert that is in no slot, see the worker's --miss. With in-place on a GPU, which
        auto is here, steps with fewer slots than experts are recorded as those with all are, and heads with them. shadow, an
        approximation that every answer names, must be set here for workers elsewhere, too.""",
        choices=("auto", "in-place", "wait", "cpu", "sooner", "shadow"),
    )
    experts: str = setting(
        "stored",
        """How experts' weights are kept: stored as in the checkpoint, int8 or int4, which round them and are named in every
        answer. Workers must use the same; the local worker does.""",
        choices=("stored", "int8", "int4"),
    )
    trunk: str = setting(
        "stored",
        """How the trunk's matrices are kept: stored as in the checkpoint, or int8, which rounds projections, dense and shared
        MLPs and the head to 8 bits and a scale per output, and is named in every answer. On a GPU, decode steps read half as
        much of the trunk; on a CPU nothing is gained. Norms, gates and the embedding stay as stored.""",
        choices=("stored", "int8"),
    )
    max_batch: int = setting(
        64, """Most requests that run at a time. Each decode step computes one token of every one of them."""
    )
    max_step_tokens: int = setting(
        512,
        """Most tokens a step computes. What decoding leaves of it goes to chunks of prompts: larger values shorten the
        time to the first token of long prompts and lengthen the steps that running streams share with them. Must
        exceed --max-batch.""",
    )
    prompt_rows: int = setting(
        0,
        """Most prompt tokens in a step while others decode: the longest pause that a prompt brings to running streams. Fewer
        make its own first token later. 0: whatever decoding leaves of --max-step-tokens.""",
    )
    max_context: int = setting(
        0, """Most tokens of prompt plus answer. 0: what the model was made for. Larger than the model's is refused."""
    )
    max_waiting: int = setting(
        256, """Requests that may wait for a place. One more is refused with RESOURCE_EXHAUSTED and a time to come back."""
    )
    default_max_tokens: int = setting(512, "max_tokens of requests that set none.")
    unread_s: float = setting(
        60.0,
        """Seconds that a message of a stream may wait for its reader to make room for it. After it the stream ends in
        RESOURCE_EXHAUSTED, behind what was sent. Streams whose answer is complete and unread are kept in memory until then; of
        these, and of those that are being opened, there may be as many as --max-batch and --max-waiting together.""",
    )
    worker_grace_s: float = setting(
        30.0,
        """Seconds that streams pause for a lost worker to come back. After it, every request ends in UNAVAILABLE
        naming the worker; new ones are refused at once until the worker is there.""",
    )
    step_timeout_s: float = setting(
        20.0,
        """Seconds a worker may take for one layer before its link counts as broken. Must exceed the slowest prefill
        chunk's layer.""",
    )
    start_timeout_s: float = setting(
        600.0,
        """Seconds to wait at start for workers that hold all experts; health says NOT_SERVING meanwhile. Then the
        router exits.""",
    )
    hints: str = setting(
        "auto",
        """Naming the experts of the next two layers to workers, so that these can copy them in time. Answers do not depend on
        it. plain: heads alone. attention: the attention of the layers ahead is run on estimates, which is much surer and costs
        about as much again as all attention and gates of the step. auto: while some worker has fewer slots than experts, these
        and off are tried for 8 steps each; what adds least to a step (waiting for copies, and heads) runs the next 1,024;
        without copies off. plain and attention also run, and are counted, without. Compiled steps with a local worker name a
        layer's experts themselves, right before its attention: there plain means that, and auto tries it against off. Over
        p2p lanes heads run within the step, always without the attention; with auto while some worker copies experts.""",
        choices=("auto", "plain", "attention", "off"),
    )
    batch_buckets: str = setting(
        "auto",
        """Row counts that steps are padded to, ascending, comma separated, so that device buffers keep a few fixed
        shapes. none: no padding. auto: powers of two on a GPU, none on a CPU, where padding only costs time.""",
        form="N,N,...",
    )
    graphs: str = setting(
        "auto",
        """Whether steps are recorded as CUDA graphs, one for each bucket of rows, and replayed. auto: when router and experts
        share one GPU (--workers local) and every expert is resident. Recording takes a second or two at start.""",
        choices=("auto", "off"),
    )
    threads: int = setting(0, "CPU threads for tensor arithmetic. 0: as many as PyTorch finds cores.")
    trace_steps: int = setting(
        1024, """Steps whose timings are kept for `forefetch trace`. Memory: steps x layers x (128 + 88 x workers) bytes."""
    )
    trace_requests: int = setting(1024, "Finished requests that `forefetch trace` can still show.")

    def validate(self) -> None:
        """Raises ConfigError naming the setting or pair that is wrong."""
        super().validate()
        if not self.model:
            raise ConfigError("--model: is required")
        at_least_1 = ("max_batch", "max_step_tokens", "max_waiting", "default_max_tokens", "trace_steps", "trace_requests")
        for name in at_least_1:
            if getattr(self, name) < 1:
                raise ConfigError(f"{flag(name)}: must be at least 1")
        for name in ("max_context", "prompt_rows", "threads", "worker_grace_s", "start_timeout_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{flag(name)}: must not be negative")
        for name in ("step_timeout_s", "p2p_patience_s", "unread_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{flag(name)}: must be positive")
        self._check_p2p()
        if self.plan and (self.workers == "local" or "local" in self.addresses()):
            raise ConfigError("--plan: name the --workers; what the local one holds does not move")
        if self.max_step_tokens <= self.max_batch:
            raise ConfigError(
                f"--max-step-tokens {self.max_step_tokens} and --max-batch {self.max_batch}: a step must hold a token of every "
                "running request and room for a prompt"
            )
        check(self.experts, self.miss)
        self.buckets("cpu")
        self.addresses()

    def _check_p2p(self) -> None:
        if any(rows < 0 or rows == 1 for rows in (self.p2p_halves_from, self.halves_from)):
            raise ConfigError("--p2p-halves-from, --halves-from: must be 0 or at least 2")
        if self.link == "p2p" and self.workers == "local":
            raise ConfigError("--link p2p: name the --workers; the local one needs no link")
        if self.link == "p2p" and self.miss == "shadow":
            raise ConfigError("--miss shadow and --link p2p: lanes do not tell what was shadowed")

    @property
    def max_streams(self) -> int:
        """Most open calls with prompts: those with a place in batch or queue, and as many that are being opened or not read."""
        return 2 * (self.max_batch + self.max_waiting)

    @property
    def rounding(self) -> str:
        """What workers' weights must have been rounded to."""
        return rounding(self.experts, self.miss)

    def halves(self) -> int:
        """From how many rows on steps cross links in halves; 0 where none do."""
        return 0 if "local" in (self.workers, *self.addresses()) or self.link == "p2p" else self.halves_from

    def buckets(self, device: str) -> tuple[int, ...]:
        """The row counts that steps are padded to on `device`; empty: no padding."""
        if self.batch_buckets == "none":
            return ()
        if self.batch_buckets == "auto":
            return CUDA_BUCKETS if device.startswith("cuda") else ()
        try:
            buckets = tuple(int(part) for part in self.batch_buckets.split(","))
        except ValueError:
            raise ConfigError("--batch-buckets: must be auto, none or numbers like 1,2,4,8") from None
        if list(buckets) != sorted(set(buckets)) or buckets[0] < 1:
            raise ConfigError("--batch-buckets: must be ascending positive numbers")
        return buckets

    def addresses(self) -> tuple[str, ...]:
        """The workers' addresses; empty for the local worker, and for those of a Service."""
        if self.workers == "local" or self.service:
            return ()
        form = "local, host:port,host:port, local,host:port or kubernetes:NAMESPACE/SERVICE"
        return addresses_of("--workers", self.workers, form, "local")

    @property
    def service(self) -> tuple[str, str] | None:
        """(namespace, name) of the Service whose workers come and go; None for a list or the local worker."""
        return service_of(self.workers)
