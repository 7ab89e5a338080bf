"""deploy/Dockerfile, as far as it can be checked without an engine: lint, sources, commands, settings."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from forefetch.cluster import MALLOC

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
IGNORE = ROOT / "deploy" / "Dockerfile.dockerignore"


def instructions() -> list[tuple[str, str]]:
    """(instruction, the rest) with continued lines joined and comments gone."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in joined.splitlines())]


def of(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def copied() -> list[str]:
    """Sources that come from the repository."""
    words = [rest.split() for rest in of("COPY") if "--from=" not in rest]
    return [source for line in words for source in line[:-1]]


def test_hadolint_is_content() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([linter, "--failure-threshold", "info", DOCKERFILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_everything_that_is_copied_exists_and_is_let_through() -> None:
    sources = copied()
    assert len(sources) >= 7
    allowed = {line[1:] for line in IGNORE.read_text().splitlines() if line.startswith("!")}
    for source in sources:
        assert (ROOT / source).exists(), source
    assert allowed == set(sources), "the context is what is copied, no more and no less"


def test_every_package_of_ours_is_in_the_image() -> None:
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {pattern.removesuffix("*") for pattern in found} <= set(copied())


def test_the_entry_point_runs_every_service() -> None:
    assert of("ENTRYPOINT") == ['["python", "-m"]']
    for module in ("router_service", "expert_worker", "kv_service", "forefetch.cli"):
        assert importlib.util.find_spec(f"{module}.__main__"), module


def test_extras_that_are_installed_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r'"\.\[([a-z,]+)\]"', DOCKERFILE.read_text())
    assert named
    assert set(named[0].split(",")) <= set(extras)


def test_environment_is_that_of_a_local_cluster() -> None:
    pairs = dict(re.findall(r"(\w+)=(\S+)", " ".join(of("ENV"))))
    for name, value in MALLOC.items():
        assert pairs[name] == value


@pytest.mark.parametrize("variant", ["cpu", "cuda"])
def test_both_variants_lead_to_the_image(variant: str) -> None:
    stages = [line.split(" AS ")[1] for line in of("FROM")]
    assert f"runtime-{variant}" in stages
    assert any(line.startswith("runtime-${VARIANT} AS") for line in of("FROM"))
    assert of("FROM")[-1].startswith("runtime-")


def test_it_does_not_run_as_root() -> None:
    assert of("USER") == ["10001:10001"]
    after = instructions()[[name for name, _ in instructions()].index("USER") + 1 :]
    assert {name for name, _ in after} <= {"EXPOSE", "ENTRYPOINT", "CMD"}


def test_pytorch_is_pinned_to_what_the_makefile_pins() -> None:
    makefile = re.search(r"^TORCH \?= (\S+)", (ROOT / "Makefile").read_text(), re.M)
    assert makefile
    assert f"ARG TORCH={makefile[1]}" in DOCKERFILE.read_text()
