"""What the Hopper kernel's registers hold, without a GPU: its inline PTX run on sealed pages, its own reorderings applied, and
every element found at the place of the operand where queries or weights will meet it."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import ptx
import pytest
import torch
from torch import Tensor

from forefetch.kernels.attention.gluon import ONE, codes, decode, level_bytes
from forefetch.kernels.attention.sealed_cpu import levels as levels_of
from forefetch.kernels.kv_codec import KvFormat, seal
from forefetch.kernels.kv_codec.formats import GROUP
from forefetch.kernels.kv_codec.ref import Parts

SHIM = types.SimpleNamespace(
    reshape=torch.reshape, permute=torch.permute, join=lambda a, b: torch.stack((a, b), -1), split=lambda x: x.unbind(-1)
)


def reordered(function: Any, *arguments: Any) -> Any:
    """A kernel's reordering (`gl.reshape`, `gl.permute`, ...) on torch tensors."""
    return types.FunctionType(function.fn.__code__, {"gl": SHIM})(*arguments)


def page(name: str) -> tuple[KvFormat, Parts]:
    format = KvFormat(name, thirds=32 if name == "mixed" else 0)
    k, v = torch.randn(2, 1, 128, 128, generator=torch.Generator().manual_seed(7)) * 3
    return format, Parts(seal(k, v, format), format)


def words(parts: Parts, section: str) -> Any:
    return parts.section(section)[0].numpy().view(np.uint32)


def operand(parts: Parts, which: str, masked: int = 0) -> Tensor:
    """Levels of K or V as operands B: [4 chunks, 128 summed, 32]; `masked`: bits of the words that are lost."""
    low, high = level_bytes(parts.format)
    chunks = []
    for chunk in range(4):
        if parts.format.name == "fp4":
            some = words(parts, f"{which}_codes")[chunk * 512 : chunk * 512 + 512]
            table, other, one = (np.full(512, number & 0xFFFFFFFF, np.uint32) for number in (low, high, ONE))
            registers = ptx.run(decode._DECODE4.value, {4: some, 12: table, 20: other, 28: one}, 4)
            levels = torch.from_numpy(ptx.elements(registers, np.float16).astype(np.float32))
            chunks.append(reordered(decode.levels_to_k16, levels))
            continue
        some = words(parts, f"{which}_codes")[chunk * 256 : chunk * 256 + 256] & ~np.uint32(masked)
        table, other, one = (np.full(256, number & 0xFFFFFFFF, np.uint32) for number in (low, high, ONE))
        if parts.format.name == "asym3":
            third = words(parts, f"{which}_thirds")[chunk * 128 : chunk * 128 + 128]
            third = np.stack((third << np.uint32(2), third), -1).reshape(256)
            registers = ptx.run(decode._DECODE3.value, {4: some, 20: third, 36: table, 52: other, 68: one}, 4)
        else:
            registers = ptx.run(decode._DECODE.value, {4: some, 20: table, 36: one}, 4)
        levels = torch.from_numpy(ptx.elements(registers, np.int8).astype(np.float32))
        chunks.append(reordered(decode.levels_to_k8, levels))
    return torch.stack(chunks)


def summed_channels(name: str) -> Tensor:
    """Channel at each place of the summed index, as queries are reordered."""
    function = codes.channels_to_k16 if name == "fp4" else codes.channels_to_k8
    return reordered(function, torch.arange(128).expand(8, 128))[0]


def summed_tokens(name: str) -> Tensor:
    """Token at each place of the summed index, as weights are reordered."""
    quarters = torch.arange(128).expand(8, 128).split(32, 1)
    if name != "fp4":
        quarters = [reordered(codes.tokens_to_k8, quarter, 32) for quarter in quarters]
    return reordered(codes.join_quarters, quarters)[0]


@pytest.mark.parametrize("name", ["e2m0", "asym2", "mixed", "asym3", "fp4"])
def test_levels_meet_the_queries_and_weights_that_are_theirs(name: str) -> None:
    _, parts = page(name)
    k, v = levels_of(parts, "k")[0], levels_of(parts, "v")[0]  # [token, channel]
    expected = k[:, summed_channels(name)].T.reshape(128, 4, 32).transpose(0, 1)
    assert torch.equal(operand(parts, "k"), expected)
    expected = v[summed_tokens(name)].reshape(128, 4, 32).transpose(0, 1)
    assert torch.equal(operand(parts, "v"), expected)
    if name == "e2m0":
        assert not torch.equal(operand(parts, "v", masked=1 << 9), expected)  # one bit of each word


def test_third_bits_of_listed_channels() -> None:
    format, parts = page("mixed")
    some = words(parts, "k_thirds").reshape(32, 2, 2)  # as `third_words` splits them: twice by the last index
    listed = parts.third_channels()[0][reordered(decode.listed_to_k8, torch.arange(32))]
    expected = Parts(parts.blobs, format).levels("k")[0] - levels_of(parts, "k")[0]  # +-1 where there is a third bit
    for chunk, (first, second) in enumerate(((0, 0), (1, 0), (0, 1), (1, 1))):
        registers = ptx.run(decode._BITS.value, {8: np.ascontiguousarray(some[:, second, first])}, 8)
        bits = torch.from_numpy(ptx.elements(registers, np.int8).astype(np.float32))
        assert torch.equal(reordered(decode.bits_to_k8, bits) - 1, expected[chunk * 32 : chunk * 32 + 32, listed].T)


def test_scales_of_fp4() -> None:
    _, parts = page("fp4")
    for which, order in (("k", torch.arange(128)), ("v", reordered(codes.stored_to_tokens, torch.arange(128)))):
        some = words(parts, f"{which}_scale")
        pairs = ptx.elements(ptx.run(decode._E4M3.value, {2: some}, 2), np.float16).reshape(4, 128)
        factor = float(parts.factor(which))
        found = torch.from_numpy(pairs.astype(np.float32))[:, order] * factor
        exact = parts.scale(which)[0]  # [token, channel]
        expected = exact[::GROUP] if which == "k" else exact[:, ::GROUP].T
        assert torch.equal(found, expected)


def test_numbers_split_in_two_bytes() -> None:
    """x = high + low / 254 within half a step."""
    x = torch.linspace(-127, 127, 4096).half()
    some = x.numpy().view(np.uint32).reshape(-1, 2)
    one = np.full(len(some), ONE, np.uint32)
    high, low = ptx.run(codes._BYTES.value, {2: some[:, 0], 3: some[:, 1], 4: one, 5: one}, 2)
    both = [ptx.elements([part], np.int8).astype(np.float64).reshape(-1) for part in (high, low)]
    assert np.abs(both[0] + both[1] / codes.STEPS.value - x.double().numpy()).max() <= 0.5 / codes.STEPS.value
