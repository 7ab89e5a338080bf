"""Which experts sit in which slots, inside a compiled step: the rules of `expert_worker/slots.py`, on the same table.

`table` is its Table. Rounding is Python's, so that both ways choose the same victims.
"""

from __future__ import annotations

from forefetch.kernels.compiled.toolchain import compiled

NOWHERE = -1
FAST, SLOW, FAST_SHARE, LEAST = 0.2, 0.01, 0.3, 1e-4
AT, FREE, WASTED = 0, 1, 2


@compiled(fastmath=False)
def used(table, layer, experts, uses):
    """A call of `layer` needs these experts, each as much as `uses` says."""
    begin, end = table.first[layer], table.first[layer + 1]
    for expert in range(begin, end):
        table.fast[expert] *= 1 - FAST
        table.slow[expert] *= 1 - SLOW
    for i in range(len(experts)):
        table.fast[experts[i]] += FAST * uses[i]
        table.slow[experts[i]] += SLOW * uses[i]
    for expert in range(begin, end):
        table.gap[expert] = gap_of(table, usually(table, expert))
    table.numbers[AT] = layer


@compiled(fastmath=False)
def usually(table, expert):
    """With what probability a call of its layer needs an expert."""
    return FAST_SHARE * table.fast[expert] + (1 - FAST_SHARE) * table.slow[expert]


@compiled(fastmath=False)
def gap_of(table, probability):
    """layers * (1/p - 1)."""
    return table.layers / max(probability, LEAST) - table.layers


@compiled(fastmath=False)
def distance(table, layer):
    """Calls until that layer's next one."""
    return (layer - table.numbers[AT] - 1) % table.layers + 1


@compiled(fastmath=False)
def calls_until(table, layer, probability):
    """Expected calls until an expert is needed that the next call of `layer` needs with this probability."""
    return distance(table, layer) + gap_of(table, probability)


@compiled(fastmath=False)
def place(table, expert, unless, needed):
    """A slot for an expert that has none, or NOWHERE."""
    if table.numbers[FREE]:
        table.numbers[FREE] -= 1
        slot = table.free[table.numbers[FREE]]
    else:
        slot = victim(table, expert, unless, needed)
        if slot == NOWHERE:
            return slot
        evict(table, slot)
    seat(table, expert, slot)
    return slot


@compiled()
def seat(table, expert, slot):
    """An empty slot is the expert's, who is not there yet."""
    table.expert_in[slot], table.slot_of[expert] = expert, slot
    table.ready[slot] = table.unused[slot] = False
    table.held[table.layer_of[expert]] += 1


@compiled(fastmath=False)
def victim(table, expert, unless, needed):
    """The slot whose expert is expected to be needed last; of equals the first."""
    layer, best, best_until, last, last_until = table.layer_of[expert], NOWHERE, -1.0, NOWHERE, -1.0
    distances = table.distances  # once for each layer: a slot each would be a division each
    for other in range(table.layers):
        distances[other] = distance(table, other)
    for slot in range(table.capacity):
        if table.pins[slot] > 0 or not table.ready[slot]:
            continue
        other = table.expert_in[slot]
        at = table.layer_of[other]
        until = table.gap[other] + distances[at]
        if until > last_until:
            last, last_until = slot, until
        if until > best_until and not (table.predicted[other] or (table.held[at] <= table.floor and at != layer)):
            best, best_until = slot, until
    if best == NOWHERE and needed:
        best, best_until = last, last_until
    return best if best_until > unless else NOWHERE


@compiled()
def evict(table, slot):
    """Its expert is nowhere now."""
    expert = table.expert_in[slot]
    table.numbers[WASTED] += table.unused[slot]
    table.held[table.layer_of[expert]] -= 1
    table.slot_of[expert] = NOWHERE


@compiled()
def drop(table, expert):
    """Empties an unpinned expert's slot, filled or not."""
    slot = table.slot_of[expert]
    evict(table, slot)
    table.expert_in[slot] = NOWHERE
    table.ready[slot] = table.unused[slot] = False
    table.free[table.numbers[FREE]] = slot
    table.numbers[FREE] += 1
