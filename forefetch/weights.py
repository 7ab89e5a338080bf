"""Tensors and slices by name out of a checkpoint's safetensors files, straight to where they live.

Files are memory-mapped: asking for a slice reads the pages of that slice and nothing else. `Checkpoint.read_log` records
what was asked for, so that tests can hold workers to "only my experts" and the router to "never a routed expert".
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from forefetch.errors import UnsupportedModel
from forefetch.spec import ModelSpec, Slice, read_json

DIGEST_SAMPLE = 64  # bytes of each tensor that enter the digest


class Checkpoint:
    """A folder in Hugging Face form: config.json and model.safetensors, or many files with an index."""

    def __init__(self, folder: Path) -> None:
        """Opens the folder's headers. Raises UnsupportedModel when files are missing or damaged."""
        self.folder = folder
        self.read_log: dict[str, int] = {}
        self._where = _locate(folder)
        self._open: dict[Path, Any] = {}
        self._digest: str | None = None

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._where)

    def read(self, what: str | Slice, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> torch.Tensor:
        """A tensor, or the matrix a Slice names, as a tensor of its own in `dtype` (default: as stored) on `device`."""
        where = Slice(what) if isinstance(what, str) else what
        tensor: torch.Tensor = self._view(where)
        self.read_log[where.name] = self.read_log.get(where.name, 0) + tensor.numel() * tensor.element_size()
        return tensor.to(device=device, dtype=dtype or tensor.dtype)

    def dtype_of(self, what: Slice) -> torch.dtype:
        """The type that a tensor is stored in."""
        return self._view(what).dtype

    def _view(self, where: Slice) -> torch.Tensor:
        path = self._where.get(where.name)
        if path is None:
            raise UnsupportedModel(f"tensor {where.name!r} is not in the checkpoint")
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        view = self._open[path].get_slice(where.name)
        rows = slice(*where.rows) if where.rows else slice(None)
        tensor: torch.Tensor = view[rows] if where.index is None else view[where.index : where.index + 1, rows][0]
        return tensor

    @property
    def digest(self) -> str:
        """SHA-256 over the configuration, every tensor's name, type and shape, and a sample of its bytes.

        A full hash of a large checkpoint would take minutes at each start; a fine-tune changes every sample, and two
        checkpoints of one shape still differ. Router and workers must agree on it before a row is sent.
        """
        if self._digest is None:
            self._digest = _digest(read_json(self.folder / "config.json"), sorted(set(self._where.values())))
        return self._digest


def load_expert(
    checkpoint: Checkpoint, spec: ModelSpec, layer: int, expert: int, device: str | torch.device = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """One routed expert as stored, on `device`: w13 [2I, H] (gate rows, then up rows) and w2 [H, I]."""
    parts = spec.expert_tensors(layer, expert)
    w13 = torch.cat([checkpoint.read(part, device=device) for part in (parts.gate, parts.up)])
    w2 = checkpoint.read(parts.down, device=device)
    if w13.shape != (2 * spec.expert_width, spec.hidden_size) or w2.shape != (spec.hidden_size, spec.expert_width):
        raise UnsupportedModel(f"expert {expert} of layer {layer} has shapes {tuple(w13.shape)} and {tuple(w2.shape)}")
    return w13, w2


def _locate(folder: Path) -> dict[str, Path]:
    """Tensor name -> file."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = read_json(index).get("weight_map", {})
        return {name: _inside(folder, file) for name, file in names.items()}
    return {name: folder / "model.safetensors" for name in _header(folder / "model.safetensors")[0] if name != "__metadata__"}


def _inside(folder: Path, file: str) -> Path:
    """A file named by an index must lie in the folder itself."""
    if Path(file).name != file or not (folder / file).exists():
        raise UnsupportedModel(f"model.safetensors.index.json names {Path(file).name!r}, which is not in the folder")
    return folder / file


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """A safetensors header and where the data begin (format: u64 length, JSON, data)."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length < 1 << 30:
                raise ValueError("header length")
            header: dict[str, Any] = json.loads(file.read(length))
            return header, 8 + length
    except FileNotFoundError:
        raise UnsupportedModel(f"{path.name}: not found in the model's folder") from None
    except ValueError as error:
        raise UnsupportedModel(f"{path.name}: is not a safetensors file") from error


def _digest(config: dict[str, Any], files: list[Path]) -> str:
    volatile = ("transformers_version", "_name_or_path")
    kept = {key: value for key, value in config.items() if key not in volatile}
    total = hashlib.sha256(b"forefetch model 1\0" + json.dumps(kept, sort_keys=True).encode())
    for path in files:
        header, start = _header(path)
        with path.open("rb") as file:
            for name in sorted(set(header) - {"__metadata__"}):
                entry = header[name]
                first, last = entry["data_offsets"]
                file.seek(start + first + max(0, (last - first - DIGEST_SAMPLE) // 2))
                total.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
                total.update(file.read(min(DIGEST_SAMPLE, last - first)))
    return total.hexdigest()
