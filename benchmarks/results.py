"""Rows of results.csv: what was measured, where, with what."""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import os
import platform
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).parent / "results.csv"
COLUMNS = ("date", "benchmark", "case", "metric", "value", "unit", "hardware", "versions")


@dataclass(frozen=True)
class Row:
    """One figure."""

    benchmark: str
    case: str
    metric: str
    value: float
    unit: str


def hardware() -> str:
    """CPU model and the cores this process may use, and the GPU if there is one."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        model = next((line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line), model)
    name = f"{model}, {len(os.sched_getaffinity(0))} cores"
    try:
        import torch

        return name + (f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "")
    except ImportError:
        return name


def versions() -> str:
    """Python and the libraries that matter for speed."""
    names = ("torch", "grpcio", "protobuf", "transformers")
    return " ".join([f"python {platform.python_version()}", *(f"{n} {importlib.metadata.version(n)}" for n in names)])


def append(rows: list[Row], file: Path = FILE) -> None:
    """Adds rows to results.csv, with its header if it is new."""
    new = not file.exists()
    with file.open("a", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        if new:
            writer.writerow(COLUMNS)
        today, where, what = datetime.date.today().isoformat(), hardware(), versions()
        for row in rows:
            writer.writerow((today, row.benchmark, row.case, row.metric, f"{row.value:.6g}", row.unit, where, what))
