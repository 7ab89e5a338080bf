"""Whatever changes a block's bytes changes its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forefetch.spec import ModelSpec
from kv_service.client import Geometry
from router_service.build import kv_params
from router_service.config import RouterConfig
from router_service.naming import Naming
from router_service.sizing import Placement

ONE = Naming("digest", Geometry(2, 2, 8), "rope", "float32", "", 4)
TOKENS = list(range(13))


def test_names_are_extended_in_order() -> None:
    keys = ONE.extend([], "", TOKENS, 3)
    assert [key.token_ids for key in keys] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    assert ONE.extend(ONE.extend([], "", TOKENS, 1), "", TOKENS, 3) == keys
    assert ONE.extend(keys[:], "", TOKENS, 2) == keys


@pytest.mark.parametrize(
    "other",
    [
        replace(ONE, digest="another"),
        replace(ONE, geometry=Geometry(2, 1, 8)),
        replace(ONE, rope="rope theta=2"),
        replace(ONE, kv_format="float16"),
        replace(ONE, params="p"),
        replace(ONE, page_size=5),
    ],
    ids=["model", "geometry", "rope", "format", "parameters", "page size"],
)
def test_each_part_matters(other: Naming) -> None:
    assert not {key.digest for key in ONE.extend([], "", TOKENS, 3)} & {key.digest for key in other.extend([], "", TOKENS, 2)}


def test_tenants_share_nothing() -> None:
    assert ONE.extend([], "a", TOKENS, 1) != ONE.extend([], "b", TOKENS, 1) != ONE.extend([], "", TOKENS, 1)


def test_settings_of_rope_are_part_of_it(checkpoint: Callable[[str], Path]) -> None:
    spec = ModelSpec.load(checkpoint("qwen3-all-experts"))
    name = Naming.of(spec, "d", "float32", "", 4)
    other = replace(spec, rope=replace(spec.rope, theta=2 * spec.rope.theta))
    scaled = replace(spec, rope=replace(spec.rope, params={**spec.rope.params, "factor": 8.0}))
    assert len({name.rope, Naming.of(other, "d", "float32", "", 4).rope, Naming.of(scaled, "d", "float32", "", 4).rope}) == 3


def test_so_does_what_keys_and_values_were_computed_with() -> None:
    place = Placement(torch.device("cpu"), torch.float32, torch.float32)
    settings: list[dict[str, str]] = [{}, {"trunk": "int8"}, {"experts": "int8"}, {"trunk": "int8", "experts": "int8"}]
    params = {kv_params(RouterConfig(model="m", **each), place) for each in settings}
    assert len(params) == 4
    assert kv_params(RouterConfig(model="m"), place) == "computed in torch.float32"
