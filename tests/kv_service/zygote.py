"""Starts KV services within milliseconds: all modules are loaded once, then each service is a fork.

python zygote.py FLAGS...      a line on standard input starts one; {"pid": ...} and the service's ready line come back
"""

from __future__ import annotations

import json
import os
import sys

from forefetch import rpc, settings
from kv_service.config import KvConfig
from kv_service.server import serve


def main() -> None:
    config = settings.parse(KvConfig)
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            rpc.setup_logging(config.log_level)
            serve(config)
            os._exit(0)
        print(json.dumps({"pid": pid}), flush=True)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
