"""What heads say, left where `pick` and `enter` find it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["entries", "per_target", "first"])
def note(
    experts, probabilities, chance, misses, entries, per_target, first, E: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program. chance of consecutive layers from `first` on = 1 - prod(1 - p) over what rows name; [D, per_target] entries.

    Whatever heads say, numbers come out: ids that are no experts and probabilities that are no numbers count as not named.
    """
    for start in range(0, entries, BLOCK):
        at = start + tl.arange(0, BLOCK)
        expert = tl.load(experts + at, mask=at < entries, other=-1).to(tl.int32)
        p = tl.load(probabilities + at, mask=at < entries, other=0.0).to(tl.float32)
        use = (expert >= 0) & (expert < E) & (p > 0.0)
        missed = tl.log(1.0 - tl.minimum(tl.where(use, p, 0.0), 0.999999))
        tl.atomic_add(misses + at // per_target * E + expert, missed, mask=use, sem="relaxed")
    tl.debug_barrier()
    e = tl.arange(0, EP)
    real = e < entries // per_target * E
    missed = tl.load(misses + e, mask=real, other=0.0, volatile=True)
    tl.store(chance + first * E + e, 1.0 - tl.exp(missed), mask=real)
    tl.debug_barrier()  # every thread has read before one of them writes
    tl.store(misses + e, tl.zeros([EP], tl.float32), mask=real)
