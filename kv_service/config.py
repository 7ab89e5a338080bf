"""Settings of the KV service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from forefetch.errors import ConfigError
from forefetch.rpc.auth import AuthConfig
from forefetch.settings import setting
from kv_service.store_room import Limits

MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class KvConfig(AuthConfig):
    """The KV service: holds sealed KV blocks and session logs, so that they outlive a router."""

    PROG: ClassVar[str] = "python -m kv_service"
    ENV: ClassVar[str] = "FOREFETCH_KV_"

    budget_mb: int = setting(
        1024,
        """Most memory for blocks in MiB, blocks on their way in included. Without --dir it is all that is held: when it is
        full, the ends of prefixes go first, and of those what is cheap to compute again for its size and was not used
        lately. With --dir it holds what is on its way to disk and what was used last. Beside it, the index takes some 1.2 KiB
        for each block of 128 tokens, on disk or not: at most a quarter of this, then blocks go.""",
    )
    max_block_mb: int = setting(
        64,
        """Largest block taken, in MiB; a larger one is refused. A block is a page of tokens of every layer:
        2 x layers x KV heads x head dim x page size x bytes of an element. At most --budget-mb.""",
    )
    dir: str = setting(
        "",
        """Folder for blocks and session logs, made if it is missing; a restart finds there what it held and serves at once.
        One service per folder. What is damaged at start is renamed to *.damaged and an empty store takes its place.
        Unset: memory only, and a restart forgets everything.""",
        form="DIR",
    )
    disk_gb: float = setting(
        16.0,
        """Most disk for blocks in GiB; needs --dir. The file may take a quarter more while blocks come and go. When it is full,
        blocks go as under --budget-mb.""",
    )
    tenant_share: float = setting(
        1.0,
        """Largest share, above 0 to 1, of the blocks' budget (disk with --dir, else memory) that one tenant may take. A tenant
        at its share evicts its own blocks.""",
    )
    share_tenants: bool = setting(
        False,
        """Let all callers see each other's blocks and sessions, as one tenant. A router's own users stay apart all the same
        when it salts their keys.""",
    )
    operators: str = setting(
        "",
        """Tenants, separated by commas, whose callers may inspect and verify the blocks of all tenants. Others see their
        own.""",
        form="NAME,...",
    )
    session_mb: int = setting(
        256,
        """Most memory for session logs in MiB, and a quarter of what they may take on disk. When it is full, sessions go that
        were used least recently. One record may take a quarter of it.""",
    )
    session_idle_s: float = setting(
        86_400.0, "Seconds after its last use that a session may be dropped. A restart counts as a use."
    )
    nice: int = setting(
        0,
        """How far the service leaves the host's cores to others, 0 to 19, see nice(2). From 1 on its threads also interrupt
        none that runs, and hold a core for 0.1 ms at a time (Linux). For a service beside a router on a CPU, whose steps wait
        for cores that it holds; `forefetch up` gives it 19. Where all cores are always busy it becomes slow then: blocks come
        late and are computed instead, and sessions take longer to begin and to end.""",
    )

    def validate(self) -> None:
        """Raises ConfigError naming the bad setting or pair."""
        super().validate()
        if self.max_block_mb < 1:
            raise ConfigError("--max-block-mb: must be at least 1")
        if self.budget_mb < self.max_block_mb:
            raise ConfigError(f"--budget-mb: must be at least --max-block-mb, which is {self.max_block_mb}")
        if self.dir and self.disk_gb * GIB < self.max_block_bytes:
            raise ConfigError(f"--disk-gb: must hold a block of --max-block-mb, which is {self.max_block_mb}")
        if not 0.0 < self.tenant_share <= 1.0:
            raise ConfigError("--tenant-share: must be above 0 and at most 1")
        if not 0 <= self.nice <= 19:
            raise ConfigError("--nice: must be 0 to 19")
        if self.session_mb < 1:
            raise ConfigError("--session-mb: must be at least 1")
        if self.session_idle_s <= 0:
            raise ConfigError("--session-idle-s: must be above 0")

    @property
    def limits(self) -> Limits:
        """Budgets in bytes."""
        memory, disk = self.budget_mb * MIB, int(self.disk_gb * GIB) if self.dir else 0
        return Limits(memory, disk, int((disk or memory) * self.tenant_share), memory // 4)

    @property
    def max_block_bytes(self) -> int:
        """--max-block-mb in bytes."""
        return self.max_block_mb * MIB
