"""Expert blobs: what is packed comes back, to the rounding that the format promises, in either order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forefetch.kernels.grouped_mlp.formats import ExpertFormat, Kind, blob_bytes, pack, quantise, unpack

FORMATS = [
    ExpertFormat("float32"),
    ExpertFormat("bfloat16"),
    ExpertFormat("float16"),
    ExpertFormat("int8", 64),
    ExpertFormat("int4", 128),
]
SIZES = [(256, 64), (96, 32), (30, 20), (128, 384)]


def expert(hidden: int, width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(hidden + width)
    return torch.randn(2 * width, hidden, generator=draw).to(dtype), torch.randn(hidden, width, generator=draw).to(dtype)


@pytest.mark.parametrize("hidden_width", SIZES, ids=str)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_floats_come_back_exactly(kind: str, hidden_width: tuple[int, int]) -> None:
    form = ExpertFormat(kind)  # type: ignore[arg-type]
    w13, w2 = expert(*hidden_width, dtype=getattr(torch, kind))
    blob = pack(w13, w2, form)
    assert blob.shape == (blob_bytes(*hidden_width, form),)
    for dtype in (getattr(torch, kind), torch.float64):
        got13, got2 = unpack(blob, *hidden_width, form, dtype)
        assert torch.equal(got13, w13.to(dtype))
        assert torch.equal(got2, w2.to(dtype))


@pytest.mark.parametrize("hidden_width", SIZES, ids=str)
@pytest.mark.parametrize(
    ("kind", "group", "largest"), [("int8", 64, 127), ("int8", 128, 127), ("int4", 64, 7), ("int4", 128, 7)]
)
def test_codes_are_the_nearest(kind: str, group: int, largest: int, hidden_width: tuple[int, int]) -> None:
    form = ExpertFormat(kind, group)  # type: ignore[arg-type]
    matrices = expert(*hidden_width)
    for matrix, got in zip(matrices, unpack(pack(*matrices, form), *hidden_width, form, torch.float64), strict=True):
        inputs = form.group_of(matrix.shape[1])
        size = matrix.double().unflatten(1, (-1, inputs)).abs().amax(2, keepdim=True).expand(-1, -1, inputs).flatten(1)
        # Half a step, and what rounding the scale to float16 takes from the largest code.
        assert ((got - matrix).abs() <= size * (0.5 / largest + 2.0**-11) * (1 + 2.0**-10)).all()


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_unpacks_into_a_slot_of_any_strides(form: ExpertFormat) -> None:
    blob = pack(*expert(96, 64), form)
    made = unpack(blob, 96, 64, form, torch.float32)
    for turned in (False, True):
        out = (
            torch.full((96, 128) if turned else (128, 96), torch.nan),
            torch.full((64, 96) if turned else (96, 64), torch.nan),
        )
        slot = (out[0].t(), out[1].t()) if turned else out
        assert unpack(blob, 96, 64, form, torch.float32, slot)[0] is slot[0]
        assert all(torch.equal(a, b) for a, b in zip(slot, made, strict=True))


@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("group", [64, 128])
def test_fragment_order_is_the_documented_one(group: int, kind: Kind) -> None:
    """Every code and scale of w2 against the closed form of the kernel study, and the whole against natural order."""
    hidden, width = 128, 256
    form, plain = ExpertFormat(kind, group, "fragment"), ExpertFormat(kind, group)
    matrices, size = expert(hidden, width), form.bits / 8
    blob = pack(*matrices, form)
    for natural, fragment in zip(
        unpack(pack(*matrices, plain), hidden, width, plain, torch.float32),
        unpack(blob, hidden, width, form, torch.float32),
        strict=True,
    ):
        assert torch.equal(natural, fragment)
    codes, scales = quantise(matrices[1], form)
    weights = hidden * width
    words = blob[int(2 * weights * size) : int(3 * weights * size)].view(torch.int32)
    halves = blob[int(3 * weights * size) :].view(torch.float16)[2 * weights // group : 3 * weights // group]
    row, k = torch.meshgrid(torch.arange(hidden), torch.arange(width), indexing="ij")
    tile, r = row // 32, row % 32
    word = (r >> 3 & 1) | (k >> 3 & 1) << 1 | (k >> 4 & 3) << 2 | (r & 7) << 4 | (r >> 4) << 7
    if kind == "int4":
        word, place = word | (k >> 6) << 8, (k >> 1 & 3) + 4 * (k & 1)
    else:
        word, place = word | (k >> 2 & 1) << 8 | (k >> 6) << 9, (k >> 1 & 1) + 2 * (k & 1)
    code = (words[tile * (width // 128 * 128 * form.bits) + word] >> (form.bits * place)) & ((1 << form.bits) - 1)
    assert torch.equal(code - (1 << form.bits - 1), codes.int())
    sub = (k >> 6 & 1) * 4 if group == 64 else 0
    half = (k >> 7) * (32 * 128 // group) + (r & 7) * (4 * 128 // group) + sub + (r >> 4) * 2 + (r >> 3 & 1)
    assert torch.equal(halves[tile * (width // group * 32) + half], scales.repeat_interleave(group, 1))


def test_a_weight_that_no_scale_can_hold_is_refused() -> None:
    w13, w2 = expert(64, 32)
    for value in (torch.nan, torch.inf, 1e9):
        w2[3, 4] = value
        with pytest.raises(ValueError, match="float16 scales"):
            pack(w13, w2, ExpertFormat("int4"))
    assert not unpack(pack(w13 * 0, w2 * 0, ExpertFormat("float32")), 64, 32, ExpertFormat("float32"), torch.float32)[0].any()


def test_zeros_stay_zeros() -> None:
    form = ExpertFormat("int8")
    assert not any(m.any() for m in unpack(pack(torch.zeros(64, 32), torch.zeros(32, 32), form), 32, 32, form, torch.float32))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="fragment"):
        blob_bytes(96, 64, ExpertFormat("int4", 128, "fragment"))
    with pytest.raises(ValueError, match="fragment"):
        ExpertFormat("bfloat16", 128, "fragment")
    with pytest.raises(ValueError, match="expert format"):
        ExpertFormat("int4", 32)
    with pytest.raises(ValueError, match="does not fit"):
        pack(torch.zeros(64, 32), torch.zeros(32, 64), ExpertFormat("int8"))
    with pytest.raises(ValueError, match="is no"):
        unpack(torch.zeros(8, dtype=torch.uint8), 32, 32, ExpertFormat("int8"), torch.float32)
