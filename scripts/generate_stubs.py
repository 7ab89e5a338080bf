"""Regenerates forefetch/v1 from protos/: `python scripts/generate_stubs.py [--out DIR]`.

The generator is pinned (grpcio-tools 1.80) because generated code demands a runtime at least as new as itself, and
1.80 is the oldest grpcio that Forefetch supports. tests/test_stubs.py runs this into a scratch folder and compares.
"""

from __future__ import annotations

import argparse
import sys
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
HEADER = '"""Generated from protos/forefetch/v1 by scripts/generate_stubs.py; edit the protos instead."""\n'


def generate(out: Path) -> None:
    """Writes out/forefetch/v1/*_pb2.py, *_pb2.pyi, *_pb2_grpc.py, *_pb2_grpc.pyi and __init__.py."""
    out.mkdir(parents=True, exist_ok=True)
    protos = sorted((ROOT / "protos").glob("forefetch/v1/*.proto"))
    google = resources.files("grpc_tools") / "_proto"
    args = ["protoc", f"-I{ROOT / 'protos'}", f"-I{google}"]
    args += [f"--{kind}={out}" for kind in ("python_out", "pyi_out", "grpc_python_out", "mypy_grpc_out")]
    status = protoc.main([*args, *map(str, protos)])
    if status != 0:
        raise SystemExit(f"protoc failed with status {status}")
    (out / "forefetch" / "v1" / "__init__.py").write_text(HEADER)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT, help="folder that holds forefetch/v1 (default: the repository)")
    generate(parser.parse_args().out)
    sys.exit(0)
