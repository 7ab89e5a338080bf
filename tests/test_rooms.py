"""The source obeys the import law (`rooms.py`), and planted violations prove that the law bites."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rooms import MAX_FILE_LINES, MAX_FUNCTION_LINES, ROOT, violations


def test_the_source_obeys() -> None:
    assert violations(ROOT) == []


PLANTED = [
    ("forefetch/spec.py", "import grpc\n", "must not load grpc"),
    (
        "forefetch/spec.py",
        "from forefetch.v1 import kv_pb2\nfrom forefetch.v1.kv_pb2_grpc import KvServiceStub\n",
        "must not load grpc",
    ),
    ("forefetch/client.py", "from forefetch import helper\n", "must not load torch, but does: forefetch.helper -> torch"),
    ("forefetch/rpc.py", "def f():\n    import torch.nn\n", "must not load torch.nn"),
    ("forefetch/rpc.py", "import router_service.engine\n", "forefetch imports the service module"),
    ("forefetch/kernels/x/ref.py", "import numpy\n", "a kernel imports numpy"),
    ("forefetch/other.py", "import os\nx = os.environ['A']\n", "touches os.environ"),
    ("forefetch/other.py", "from os import getenv\n", "touches os.environ"),
    ("router_service/engine.py", "from expert_worker.experts import Experts\n", "through its client.py only"),
    ("router_service/engine.py", "from router_service import server\n", "a device module imports the edge module"),
    ("router_service/pages.py", "from router_service.engine import Engine\n", "a pure module imports the device module"),
    ("router_service/pages.py", "import time\n", "must not load time"),
    ("router_service/pages.py", "from router_service import admission\n", "must not load threading"),
    ("router_service/loose.py", "x = 1\n", "is in no room"),
    ("kv_service/store.py", "from . import keys\n", "relative import"),
    ("kv_service/store.py", "x = 1\n" * (MAX_FILE_LINES + 1), "more than 350"),
    ("kv_service/store.py", "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES, "f has 61 lines"),
]


@pytest.mark.parametrize(("where", "text", "message"), PLANTED)
def test_a_planted_violation_is_caught(where: str, text: str, message: str, tmp_path: Path) -> None:
    for name, body in {
        "forefetch/helper.py": "import torch\n",
        "router_service/engine.py": "",
        "router_service/server.py": "",
        "router_service/admission.py": "import threading\n",
        where: text,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(body)
    line = f"{where}:{text.count(chr(10)) if text.count(chr(10)) < 3 else 1}: "
    assert any(found.startswith(line) and message in found for found in violations(tmp_path)), violations(tmp_path)


def test_what_the_law_allows_is_not_reported(tmp_path: Path) -> None:
    for name, body in {
        "forefetch/client.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n",
        "forefetch/kernels/x/ref.py": "import math\nimport torch\nfrom forefetch.kernels import y\n",
        "expert_worker/client.py": "import grpc\n",
        "router_service/dispatch.py": "from expert_worker import client\nfrom router_service.config import RouterConfig\n",
        "router_service/server.py": "import asyncio\nfrom router_service import dispatch, pages\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(body)
    assert violations(tmp_path) == []


EXTRAS = ("torch", "numpy", "safetensors", "tokenizers", "jinja2", "grpc_health", "grpc_reflection", "prometheus_client")
BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {extras!r}:
            raise ModuleNotFoundError(f"{{name}} is not in the base install", name=name)
sys.meta_path.insert(0, Blocker())
import forefetch.client, forefetch.cli
forefetch.cli.main(["version"])
"""


def test_client_and_command_need_only_the_base_install() -> None:
    """`pip install forefetch` without extras gives the client: none of the services' libraries may be needed."""
    code = BLOCKED.format(extras=(*EXTRAS, "opentelemetry"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
