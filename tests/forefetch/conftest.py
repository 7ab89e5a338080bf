"""A server in this process, of each of the two kinds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rpc_servers import Running, serving


@pytest.fixture(params=["sync", "aio"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(kind: str) -> Iterator[Running]:
    with serving(kind) as running:
        yield running
