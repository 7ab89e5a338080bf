"""`lookahead.safetensors`, beside the weights of the checkpoint that it was made for.

Tensors: `outputs.<layer>` [E, H], `load.<layer>` [E] (share of tokens that chose an expert), `sketch.<layer>.<part>`,
`head.<layer>.<distance>.<part>` for heads with a correction, `foresight.weight` [2H, L E] and `foresight.offset` if there is
one. Matrices are codes with float16 scales (`<name>.scale`, see `codes.py`): mean outputs and foresight in 8 bits, others in 4.
Vectors are float16. Metadata: format, the model's digest, the matrices' columns, the foresight's recall, and one JSON list
with what else is known per head.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from forefetch.errors import Mismatch
from router_service.lookahead.codes import eight_bits, four_bits, values_of
from router_service.lookahead.estimate import Estimator, Network
from router_service.lookahead.foresight import Foresight
from router_service.lookahead.heads import Head, Lookahead
from router_service.lookahead.sketch import Sketch
from router_service.trunk import Trunk

NAME = "lookahead.safetensors"
FORMAT = "forefetch lookahead 2"
PARTS = tuple(field.name for field in fields(Network))
SKETCH_PARTS = tuple(field.name for field in fields(Sketch))


@dataclass
class Trained:
    """What `train` finds out about a checkpoint. Keys of heads and `recall` are (layer, distance)."""

    outputs: dict[int, Tensor]
    load: dict[int, Tensor]
    sketches: dict[int, Sketch] = field(default_factory=dict)
    heads: dict[tuple[int, int], Head] = field(default_factory=dict)
    recall: dict[tuple[int, int], float] = field(default_factory=dict)  # slots@k+2 on documents kept aside
    foresight: Foresight | None = None

    def on(self, trunk: Trunk) -> Lookahead:
        """Ready to run."""
        return Lookahead(trunk, Estimator(trunk, self.outputs, self.sketches), self.heads, self.foresight)


def save(trained: Trained, folder: Path, digest: str) -> Path:
    """Writes the file and returns its path."""
    tensors = {f"outputs.{layer}": table for layer, table in trained.outputs.items()}
    tensors |= {f"load.{layer}": share for layer, share in trained.load.items()}
    for layer, sketch in trained.sketches.items():
        tensors |= _parts(f"sketch.{layer}.", sketch)
    facts = []
    for (layer, distance), head in sorted(trained.heads.items()):
        fact = {"layer": layer, "distance": distance, "kind": "tier 0" if head.correction is None else "head"}
        facts.append(fact | {"scale": head.scale, "shift": head.shift, "slots@k+2": trained.recall.get((layer, distance))})
        if head.correction is not None:
            tensors |= _parts(f"head.{layer}.{distance}.", head.correction)
    if trained.foresight is not None:
        tensors |= {"foresight.weight": trained.foresight.weight, "foresight.offset": trained.foresight.offset}
    columns = {name: tensor.shape[1] for name, tensor in tensors.items() if tensor.dim() == 2}
    facts_of_all = {"format": FORMAT, "model": digest}
    if trained.foresight is not None:
        facts_of_all["foresight"] = json.dumps(trained.foresight.recall)
    path, metadata = folder / NAME, facts_of_all | {"heads": json.dumps(facts), "columns": json.dumps(columns)}
    save_file(_packed(tensors), path, metadata)
    return path


def find(folder: Path, digest: str, moe_layers: tuple[int, ...]) -> Trained | None:
    """As `load`, but None when there is no file."""
    return load(folder, digest, moe_layers) if (folder / NAME).exists() else None


def load(folder: Path, digest: str, moe_layers: tuple[int, ...]) -> Trained:
    """Reads the file. Mismatch when there is none, when it is damaged, or when it was made for another checkpoint."""
    path = folder / NAME
    if not path.exists():
        raise Mismatch(f"{NAME}: not found in the model's folder; `forefetch lookahead train` makes it")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            facts, columns = _facts(metadata, digest), json.loads(metadata["columns"])
            tensors = _unpacked({name: file.get_tensor(name) for name in file.keys()}, columns)  # noqa: SIM118 - not a dict
        heads = {(fact["layer"], fact["distance"]): _head(fact, tensors) for fact in facts}
        recall = {(fact["layer"], fact["distance"]): fact["slots@k+2"] for fact in facts}
        shares = {n: tensors[f"load.{n}"] for n in moe_layers}
        outputs = {n: tensors[f"outputs.{n}"] for n in moe_layers[:-1]}
        sketched = [n for n in moe_layers if f"sketch.{n}.inner" in tensors]
        sketches = {n: Sketch(*(tensors[f"sketch.{n}.{part}"] for part in SKETCH_PARTS)) for n in sketched}
        foresight = _foresight(metadata, tensors)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise Mismatch(f"{NAME}: cannot be read ({type(error).__name__})") from error
    return Trained(outputs, shares, sketches, heads, recall, foresight)


def _parts(prefix: str, network: Network | Sketch) -> dict[str, Tensor]:
    return {prefix + part: tensor for part, tensor in vars(network).items()}


def _network(prefix: str, tensors: Mapping[str, Tensor]) -> Network:
    return Network(*(tensors[prefix + part] for part in PARTS))


def _packed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As they are stored."""
    found = {}
    for name, tensor in tensors.items():
        values = tensor.detach().to("cpu", torch.float32).contiguous()
        if values.dim() == 2:
            pack = eight_bits if name.startswith(("outputs.", "foresight.")) else four_bits
            found[name], found[name + ".scale"] = pack(values)
        else:
            found[name] = values.to(torch.float16)
    return found


def _unpacked(tensors: Mapping[str, Tensor], columns: Mapping[str, int]) -> dict[str, Tensor]:
    """As they are used, float32."""
    plain = {name: tensor.float() for name, tensor in tensors.items() if tensor.dim() == 1}
    return plain | {name: values_of(tensors[name], tensors[name + ".scale"], width) for name, width in columns.items()}


def _facts(metadata: dict[str, str], digest: str) -> list[dict[str, Any]]:
    if metadata.get("format") != FORMAT:
        raise Mismatch(f"{NAME}: format {metadata.get('format')!r}, not {FORMAT!r}")
    if metadata["model"] != digest:
        raise Mismatch(f"{NAME}: made for model {metadata['model'][:12]}, but this one is {digest[:12]}; train it again")
    facts: list[dict[str, Any]] = json.loads(metadata["heads"])
    return facts


def _foresight(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> Foresight | None:
    if "foresight" not in metadata:
        return None
    return Foresight(tensors["foresight.weight"], tensors["foresight.offset"], float(json.loads(metadata["foresight"])))


def _head(fact: dict[str, Any], tensors: Mapping[str, Tensor]) -> Head:
    name = f"head.{fact['layer']}.{fact['distance']}."
    correction = None if fact["kind"] == "tier 0" else _network(name, tensors)
    return Head(correction, float(fact["scale"]), float(fact["shift"]))
