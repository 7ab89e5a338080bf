"""The way into a layer's attention for a decode step's rows: norm, QKV projection, norm per head, rotation, cache write.

`ref.py` is the definition; `triton.py` does it in one launch. The router does not use it: it has not been timed beside the
three launches that it would replace (benchmarks/LOG.md). Letters: T rows, H hidden, Hq / Hkv query / KV heads, D head dim, N
places of the cache.
"""

from __future__ import annotations

from forefetch.kernels.entry.ref import enter_layer

__all__ = ["enter_layer"]
