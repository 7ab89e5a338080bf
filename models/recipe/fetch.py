"""Fetch packages by name with their ordinary clients, and read the files inside them without unpacking to disk."""

from __future__ import annotations

import gzip
import hashlib
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from models.recipe.sources import Source


def fetch_python(source: Source, cache: Path) -> Path:
    """Return the wheel of a pinned Python package, downloading it into `cache` once."""
    stem = source.name.replace("-", "_")
    found = sorted(cache.glob(f"{stem}-{source.version}-*.whl"))
    if not found:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, "-d", str(cache), f"{source.name}=={source.version}"], check=True)
        found = sorted(cache.glob(f"{stem}-{source.version}-*.whl"))
    return found[0]


def fetch_debian(source: Source, cache: Path) -> Path:
    """Return the .deb of a Debian package, downloading it into `cache` once (needs current package lists)."""
    found = sorted(cache.glob(f"{source.name}_*.deb"))
    if not found:
        subprocess.run(["apt-get", "download", "-q", source.name], cwd=cache, check=True)
        found = sorted(cache.glob(f"{source.name}_*.deb"))
    return found[-1]


def wanted(source: Source, path: str) -> bool:
    """Apply the source's include and exclude fragments to a path inside its package."""
    included = not source.include or any(part in path for part in source.include)
    return included and not any(part in path for part in source.exclude)


def wheel_files(source: Source, wheel: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield (path, text) of the wheel's files with one of the suffixes, in path order; undecodable files are left."""
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(suffixes) and wanted(source, "/" + name):
                text = decode(archive.read(name))
                if text is not None:
                    yield name, text


def debian_files(source: Source, package: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield (path, text) of a .deb's files with one of the suffixes (also when gzipped), in path order."""
    found: list[tuple[str, str]] = []
    process = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE)
    with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
        for member in archive:
            name = member.name.removesuffix(".gz")
            if not member.isfile() or not name.endswith(suffixes) or not wanted(source, name):
                continue
            stream = archive.extractfile(member)
            raw = stream.read() if stream else b""
            text = decode(gzip.decompress(raw) if member.name.endswith(".gz") else raw)
            if text is not None:
                found.append((name.removeprefix("./usr/share/"), text))
    if process.wait() != 0:
        raise RuntimeError(f"dpkg-deb failed on {package.name}")
    yield from sorted(found)


def decode(raw: bytes) -> str | None:
    """UTF-8 with unix line ends, or None."""
    try:
        return raw.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        return None


def sha256(path: Path) -> str:
    """Hex digest of a file, for the manifest."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
