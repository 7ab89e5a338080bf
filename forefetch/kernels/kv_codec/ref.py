"""The truth: `seal` turns pages of K and V into blobs, `open_pages` turns blobs back. Byte layout: `formats.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from forefetch.kernels.kv_codec import orders
from forefetch.kernels.kv_codec.fit import GRIDS, Fitted, fit, fit_fp4, recode, recode_fp4
from forefetch.kernels.kv_codec.formats import GROUP, SATURATION, KvFormat

_FACTOR_V, _FACTOR_K, _CHANNELS, _THIRDS = slice(0, 4), slice(4, 8), slice(8, 32), slice(32, 128)


def seal(k: Tensor, v: Tensor, format: KvFormat, *, skip: int = 0, weight: Tensor | None = None) -> Tensor:
    """k, v [n, T, D] of any float type -> blobs uint8 [n, blob_bytes].

    Values are taken as float16 and saturate at 6e4. The first `skip` tokens are left out of every fit (page 0: its sinks) and
    their codes are 0. `weight` [n, D] >= 0: what an error in a channel of K costs (the mean square of the queries there); it
    decides which channels are outliers and which get a third bit. Without it all cost the same.
    """
    keys, values = (_saturated(part, skip) for part in (k, v))
    valid = torch.ones(format.page, device=k.device)
    valid[:skip] = 0
    blobs = torch.zeros((len(k), format.blob_bytes), dtype=torch.uint8, device=k.device)
    writer = _Writer(format, blobs)
    if format.name == "fp4":
        _seal_fp4(keys, values, valid, weight, writer)
    else:
        _seal_keys(keys, valid, weight, writer)
        _seal_values(values, valid, writer)
    return blobs


def _saturated(x: Tensor, skip: int) -> Tensor:
    x = x.float().clamp(-SATURATION, SATURATION).half().float()
    return torch.cat((torch.zeros_like(x[:, :skip]), x[:, skip:]), 1) if skip else x


def _seal_keys(keys: Tensor, valid: Tensor, weight: Tensor | None, writer: _Writer) -> None:
    """Per channel: groups are the columns of keys [n, T, D]."""
    format, columns = writer.format, keys.transpose(1, 2).contiguous()  # [n, D, T]
    coarse = fit(columns, valid, GRIDS["coarse" if format.name == "mixed" else format.name], unbiased=True)
    cost = torch.ones_like(coarse.error) if weight is None else weight.double()
    outliers = _worst(coarse.error * cost, format.outliers)
    best, chosen = coarse, None
    if format.name == "mixed":
        fine = fit(columns, valid, GRIDS["fine"], unbiased=True)
        gain = ((coarse.error - fine.error) * cost).scatter(1, outliers, -1.0)
        thirds = _worst(gain, format.thirds)
        chosen = torch.zeros_like(gain, dtype=torch.bool).scatter_(1, thirds, True)
        best = Fitted(*(torch.where(_like(chosen, a), b, a) for a, b in zip(coarse, fine, strict=True)))
        writer.meta(_THIRDS, thirds.to(torch.uint8))
    dense = torch.ones_like(best.scale).scatter_(1, outliers, 0.0)
    counted = (dense * best.scale > 0)[..., None]
    grid = GRIDS["coarse" if format.name == "mixed" else format.name]
    codes = recode(best, columns, counted, valid, grid, GRIDS["fine"], chosen) * dense.to(torch.uint8)[..., None]
    if chosen is not None:
        bits = _rows(codes, thirds) & 1  # [n, thirds, T]
        writer.bits("k_thirds", bits.flatten(1)[:, orders.third_order(format).to(keys.device)], 1)
        codes = torch.where(chosen[..., None], codes >> 1, codes)
    writer.codes("k", codes.transpose(1, 2), valid)
    writer.halves("k_scale", best.scale * dense)
    writer.halves("k_zero", best.zero * dense)
    writer.factors(None, torch.ones(len(keys), device=keys.device))
    writer.outliers(columns, outliers)


def _seal_values(values: Tensor, valid: Tensor, writer: _Writer) -> None:
    """Per token: groups are the rows of values [n, T, D]."""
    format = writer.format
    everything = torch.ones(format.head_dim, device=values.device)
    grid = GRIDS["coarse" if format.name == "mixed" else format.name]
    fitted = fit(values, everything, grid, unbiased=True)
    most = fitted.scale.amax(1)
    factor = torch.where(most > 0, torch.exp2(torch.ceil(torch.log2(most.clamp_min(2.0**-30)))), 1.0)
    writer.codes("v", fitted.codes, valid)
    writer.halves("v_scale", _tokens(fitted.scale / factor[:, None], format))
    writer.halves("v_zero", _tokens(fitted.zero, format))
    writer.factors(factor, None)


def _seal_fp4(keys: Tensor, values: Tensor, valid: Tensor, weight: Tensor | None, writer: _Writer) -> None:
    format, columns = writer.format, keys.transpose(1, 2).contiguous()
    k = fit_fp4(columns, valid)
    cost = torch.ones_like(k.error) if weight is None else weight.double()
    outliers = _worst(k.error * cost, format.outliers)
    dense = torch.ones_like(k.zero).scatter_(1, outliers, 0.0)
    v = fit_fp4(values, torch.ones(format.head_dim, device=values.device))
    codes = recode_fp4(k, columns, dense[..., None] > 0, valid) * dense.to(torch.uint8)[..., None]
    writer.codes("k", codes.transpose(1, 2), valid)
    writer.codes("v", v.codes, valid)
    writer.bytes("k_scale", (k.scales * dense[..., None]).transpose(1, 2).to(torch.float8_e4m3fn))  # [n, T/32, D]
    writer.halves("k_zero", k.zero * dense)
    writer.bytes("v_scale", _tokens(v.scales.transpose(1, 2), format).to(torch.float8_e4m3fn))  # [n, D/32, T]
    writer.halves("v_zero", _tokens(v.zero, format))
    writer.factors(v.factor, k.factor)
    writer.outliers(columns, outliers)


def _worst(cost: Tensor, count: int) -> Tensor:
    """cost [n, D] -> the `count` channels that cost most, ascending; of equal ones the lower."""
    return cost.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """x [n, D, T], index [n, k] -> [n, k, T]."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))


def _like(mask: Tensor, x: Tensor) -> Tensor:
    return mask if x.dim() == mask.dim() else mask[..., None]


def _tokens(x: Tensor, format: KvFormat) -> Tensor:
    """[..., T] in token order."""
    return x[..., orders.token_order(format).to(x.device)]


class _Writer:
    """Puts parts into their sections of `blobs` [n, blob_bytes]."""

    def __init__(self, format: KvFormat, blobs: Tensor) -> None:
        self.format, self.blobs = format, blobs

    def bytes(self, section: str, data: Tensor) -> None:
        """data [n, ...] of any type whose bytes fill the section."""
        self.blobs[:, self.format.sections[section].span] = data.contiguous().flatten(1).view(torch.uint8)

    def halves(self, section: str, data: Tensor) -> None:
        """Numbers as float16."""
        self.bytes(section, data.half())

    def bits(self, section: str, fields: Tensor, bits: int) -> None:
        """Fields [n, count], already in stored order."""
        self.bytes(section, orders.pack(fields, bits))

    def codes(self, which: str, codes: Tensor, valid: Tensor) -> None:
        """codes [n, T, D]: of "k" or "v"; those of tokens that are not valid become 0."""
        format = self.format
        flat = (codes * valid.to(torch.uint8)[:, None]).flatten(1)
        if format.name == "asym3":
            self.bits(f"{which}_thirds", flat[:, orders.code_order(format, which, 1).to(flat.device)] & 1, 1)
            flat = flat >> 1
        order = orders.code_order(format, which, format.code_bits).to(flat.device)
        self.bits(f"{which}_codes", flat[:, order], format.code_bits)

    def outliers(self, columns: Tensor, channels: Tensor) -> None:
        """columns [n, D, T], channels [n, outliers]."""
        if self.format.outliers:
            self.halves("outliers", _tokens(_rows(columns, channels), self.format))
            self.meta(slice(_CHANNELS.start, _CHANNELS.start + 4 * self.format.outliers), channels.int())

    def factors(self, v: Tensor | None, k: Tensor | None) -> None:
        """Per page [n]; None: written elsewhere."""
        for place, factor in ((_FACTOR_V, v), (_FACTOR_K, k)):
            if factor is not None:
                self.meta(place, factor.float()[:, None])

    def meta(self, place: slice, data: Tensor) -> None:
        """data [n, ...] from the place's start on."""
        raw = data.contiguous().view(torch.uint8)
        start = self.format.sections["meta"].offset + place.start
        self.blobs[:, start : start + raw.shape[1]] = raw


class Parts:
    """Views of blobs [n, blob_bytes] as what they hold; every method is one section. Letters: n pages, T, D, N outliers."""

    def __init__(self, blobs: Tensor, format: KvFormat) -> None:
        self.blobs, self.format = blobs, format

    def section(self, name: str) -> Tensor:
        """Its bytes [n, size]."""
        return self.blobs[:, self.format.sections[name].span]

    def halves(self, name: str) -> Tensor:
        """As float32 [n, size / 2]."""
        return self.section(name).contiguous().view(torch.float16).float()

    def tokens(self, x: Tensor) -> Tensor:
        """[..., T] in token order -> by token."""
        return x[..., orders.inverse(self.format, "tokens").to(x.device)]

    def factor(self, which: str) -> Tensor:
        """K's or V's page factor: float32 [n]."""
        meta = self.section("meta")[:, _FACTOR_K if which == "k" else _FACTOR_V]
        return meta.contiguous().view(torch.float32)[:, 0]

    def channels(self) -> Tensor:
        """Outlier channels: int64 [n, N]."""
        return self.section("meta")[:, _CHANNELS].contiguous().view(torch.int32)[:, : self.format.outliers].long()

    def third_channels(self) -> Tensor:
        """`mixed`: int64 [n, thirds]."""
        return self.section("meta")[:, _THIRDS][:, : self.format.thirds].long()

    def outliers(self) -> Tensor:
        """float32 [n, N, T]."""
        return self.tokens(self.halves("outliers").view(-1, self.format.outliers, self.format.page))

    def scale(self, which: str) -> Tensor:
        """With the factor, ready to broadcast over [n, T, D]."""
        format, factor = self.format, self.factor(which)[:, None]
        if format.name != "fp4":
            scale = self.halves(f"{which}_scale") * factor
            return scale[:, None] if which == "k" else self.tokens(scale)[..., None]
        raw = self.section(f"{which}_scale").contiguous().view(torch.float8_e4m3fn).float() * factor
        if which == "k":
            return raw.view(-1, format.page // GROUP, format.head_dim).repeat_interleave(GROUP, 1)
        groups = self.tokens(raw.view(-1, -(-format.head_dim // GROUP), format.page))  # [n, D/32, T]
        return groups.repeat_interleave(GROUP, 1)[:, : format.head_dim].transpose(1, 2)

    def zero(self, which: str) -> Tensor:
        """Ready to broadcast over [n, T, D]."""
        zero = self.halves(f"{which}_zero")
        return zero[:, None] if which == "k" else self.tokens(zero)[..., None]

    def fields(self, which: str, bits: int, section: str) -> Tensor:
        """Codes or thirds by element: uint8 [n, T, D]."""
        format = self.format
        flat = orders.unpack(self.section(section), bits)
        return flat[:, orders.inverse(format, which, bits).to(flat.device)].view(-1, format.page, format.head_dim)

    def levels(self, which: str) -> Tensor:
        """float32 [n, T, D]."""
        format = self.format
        codes = self.fields(which, format.code_bits, f"{which}_codes")
        levels = torch.tensor(format.levels, dtype=torch.float32, device=codes.device)[codes.int()]
        if format.name == "asym3":
            levels += self.fields(which, 1, f"{which}_thirds").float() * 2 - 1
        elif format.name == "mixed" and which == "k":
            bits = orders.unpack(self.section("k_thirds"), 1)[:, orders.inverse(format, "thirds").to(codes.device)]
            signs = bits.view(-1, format.thirds, format.page).transpose(1, 2).float() * 2 - 1  # [n, T, thirds]
            levels.scatter_add_(2, self.third_channels()[:, None].expand_as(signs), signs)
        return levels


def open_pages(blobs: Tensor, format: KvFormat, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """blobs [n, blob_bytes] -> K and V [n, T, D] as attention sees them. Float64 gives the exact values."""
    parts = Parts(blobs, format)
    k, v = (parts.levels(w).to(dtype) * parts.scale(w).to(dtype) + parts.zero(w).to(dtype) for w in "kv")
    if format.outliers:
        values = parts.outliers().transpose(1, 2).to(dtype)  # [n, T, N]
        k.scatter_(2, parts.channels()[:, None].expand_as(values), values)
    return k, v
