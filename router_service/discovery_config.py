"""Settings of a router that learns its workers from Kubernetes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from forefetch.errors import ConfigError
from forefetch.settings import ServiceConfig, setting

SCHEME = "kubernetes:"
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class DiscoveryConfig(ServiceConfig):
    """Of effect with --workers kubernetes:NAMESPACE/SERVICE, and what is about experts also with --plan."""

    TITLE: ClassVar[str] = "workers that come and go"

    plan: bool = setting(
        False,
        """Say which of the --placed workers that --workers lists holds which experts, and move them by load, as is done for
        those of kubernetes:... Of several routers with the same list the one that was started last does.""",
    )

    max_workers: int = setting(
        16,
        """Most workers that the table has room for. Each costs trace memory, see --trace-steps.""",
    )
    expert_copies: int = setting(
        1,
        """Workers that should hold each expert. 2: a worker may go without a pause. Fewer where there are fewer workers or
        their --max-experts does not allow it; experts that are used most get more.""",
    )
    expert_extra: int = setting(
        0,
        """Places on each worker and layer for more holders of the experts that are used most, which then share their rows. An
        expert that is used more than a worker's fair share gets more holders in any case.""",
    )
    rebalance_s: float = setting(
        60.0,
        """Seconds between two looks at how evenly workers are used. When layers wait a quarter longer for their busiest
        worker than with even load, single experts are moved or get more holders, while streams run. 0: only when workers come
        or go.""",
    )
    lease_s: float = setting(
        15.0,
        """Seconds after which a router that planned the placement and went silent is replaced by another one. Shorter replaces
        sooner and asks the API server more often.""",
    )
    kube_api: str = setting(
        "", "URL of the API server. Unset: that of the cluster this pod runs in, with its service account.", form="URL"
    )
    kube_timeout_s: float = setting(60.0, "Seconds after which a watch that says nothing is taken for dead and made again.")

    def validate(self) -> None:
        """Raises ConfigError naming the bad setting."""
        super().validate()
        if self.max_workers < 1:
            raise ConfigError("--max-workers: must be at least 1")
        if self.expert_copies < 1:
            raise ConfigError("--expert-copies: must be at least 1")
        for name in ("lease_s", "kube_timeout_s"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')}: must be at least 1")
        for name in ("rebalance_s", "expert_extra"):
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name.replace('_', '-')}: must not be negative")


def service_of(workers: str) -> tuple[str, str] | None:
    """kubernetes:NAMESPACE/SERVICE -> (namespace, service); None for addresses. ConfigError for something in between."""
    if not workers.startswith(SCHEME):
        return None
    namespace, _, service = workers.removeprefix(SCHEME).partition("/")
    if not _NAME.fullmatch(namespace) or not _NAME.fullmatch(service):
        raise ConfigError("--workers: must be local, host:port,host:port or kubernetes:NAMESPACE/SERVICE")
    return namespace, service
