"""python -m kv_service: the process."""

from __future__ import annotations

import sys

from forefetch import rpc, settings
from kv_service.config import KvConfig
from kv_service.server import serve


def main() -> int:
    """Entry point."""
    config = settings.parse(KvConfig)
    rpc.setup_logging(config.log_level)
    return rpc.run_main(config.PROG, lambda: serve(config))


if __name__ == "__main__":
    sys.exit(main())
