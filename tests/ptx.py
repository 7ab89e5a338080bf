"""Runs the few instructions of inline PTX that kernels use, on arrays of 32-bit registers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

Words = NDArray[np.uint32]


def run(text: str, inputs: dict[int, Words], outputs: int) -> list[Words]:
    """`text` of an `inline_asm_elementwise`, registers by number as inputs -> registers 0 .. outputs - 1."""
    registers: dict[str, Words] = {f"${number}": value for number, value in inputs.items()}
    size = next(iter(inputs.values())).shape
    for line in map(str.strip, re.sub(r"^\{|\}$", "", text.strip()).split(";")):
        if line and not line.startswith(".reg"):
            name, rest = line.split(None, 1)
            places = re.findall(r"\{[^}]*\}|[^,\s][^,]*", rest)
            _step(name, [place.strip() for place in places], registers, size)
    return [registers[f"${number}"] for number in range(outputs)]


def _step(name: str, places: list[str], registers: dict[str, Words], size: tuple[int, ...]) -> None:
    def value(place: str) -> Words:
        if place.startswith("{"):
            low, high = (value(part) for part in _parts(place))
            return (low & 0xFFFF) | (high << np.uint32(16))
        if re.match(r"0x|\d", place):
            return np.full(size, int(place, 0), np.uint32)
        return registers[place]

    result = OPERATIONS[name](*(value(place) for place in places[1:])).astype(np.uint32)
    if places[0].startswith("{"):
        low, high = _parts(places[0])
        registers[low], registers[high] = result & np.uint32(0xFFFF), result >> np.uint32(16)
    else:
        registers[places[0]] = result


def _parts(place: str) -> list[str]:
    return [part.strip() for part in place.strip("{}").split(",")]


def _halves(function: Callable[..., NDArray[np.float32]], count: int) -> Callable[..., Words]:
    """A float16 operation on `count` halves of each register, rounded once."""

    def apply(*words: Words) -> Words:
        out = np.zeros(words[0].shape, np.uint32)
        for place in range(count):
            shift = np.uint32(16 * place)
            parts = [
                ((word >> shift) & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16).astype(np.float64) for word in words
            ]
            out |= function(*parts).astype(np.float16).view(np.uint16).astype(np.uint32) << shift
        return out

    return apply


def _minus_bfloat16(a: Words, b: Words) -> Words:
    """Exact where the difference is representable; nothing else is asked of it."""
    parts = [torch.from_numpy(np.ascontiguousarray(word)).view(torch.bfloat16).double() for word in (a, b)]
    exact = parts[0] - parts[1]
    assert torch.equal(exact.bfloat16().double(), exact)
    return exact.bfloat16().view(torch.int32).numpy().view(np.uint32)


def _prmt(a: Words, b: Words, selector: Words) -> Words:
    pair = np.stack([(word >> np.uint32(8 * place)) & np.uint32(255) for word in (a, b) for place in range(4)])
    out = np.zeros(a.shape, np.uint32)
    for place in range(4):
        nibble = (selector >> np.uint32(4 * place)) & np.uint32(15)
        byte = np.take_along_axis(pair, (nibble & np.uint32(7)).astype(np.int64)[None], 0)[0]
        byte = np.where(nibble >> np.uint32(3), np.where(byte & np.uint32(128), 255, 0), byte).astype(np.uint32)
        out |= byte << np.uint32(8 * place)
    return out


def _lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    if int(table.flat[0]) != 0xEA:
        raise NotImplementedError(hex(int(table.flat[0])))
    return (a & b) | c


def _e4m3(pair: Words) -> Words:
    both = np.stack((pair & np.uint32(255), (pair >> np.uint32(8)) & np.uint32(255)), -1).astype(np.uint8)
    return torch.from_numpy(both).view(torch.float8_e4m3fn).half().numpy().view(np.uint32)[..., 0]


def _reciprocal(a: Words) -> Words:
    with np.errstate(divide="ignore"):
        return (np.float32(1.0) / a.view(np.float32)).astype(np.float32).view(np.uint32)


OPERATIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "xor.b32": lambda a, b: a ^ b,
    "cvt.rn.f16x2.e4m3x2": _e4m3,
    "cvt.f32.f16": lambda a: (a & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32),
    "mul.rn.f16": _halves(lambda a, b: a * b, 1),
    "rcp.approx.ftz.f32": _reciprocal,
    "sub.rn.bf16x2": _minus_bfloat16,
    "sub.rn.f16x2": _halves(lambda a, b: a - b, 2),
    "fma.rn.f16x2": _halves(lambda a, b, c: a * b + c, 2),
    "mad.lo.s32": lambda a, b, c: (a.astype(np.int64) * b + c) & 0xFFFFFFFF,
}


def elements(registers: Sequence[Words], type: type[np.generic]) -> NDArray[np.generic]:
    """Registers [n] each -> [n, elements of `type` in all of them], the lowest bits first."""
    return np.ascontiguousarray(np.stack(registers, -1)).view(type)
