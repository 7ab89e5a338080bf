"""Settings of the KV service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from forefetch.errors import ConfigError
from forefetch.settings import ServiceConfig, setting

MIB = 1 << 20


@dataclass(frozen=True)
class KvConfig(ServiceConfig):
    """The KV service: holds sealed KV blocks in memory, so that they outlive a router."""

    PROG: ClassVar[str] = "python -m kv_service"
    ENV: ClassVar[str] = "FOREFETCH_KV_"

    budget_mb: int = setting(
        1024,
        """Most memory for blocks in MiB, blocks on their way in included. When it is full, the blocks that were used
        least recently go, ends of prefixes first.""",
    )
    max_block_mb: int = setting(
        64,
        """Largest block taken, in MiB; a larger one is refused. A block is a page of tokens of every layer:
        2 x layers x KV heads x head dim x page size x bytes of an element. At most --budget-mb.""",
    )

    def validate(self) -> None:
        """Raises ConfigError naming the bad setting or pair."""
        super().validate()
        if self.max_block_mb < 1:
            raise ConfigError("--max-block-mb: must be at least 1")
        if self.budget_mb < self.max_block_mb:
            raise ConfigError(f"--budget-mb: must be at least --max-block-mb, which is {self.max_block_mb}")

    @property
    def budget_bytes(self) -> int:
        """--budget-mb in bytes."""
        return self.budget_mb * MIB

    @property
    def max_block_bytes(self) -> int:
        """--max-block-mb in bytes."""
        return self.max_block_mb * MIB
