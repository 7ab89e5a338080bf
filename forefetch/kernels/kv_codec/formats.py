"""What a sealed KV page is: the formats, their parameters, and the place of every byte. No torch here.

A page is T tokens (the fixed grid from position 0) of one layer and KV head: K and V [T, D] of float16 values turned into one
blob. A value is `scale * level + zero`; for keys scale and zero belong to a channel, for values to a token.

| name    | levels (integers)                                              | a code is           | bits, D = T = 128 |
|---------|----------------------------------------------------------------|---------------------|-------------------|
| `e2m0`  | +1 +4 -1 -4: exponent bit of radix 4, then sign                | 2 bits              | 2.34              |
| `asym2` | -3 -1 +1 +3                                                    | 2 bits              | 2.34              |
| `mixed` | -6 -2 +2 +6, and +-1 more in the `thirds` worst channels of K  | 2 bits, some 3      | 2.47 (32 channels)|
| `asym3` | -7 -5 ... +7 as the same 2 bits and +-1                        | 2-bit + 1-bit plane | 3.34              |
| `fp4`   | 3 10 16 24 32 40 48 64 and their negatives (bit 3)             | 4 bits              | 4.47              |

`fp4` has a scale per 32 elements (K: 32 tokens of a channel, V: 32 channels of a token) as float8 E4M3, times a power of two
for the page. Its levels are floats of sign, exponent and two bits of mantissa, sixteen of them: E2M1, which has the same size,
spends two codes on zero and most others near it, and costs 1.1 to 1.5 dB more (benchmarks/LOG.md).

`outliers` channels of K lie in float16 beside the codes; their scale, zero and codes are 0, so that the dense part adds
`0 * level + 0`.

Sections of a blob, each starting at a multiple of 128 bytes, absent where the format does not need them (offsets: e2m0,
D = T = 128):

| section    | content                                                                                      | at   |
|------------|----------------------------------------------------------------------------------------------|------|
| `k_codes`  | codes of K in K order                                                                        | 0    |
| `v_codes`  | codes of V in V order                                                                        | 4096 |
| `k_scale`  | float16 [D]; fp4: E4M3 [T/32][D]                                                             | 8192 |
| `k_zero`   | float16 [D]                                                                                  | 8448 |
| `v_scale`  | float16 [T] in token order, at most 1; fp4: E4M3 [D/32 rounded up][T in token order]         | 8704 |
| `v_zero`   | float16 [T] in token order                                                                   | 8960 |
| `outliers` | float16 [outliers][T in token order]                                                         | 9216 |
| `k_thirds` | asym3: bits of K in K order; mixed: those of its list of channels, see `orders.py`           |      |
| `v_thirds` | asym3: bits of V in V order                                                                  |      |
| `meta`     | float32 V factor, float32 K factor, int32 outlier channels[6], uint8 third channels[96]      | 9472 |

V's scales (not its zeros) are multiplied by the V factor, K's by the K factor; both are powers of two, K's is 1 but for fp4.
Unused entries of `meta` are 0. Numbers are little-endian. K, V and token order: `orders.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

ALIGN = 128
"""Every section starts at a multiple of this many bytes."""
GROUP = 32
"""fp4: elements that share a scale."""
MAX_OUTLIERS = 6
MAX_THIRDS = 96
SATURATION = 6e4
"""Magnitudes are clamped to this before anything else, so that nothing of a page can become infinite in float16."""
_FP4 = (3, 10, 16, 24, 32, 40, 48, 64)
"""Lloyd's levels for 32 Gaussian values under their own scale (1, 3.0, 5.2, 7.5, 10, 12.9, 16.3, 21.1) as float8 E5M2."""
LEVELS = {
    "e2m0": (1, 4, -1, -4),
    "asym2": (-3, -1, 1, 3),
    "mixed": (-6, -2, 2, 6),
    "asym3": (-6, -2, 2, 6),
    "fp4": (*_FP4, *(-level for level in _FP4)),
}
"""Level of each code. `mixed` and `asym3`: +1 where the third bit is set and -1 where it is not, in channels that have one."""
NAMES = tuple(LEVELS)


class Section(NamedTuple):
    """Where a part of the blob lies, in bytes."""

    offset: int
    size: int

    @property
    def span(self) -> slice:
        """The section's bytes."""
        return slice(self.offset, self.offset + self.size)


@dataclass(frozen=True, slots=True)
class KvFormat:
    """One format with all its parameters; equal formats give equal bytes for equal values. ValueError: not supported.

    `outliers`: channels of K kept in float16. `thirds`: channels of K with a third bit (`mixed` only). `sinks`: first tokens of
    a sequence that attention reads from a float16 block instead of page 0; they are left out of page 0's fit. `recent`: newest
    tokens that are never sealed, so that a float16 tail holds up to `page + recent` tokens.
    """

    name: str
    head_dim: int = 128
    page: int = 128
    outliers: int = 1
    thirds: int = 0
    sinks: int = 4
    recent: int = 112

    def __post_init__(self) -> None:
        if self.name not in LEVELS:
            raise ValueError(f"KV format {self.name!r}: must be one of {', '.join(NAMES)}")
        if self.head_dim % 16 or not 16 <= self.head_dim <= 256:
            raise ValueError(f"KV format {self.name}: head dim {self.head_dim} is not a multiple of 16 up to 256")
        if self.page % 32 or not 32 <= self.page <= 1024:
            raise ValueError(f"KV format {self.name}: a page of {self.page} tokens is not a multiple of 32 up to 1024")
        if not 0 <= self.outliers <= min(MAX_OUTLIERS, self.head_dim):
            raise ValueError(f"KV format {self.name}: {self.outliers} outlier channels are not 0 to {MAX_OUTLIERS}")
        if (self.name == "mixed") != (self.thirds > 0):
            raise ValueError(f"KV format {self.name}: channels with a third bit belong to mixed, which needs some")
        if self.thirds % 16 or not 0 <= self.thirds <= min(MAX_THIRDS, self.head_dim - self.outliers):
            raise ValueError(
                f"KV format {self.name}: {self.thirds} third-bit channels: not a multiple of 16 up to {MAX_THIRDS}"
            )
        if not 0 <= self.sinks < self.page or self.recent < 0:
            raise ValueError(f"KV format {self.name}: sinks must be 0 to {self.page - 1} and recent not negative")

    @property
    def levels(self) -> tuple[int, ...]:
        """Level of each code."""
        return LEVELS[self.name]

    @property
    def code_bits(self) -> int:
        """Bits of a code in `k_codes` and `v_codes`."""
        return 4 if self.name == "fp4" else 2

    @property
    def fragment_order(self) -> bool:
        """Whether codes lie in the order of tensor-core fragments (see `orders.py`) or row by row."""
        return self.page == 128 and self.head_dim % 64 == 0

    @property
    def tail_tokens(self) -> int:
        """Tokens that a tail must have room for."""
        return self.page + self.recent

    @property
    def sections(self) -> dict[str, Section]:
        """The blob's sections by name, in the order they lie."""
        return _sections(self)

    @property
    def blob_bytes(self) -> int:
        """Bytes of one page of one KV head: K and V."""
        meta = _sections(self)["meta"]
        return meta.offset + meta.size

    def sealed_pages(self, position: int) -> int:
        """How many leading pages a query at `position` reads sealed: those older than `recent`. A function of the position
        alone, so that chunks of a prompt, batches and replays do not matter."""
        return max(0, position - self.recent) // self.page

    def parameters(self) -> str:
        """Canonical text of everything that the bytes depend on besides name, page and geometry; part of content keys. `recent`
        is among it: deeper layers' keys and values follow from what shallower ones attended to. The codec counts how often what
        sealing makes of equal values has changed."""
        codec = 4 if self.name == "fp4" else 2
        return f"codec={codec} outliers={self.outliers} thirds={self.thirds} sinks={self.sinks} recent={self.recent}"


@lru_cache
def _sections(format: KvFormat) -> dict[str, Section]:
    dim, page, name = format.head_dim, format.page, format.name
    codes = dim * page * format.code_bits // 8
    groups = -(-dim // GROUP)
    sizes = {
        "k_codes": codes,
        "v_codes": codes,
        "k_scale": page // GROUP * dim if name == "fp4" else 2 * dim,
        "k_zero": 2 * dim,
        "v_scale": groups * page if name == "fp4" else 2 * page,
        "v_zero": 2 * page,
        "outliers": 2 * page * format.outliers,
        "k_thirds": {"asym3": dim * page, "mixed": format.thirds * page}.get(name, 0) // 8,
        "v_thirds": dim * page // 8 if name == "asym3" else 0,
        "meta": ALIGN,
    }
    sections, at = {}, 0
    for key, size in sizes.items():
        if size:
            sections[key] = Section(at, size)
            at += -(-size // ALIGN) * ALIGN
    return sections
