"""Settings of the router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from forefetch.errors import ConfigError
from forefetch.rounding import check, rounding
from forefetch.rpc.auth import AuthConfig
from forefetch.settings import setting
from router_service.discovery_config import DiscoveryConfig, service_of

SEALED = ("e2m0", "asym2", "mixed", "asym3", "fp4")
KV_FORMATS = ("auto", "float32", "bfloat16", "float16", *SEALED)
CUDA_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class RouterConfig(AuthConfig, DiscoveryConfig):
    """The router: attention, gating and sampling, and the API that users call."""

    PROG: ClassVar[str] = "python -m router_service"
    ENV: ClassVar[str] = "FOREFETCH_ROUTER_"

    model: str = setting(
        "", "Folder of the checkpoint in Hugging Face form. The router reads everything but routed experts. Required."
    )
    allow_synthetic: bool = setting(
        False,
        "Serve --model synthetic:NAME, a known model's shapes with random weights: for measuring, not for answers.",
    )
    device: str = setting("auto", "Where the trunk runs: cpu, cuda, cuda:1, or auto (cuda if there is one).")
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
    kv: str = setting(
        "",
        """KV services as host:port,host:port. They take sealed blocks and give them back to later requests with the same
        beginning. Blocks and sessions are spread over them by their addresses as written here, so every router must write
        the same. Unset: none.""",
    )
    kv_token_file: str = setting(
        "",
        """File with the bearer token that this router shows to KV services. What its own callers are allowed is for
        --auth-tokens: each tenant's blocks and sessions are apart from the others', under whatever name the router has.""",
    )
    kv_fetch_s: float = setting(
        5.0,
        """Most seconds that a request waits for cached blocks of its prompt; what has not come by then is computed. Less
        when computing is estimated to take less. 0: prompts are always computed.""",
    )
    session_lag_s: float = setting(
        0.25,
        """How often new tokens of sessions are written to their logs, seconds. A router that goes on with an answer after this
        one died generates what was not written yet again.""",
    )
    session_tail_mb: float = setting(
        16.0,
        """Most MiB per second of K and V behind the last full page that go to the logs of sessions, the oldest first, so that
        a router that goes on with an answer need not compute them. 0: none; they are computed again, to the same tokens.""",
    )
    kv_format: str = setting(
        "auto",
        """How K and V are kept. auto: the compute type, nothing is rounded. float16 halves float32's memory, is
        counted as an approximation and saturates beyond 65504. e2m0 and asym2 take 2 bits per element and their scales,
        mixed a third bit for the worst channels of K, asym3 3 bits, fp4 4 bits; they seal pages of tokens older than
        --kv-recent, decode them inside attention, and are counted as approximations. What each costs in quality:
        `forefetch quality`.""",
        choices=KV_FORMATS,
    )
    kv_sinks: int = setting(
        4,
        """Sealed formats: first tokens of a sequence that stay float16, because attention leans on them more than on any
        others. Each costs what one token costs in float16.""",
    )
    kv_recent: int = setting(
        -1,
        """Sealed formats: newest tokens that stay float16. A request's float16 tail holds up to --page-size more. Fewer save
        memory on short contexts and cost quality everywhere. 0: pages are sealed as soon as they are full. Else KV services
        also get float16 rows where requests are likely to go on, so that an answer behind a cached prefix is the one that would
        be computed without; a prompt that parts from known ones at a new place is computed once more. -1: 112, or 32 for
        fp4: the most that leaves 4,096 tokens 80 % smaller than float16 even with a full tail (fp4: 69 %).""",
    )
    kv_outliers: int = setting(
        1,
        """Sealed formats: channels of K, per page and head, that stay float16: those that quantising hurts most. 0 to 6, each
        0.06 bits per element at head dim 128.""",
    )
    kv_thirds: int = setting(
        32,
        """mixed: channels of K, per page and head, that get a third bit: those that gain most by it. A multiple of 16 up to 96;
        16 cost 0.06 bits per element at head dim 128.""",
    )
    kv_exempt_layers: str = setting(
        "",
        """Sealed formats: layers that keep float16 pages, as 0,5 counted from 0. `forefetch quality --layers` says which layers
        a model is sensitive in.""",
    )
    page_size: int = setting(
        128, """Tokens in a KV page. Smaller pages waste less memory on short requests and cost more book-keeping."""
    )
    kv_memory_mb: int = setting(
        1024,
        """Memory for K and V in MiB, allocated at start. Requests wait while their worst case (prompt + max_tokens)
        does not fit.""",
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
    handover_mb: int = setting(
        256,
        """Most MiB of sealed blocks waiting for the KV service. Blocks beyond it are dropped and counted; steps never
        wait.""",
    )
    hints: str = setting(
        "auto",
        """Naming the experts of the next two layers to workers, so that these can copy them in time. Answers do not depend on
        it. plain: heads alone. attention: the attention of the layers ahead is run on estimates, which is much surer and costs
        about as much again as all attention and gates of the step. auto: while some worker has fewer slots than experts, these
        and off are tried for 8 steps each; what adds least to a step (waiting for copies, and heads) runs the next 1,024;
        without copies off. plain and attention also run, and are counted, without. Compiled steps with a local worker name a
        layer's experts themselves, right before its attention: there plain means that, and auto tries it against off.""",
        choices=("auto", "plain", "attention", "off"),
    )
    batch_buckets: str = setting(
        "auto",
        """Row counts that steps are padded to, ascending, comma separated, so that device buffers keep a few fixed
        shapes. none: no padding. auto: powers of two on a GPU, none on a CPU, where padding only costs time.""",
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
        positive = (
            "page_size",
            "kv_memory_mb",
            "max_batch",
            "max_step_tokens",
            "max_waiting",
            "default_max_tokens",
            "trace_steps",
        )
        for name in (*positive, "trace_requests", "handover_mb"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')}: must be at least 1")
        for name in (
            "max_context",
            "prompt_rows",
            "threads",
            "worker_grace_s",
            "start_timeout_s",
            "kv_fetch_s",
            "session_tail_mb",
        ):
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name.replace('_', '-')}: must not be negative")
        self._check_p2p()
        if self.plan and (self.workers == "local" or "local" in self.addresses()):
            raise ConfigError("--plan: name the --workers; what the local one holds does not move")
        for name in ("step_timeout_s", "session_lag_s", "p2p_patience_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"--{name.replace('_', '-')}: must be positive")
        if self.max_step_tokens <= self.max_batch:
            raise ConfigError(
                f"--max-step-tokens {self.max_step_tokens} and --max-batch {self.max_batch}: a step must hold a token of every "
                "running request and room for a prompt"
            )
        if self.kv_recent < -1:
            raise ConfigError("--kv-recent: must be -1 or more")
        check(self.experts, self.miss)
        self.exempt_layers()
        self.buckets("cpu")
        self.addresses()
        self.kv_addresses()

    def _check_p2p(self) -> None:
        if any(rows < 0 or rows == 1 for rows in (self.p2p_halves_from, self.halves_from)):
            raise ConfigError("--p2p-halves-from, --halves-from: must be 0 or at least 2")
        if self.link == "p2p" and self.workers == "local":
            raise ConfigError("--link p2p: name the --workers; the local one needs no link")
        if self.link == "p2p" and self.miss == "shadow":
            raise ConfigError("--miss shadow and --link p2p: lanes do not tell what was shadowed")

    @property
    def rounding(self) -> str:
        """What workers' weights must have been rounded to."""
        return rounding(self.experts, self.miss)

    def exempt_layers(self) -> frozenset[int]:
        """Layers that are not sealed."""
        parts = [part.strip() for part in self.kv_exempt_layers.split(",") if part.strip()]
        if parts and self.kv_format not in SEALED:
            raise ConfigError(f"--kv-exempt-layers: --kv-format {self.kv_format} seals none")
        if any(not part.isdecimal() for part in parts):
            raise ConfigError("--kv-exempt-layers: must be numbers of layers like 0,5")
        return frozenset(map(int, parts))

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
        return _addresses("--workers", self.workers, form, "local")

    @property
    def service(self) -> tuple[str, str] | None:
        """(namespace, name) of the Service whose workers come and go; None for a list or the local worker."""
        return service_of(self.workers)

    def kv_addresses(self) -> tuple[str, ...]:
        """The KV services' addresses; empty: none."""
        return _addresses("--kv", self.kv, "host:port,host:port") if self.kv else ()


def _addresses(flag: str, text: str, form: str, *names: str) -> tuple[str, ...]:
    addresses = tuple(part.strip() for part in text.split(",") if part.strip())
    if not addresses or any(":" not in address and address not in names for address in addresses):
        raise ConfigError(f"{flag}: must be {form}")
    if len(set(addresses)) != len(addresses):
        raise ConfigError(f"{flag}: names an address twice")
    return addresses
