"""What the documents name exists, and what exists is named."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from expert_worker.config import ExpertConfig
from forefetch import cli
from forefetch.settings import add_arguments
from kv_service.config import KvConfig
from router_service.config import RouterConfig

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("forefetch", "router_service", "expert_worker", "kv_service")
PAPERS = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "docs/operations.md")
# Flags of docker, helm and kubectl, in commands that docs/operations.md shows.
FOREIGN = frozenset(
    {
        *("--build-arg", "--create-namespace", "--delete-emptydir-data", "--for", "--force", "--ignore-daemonsets"),
        *("--namespace", "--replicas", "--set", "--since"),
    }
)


def tables() -> dict[str, str]:
    """ARCHITECTURE.md's module tables by package."""
    text = (ROOT / "ARCHITECTURE.md").read_text().partition("\n## Modules\n")[2]
    first, *others = re.split(r"\n\| (router_service|expert_worker|kv_service) \| \|\n", text)
    return {"forefetch": first, **dict(zip(others[::2], others[1::2], strict=True))}


def modules(package: str) -> set[str]:
    """Names of a package's modules and folders; of kernels just the folders, which have docstrings of their own."""
    found = set()
    for path in (ROOT / package).rglob("*.py"):
        parts = path.relative_to(ROOT / package).with_suffix("").parts
        if parts[0] == "v1" or (parts[-1] == "__main__" and len(parts) > 1):
            continue
        found.update(parts[1:2] if parts[0] == "kernels" else parts)
    return found - {"__init__"}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_module_tables_are_the_tree(package: str) -> None:
    table = tables()[package]
    named = {word.rstrip("/").rpartition("/")[2].removesuffix(".py") for word in re.findall(r"`([^`]+)`", table)}
    assert sorted(modules(package) - named) == [], "ARCHITECTURE.md has no line for these"
    first = {word for row in re.findall(r"^\| ([^|]+) \|", table, re.M) for word in re.findall(r"`([^`<>]+)`", row)}
    folder = ROOT if package == "forefetch" else ROOT / package
    gone = [word for word in first if not (folder / word).exists() and not (folder / f"{word}.py").exists()]
    assert gone == [], "these are no longer there"


def flags() -> set[str]:
    """Every flag of the command and the services."""
    found = set(FOREIGN)
    for cls in (RouterConfig, ExpertConfig, KvConfig):
        service = argparse.ArgumentParser()
        add_arguments(service, cls)
        found |= set(service._option_string_actions)
    commands = next(action for action in cli.parser()._actions if isinstance(action, argparse._SubParsersAction))
    for command in commands.choices.values():
        found |= set(command._option_string_actions)
    return found


@pytest.mark.parametrize("paper", PAPERS)
def test_documents_name_no_flag_that_is_not_there(paper: str) -> None:
    drawn = re.compile(r"--[\w ]+-->")  # an arrow with a word on it
    lines = [drawn.sub("", line) for line in (ROOT / paper).read_text().splitlines() if "benchmarks" not in line]
    named = re.findall(r"(?<![-\w])--[a-z][a-z0-9-]*[a-z0-9](?![-\w])", "\n".join(lines))
    assert sorted(set(named) - flags()) == []


@pytest.mark.parametrize("paper", PAPERS)
def test_documents_name_no_file_that_is_not_there(paper: str) -> None:
    folders = "forefetch|router_service|expert_worker|kv_service|tests|scripts|deploy|docs|models|benchmarks|examples|protos"
    paths = re.findall(
        rf"`((?:{folders})/[\w./-]+)`",
        (ROOT / paper).read_text(),
    )
    assert paths or paper == "CHANGELOG.md"
    gone = [path for path in paths if not any((ROOT / (path + end)).exists() for end in ("", ".py"))]
    assert gone == []
