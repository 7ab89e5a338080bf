"""Settings of K and V in a router: how they are kept, and the KV services that take them over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from forefetch.errors import ConfigError
from forefetch.settings import ServiceConfig, flag, setting

SEALED = ("e2m0", "asym2", "mixed", "asym3", "fp4")
KV_FORMATS = ("auto", "float32", "bfloat16", "float16", *SEALED)


@dataclass(frozen=True)
class CacheConfig(ServiceConfig):
    """Formats and memory of the cache, hand-over of sealed blocks, cached prefixes, sessions."""

    TITLE: ClassVar[str] = "K and V, cached prefixes, sessions"

    kv: str = setting(
        "",
        """KV services as host:port,host:port. They take sealed blocks and give them back to later requests with the same
        beginning. Blocks and sessions are spread over them by their addresses as written here, so every router must write
        the same. Unset: none.""",
        form="HOST:PORT,...",
    )
    kv_token_file: str = setting(
        "",
        """File with the bearer token that this router shows to KV services. What its own callers are allowed is for
        --auth-tokens: each tenant's blocks and sessions are apart from the others', under whatever name the router has.""",
        form="FILE",
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
        a router that goes on with an answer need not compute them. Where computing a tail takes less time than
        --session-lag-s, by this router's prompts, none is written, unless prefixes need rows (--kv-recent), since without a
        tail more than the tail would be computed. 0: none; they are computed again, to the same tokens.""",
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
        form="N,N,...",
    )
    page_size: int = setting(
        128, """Tokens in a KV page. Smaller pages waste less memory on short requests and cost more book-keeping."""
    )
    kv_memory_mb: int = setting(
        1024,
        """Memory for K and V in MiB, allocated at start. Requests wait while their worst case (prompt + max_tokens)
        does not fit.""",
    )
    handover_mb: int = setting(
        256,
        """Most MiB of sealed blocks waiting for the KV service. Blocks beyond it are dropped and counted; steps never
        wait.""",
    )
    kv_shm_mb: int = setting(
        32,
        """Most MiB of shared memory (/dev/shm) through which sealed blocks go to each KV service on the same host, instead of
        through gRPC, which costs several times as much of the cores that steps need. What finds no room in it goes through
        gRPC, and so does all where the service cannot map it. 0: always gRPC.""",
    )

    def validate(self) -> None:
        """Raises ConfigError naming the setting or pair that is wrong."""
        super().validate()
        for name in ("page_size", "kv_memory_mb", "handover_mb"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{flag(name)}: must be at least 1")
        for name in ("kv_fetch_s", "session_tail_mb", "kv_shm_mb"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{flag(name)}: must not be negative")
        if self.session_lag_s <= 0:
            raise ConfigError("--session-lag-s: must be positive")
        if self.kv_recent < -1:
            raise ConfigError("--kv-recent: must be -1 or more")
        self.exempt_layers()
        self.kv_addresses()

    def exempt_layers(self) -> frozenset[int]:
        """Layers that are not sealed."""
        parts = [part.strip() for part in self.kv_exempt_layers.split(",") if part.strip()]
        if parts and self.kv_format not in SEALED:
            raise ConfigError(f"--kv-exempt-layers: --kv-format {self.kv_format} seals none")
        if any(not part.isdecimal() for part in parts):
            raise ConfigError("--kv-exempt-layers: must be numbers of layers like 0,5")
        return frozenset(map(int, parts))

    def kv_addresses(self) -> tuple[str, ...]:
        """The KV services' addresses; empty: none."""
        return addresses_of("--kv", self.kv, "host:port,host:port") if self.kv else ()


def addresses_of(flag: str, text: str, form: str, *names: str) -> tuple[str, ...]:
    """A list of host:port, or of `names`. ConfigError naming the flag, with the form that was expected."""
    addresses = tuple(part.strip() for part in text.split(",") if part.strip())
    if not addresses or any(":" not in address and address not in names for address in addresses):
        raise ConfigError(f"{flag}: must be {form}")
    if len(set(addresses)) != len(addresses):
        raise ConfigError(f"{flag}: names an address twice")
    return addresses
