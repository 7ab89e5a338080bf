"""What the signal kernels become for sm_90: their order cannot be tested without two GPUs, but that it is asked for can."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from forefetch import settings

pytest.importorskip("triton")

# The tests' process has Triton's interpreter on, which compiles nothing.
COMPILE = """
import json
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language import bfloat16
from forefetch.kernels.hop import triton as hop

def ptx(kernel, types, constants):
    types = {**types, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(kernel, {name: types.get(name, "i32") for name in kernel.arg_names}, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["ptx"]

ints = ("counts", "fault", "owners", "turns", "inbox", "outbox", "state", "lock")
types = {**dict.fromkeys(ints, "*i32"), "table": "*i64", "idle": "*i1", "patience_ns": "i64"}
types |= dict.fromkeys(("x", "logits", "out"), "*bf16")
put = {"H": 2048, "HP": 2048, "E": 128, "EP": 128, "K": 8, "RENORMALISE": True}
print(json.dumps({
    "put 1": ptx(hop._put, types, {"LANES": 1, **put}),
    "put 3": ptx(hop._put, types, {"LANES": 3, **put}),
    "take": ptx(hop._take, types, {"LANES": 1, "OWN": -1, "BLOCK": 1024, "TYPE": bfloat16}),
    "take, one of two": ptx(hop._take, types, {"LANES": 2, "OWN": 1, "BLOCK": 1024, "TYPE": bfloat16}),
    "turn": ptx(hop._turn, types, {"LANE": True, "ANSWER": True, "WAIT": True}),
}))
"""
ORDER = {
    "put 1": [r"st\.global\.v4", r"atom\.global\.sys\.acq_rel\.add", r"fence\.acq_rel\.sys", r"st\.release\.sys"],
    "put 3": [r"st\.global\.v4", r"atom\.global\.sys\.acq_rel\.add", r"fence\.acq_rel\.sys", r"st\.release\.sys"],
    "take": [r"ld\.acquire\.sys", r"%globaltimer", r"ld\.global\.cg"],
    "take, one of two": [r"ld\.acquire\.sys", r"%globaltimer", r"ld\.global\.cg"],
    "turn": [r"atom\.global\.gpu\.release", r"st\.release\.sys", r"ld\.acquire\.sys", r"atom\.global\.acquire\.gpu"],
}


@pytest.fixture(scope="module")
def compiled() -> dict[str, str]:
    environment = settings.child_environment(TRITON_INTERPRET="0")
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", ORDER)
def test_what_crosses_is_written_before_and_read_behind_its_signal(name: str, compiled: dict[str, str]) -> None:
    found = [re.search(pattern, compiled[name]) for pattern in ORDER[name]]
    assert all(found), [pattern for pattern, match in zip(ORDER[name], found, strict=True) if match is None]
    starts = [match.start() for match in found if match]
    assert starts == sorted(starts)
