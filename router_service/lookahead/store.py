"""`lookahead.safetensors`, beside the weights of the checkpoint that it was made for.

Tensors: `outputs.<layer>` [E, H], `load.<layer>` [E] (share of the tokens that chose an expert), and per head with a correction
`head.<layer>.<distance>.<part>`. Metadata: format, the model's digest, and one JSON object with what else is known per head.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from forefetch.errors import Mismatch
from router_service.lookahead.heads import Correction, Head, Lookahead
from router_service.trunk import Trunk

NAME = "lookahead.safetensors"
FORMAT = "forefetch lookahead 1"
PARTS = ("down", "bias", "up", "offset")


@dataclass
class Trained:
    """What `train` finds out about a checkpoint. Keys of heads and `recall` are (layer, distance)."""

    outputs: dict[int, Tensor]
    load: dict[int, Tensor]
    heads: dict[tuple[int, int], Head] = field(default_factory=dict)
    recall: dict[tuple[int, int], float] = field(default_factory=dict)  # slots@k+2 on documents kept aside

    def on(self, trunk: Trunk) -> Lookahead:
        """Ready to run."""
        weight = trunk.embedding
        return Lookahead(trunk, {layer: table.to(weight) for layer, table in self.outputs.items()}, self.heads)


def save(trained: Trained, folder: Path, digest: str) -> Path:
    """Writes the file in float16 and returns its path."""
    tensors = {f"outputs.{layer}": table for layer, table in trained.outputs.items()}
    tensors |= {f"load.{layer}": share for layer, share in trained.load.items()}
    facts = []
    for (layer, distance), head in sorted(trained.heads.items()):
        facts.append(
            {
                **{"layer": layer, "distance": distance, "kind": "tier 0" if head.correction is None else "mlp"},
                **{"scale": head.scale, "shift": head.shift, "slots@k+2": trained.recall.get((layer, distance))},
            }
        )
        for part in PARTS if head.correction is not None else ():
            tensors[f"head.{layer}.{distance}.{part}"] = getattr(head.correction, part)
    path, metadata = folder / NAME, {"format": FORMAT, "model": digest, "heads": json.dumps(facts)}
    save_file({name: t.detach().to("cpu", torch.float16).contiguous() for name, t in tensors.items()}, path, metadata)
    return path


def load(folder: Path, digest: str, moe_layers: tuple[int, ...]) -> Trained:
    """Reads the file. Mismatch when there is none, when it is damaged, or when it was made for another checkpoint."""
    path = folder / NAME
    if not path.exists():
        raise Mismatch(f"{NAME}: not found in the model's folder; `forefetch lookahead train` makes it")
    try:
        with safe_open(path, framework="pt") as file:
            facts = _facts(file.metadata() or {}, digest)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            heads = {(fact["layer"], fact["distance"]): _head(fact, tensors) for fact in facts}
            recall = {(fact["layer"], fact["distance"]): fact["slots@k+2"] for fact in facts}
            outputs, shares = ({n: tensors[f"{kind}.{n}"].float() for n in moe_layers} for kind in ("outputs", "load"))
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise Mismatch(f"{NAME}: cannot be read ({type(error).__name__})") from error
    return Trained(outputs, shares, heads, recall)


def _facts(metadata: dict[str, str], digest: str) -> list[dict[str, Any]]:
    if metadata.get("format") != FORMAT:
        raise Mismatch(f"{NAME}: format {metadata.get('format')!r}, not {FORMAT!r}")
    if metadata["model"] != digest:
        raise Mismatch(f"{NAME}: made for model {metadata['model'][:12]}, but this one is {digest[:12]}; train it again")
    facts: list[dict[str, Any]] = json.loads(metadata["heads"])
    return facts


def _head(fact: dict[str, Any], tensors: dict[str, Tensor]) -> Head:
    correction = None
    if fact["kind"] != "tier 0":
        name = f"head.{fact['layer']}.{fact['distance']}."
        correction = Correction(*(tensors[name + part].float() for part in PARTS))
    return Head(correction, float(fact["scale"]), float(fact["shift"]))
