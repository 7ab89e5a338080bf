"""Room for blocks in memory and on disk, and who gives way. Pure; part of the store, which holds the index.

Without a disk, memory is the blocks' home: what leaves it is evicted. With one, the disk is; memory then holds what is on its
way there (dirty) and, as long as there is room, what was read last (warm). What is decided here the caller carries out:
names in `dropped` leave memory, entries from `take_doomed` leave the disk, and `deleted` says that they have.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kv_service.store_order import Entry, Order, State

HIGH, LOW = 0.95, 0.90
"""Watermarks of a budget: eviction begins when more than HIGH of it would be used and goes on to LOW."""
PRESSED = 0.5
"""Share of the memory budget that may wait to be written while blocks are coming in."""
DISK_PAGE = 4096
"""What a block takes on disk is a multiple of this."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets in bytes: of memory, of disk (0: there is none), each tenant's of the blocks' home, and the index's."""

    memory: int
    disk: int = 0
    tenant: int = 1 << 62
    index: int = 1 << 62

    @property
    def home(self) -> int:
        """The budget that decides what is held."""
        return self.disk or self.memory


@dataclass(slots=True)
class _Account:
    """Bytes at home, of a tenant or of all. `out`: those of them whose deletion from disk has not been reported yet."""

    budget: int
    order: Order = field(default_factory=Order)
    used: int = 0
    out: int = 0


class Room:
    """`leaf(entry)`: no block held follows it. `remove(entry)`: the index is to forget it; calls `leave`."""

    def __init__(self, limits: Limits, leaf: Callable[[Entry], bool], remove: Callable[[Entry], None]) -> None:
        self.limits = limits
        self.memory = 0
        self.evicted = self.on_disk = 0
        self.index = self._index_out = 0  # bytes of it; of those, what goes with deletions from disk
        self.dropped: list[bytes] = []
        self._leaf, self._remove = leaf, remove
        self._all = _Account(limits.home)
        self._tenants: dict[bytes, _Account] = {}
        self._dirty: deque[Entry] = deque()
        self._unwritten = 0  # bytes of them
        self._doomed: list[Entry] = []
        self._warm: OrderedDict[bytes, Entry] = OrderedDict()
        self._restless = 0  # blocks that are reserved, dirty or leased: they may give way soon
        self._clock, self._ticks = 0.0, 0

    @property
    def home(self) -> int:
        """Bytes of the home tier in use, those on their way in and out included."""
        return self._all.used

    @property
    def dirty(self) -> bool:
        """Whether a block waits to be written."""
        return bool(self._dirty)

    @property
    def pressed(self) -> bool:
        """Whether so much waits to be written that memory may run short."""
        return self._unwritten > self.limits.memory * PRESSED

    @property
    def doomed(self) -> bool:
        """Whether a block waits to be deleted from disk."""
        return bool(self._doomed)

    # ---- a block comes, is used, goes ----

    def take(self, entry: Entry) -> bool | None:
        """Makes room for a block that is reserved. False: there is none. None: there may be soon."""
        size, mine = self._footprint(entry), self._account(entry)
        fits = self._shrink(mine, size) and self._shrink(self._all, size) and self.shorten(entry.indexed)
        fits = fits and (not self.limits.disk or self._free_memory(entry.size))
        if not fits:
            hopeless = max(size, entry.size) > min(mine.budget, self.limits.home) or entry.size > self.limits.memory
            return None if (self._restless or self._all.out) and not hopeless else False
        self._charge(entry, 1)
        self.memory += entry.size
        self._restless += 1
        return True

    def seal(self, entry: Entry) -> None:
        """A reserved block is whole and in memory."""
        entry.in_memory = True
        self.touch(entry)
        if self.limits.disk:
            entry.dirty = True
            self._dirty.append(entry)
            self._unwritten += entry.size
        else:
            self._restless -= 1
            self.offer(entry)

    def settle(self, entry: Entry) -> None:
        """A block that was found on disk at start."""
        self._charge(entry, 1)
        self.on_disk += 1
        self.touch(entry)
        self.offer(entry)

    def touch(self, entry: Entry) -> None:
        """A use of a block, and so of those before it in its chain."""
        self._ticks += 1
        entry.use(self._clock, self._ticks)

    def lease(self, entry: Entry) -> None:
        """A reader needs the block where it is."""
        entry.leases += 1
        self._restless += 1
        if entry.name in self._warm:
            self._warm.move_to_end(entry.name)

    def release(self, entry: Entry) -> None:
        """Ends a lease."""
        entry.leases -= 1
        self._restless -= 1
        if entry.state is not State.GONE:
            self.offer(entry)
        elif not entry.leases and entry.on_disk and not entry.dirty:
            self._doom(entry)

    def offer(self, entry: Entry) -> None:
        """The block may go, as far as the event just past is concerned."""
        if self._may_go(entry):
            self._account(entry).order.add(entry)

    def leave(self, entry: Entry, was: State) -> None:
        """The index has forgotten a block; gives back what it took."""
        if entry.in_memory or was is State.RESERVED:
            self.memory -= entry.size
        if entry.in_memory:
            self._drop(entry)
        if was is State.RESERVED:
            self._restless -= 1
        if entry.dirty:  # `written` does the rest
            return
        if not entry.on_disk:
            self._charge(entry, -1)
        elif not entry.leases:
            self._doom(entry)

    # ---- between memory and disk ----

    def take_dirty(self, most_bytes: int) -> list[Entry]:
        """Blocks to write now, in the order they came: at most `most_bytes`, but one at least if there is any."""
        batch: list[Entry] = []
        size = 0
        while self._dirty and (not batch or size + self._dirty[0].size <= most_bytes):
            batch.append(self._dirty.popleft())
            size += batch[-1].size
        self._unwritten -= size
        return batch

    def written(self, batch: Sequence[Entry], on_disk: bool) -> None:
        """Ends the writing of blocks from `take_dirty`. One that is not on disk stays in memory until its room is needed."""
        for entry in batch:
            entry.on_disk, entry.dirty = on_disk, False
            self.on_disk += on_disk
            self._restless -= 1
            if entry.state is not State.GONE:
                self._warm[entry.name] = entry
                self.offer(entry)
            elif not on_disk:
                self._charge(entry, -1)
            elif not entry.leases:
                self._doom(entry)

    def take_doomed(self) -> list[Entry]:
        """Blocks to delete from disk, before anything from a later `take_dirty` is written."""
        doomed, self._doomed = self._doomed, []
        return doomed

    def deleted(self, doomed: Sequence[Entry]) -> None:
        """The disk has room again where these blocks were."""
        self.on_disk -= len(doomed)
        for entry in doomed:
            entry.on_disk = False
            self._index_out -= entry.indexed
            for account in (self._all, self._account(entry)):
                account.out -= self._footprint(entry)
            self._charge(entry, -1)

    def shrink(self, nbytes: int) -> None:
        """Evicts until `nbytes` more are on their way out, or all that may go."""
        goal = self._all.out + nbytes
        while self._all.out < goal and self._evict(self._all):
            pass

    def shorten(self, more: int = 0) -> bool:
        """Evicts until the index has room for `more` bytes; False: it has none, or not yet."""
        limit = self.limits.index
        if self.index + more > limit * HIGH:
            while self.index - self._index_out > limit * LOW - more and self._evict(self._all):
                pass
        return self.index + more <= limit

    def warm(self, entry: Entry) -> bool:
        """Whether a block that was read from disk is to stay in memory."""
        if entry.state is not State.SEALED or entry.in_memory or not self._free_memory(entry.size):
            return False
        self.memory += entry.size
        entry.in_memory = True
        self._warm[entry.name] = entry
        return True

    # ---- who gives way ----

    def _may_go(self, entry: Entry) -> bool:
        return entry.state is State.SEALED and not entry.leases and not entry.dirty and self._leaf(entry)

    def _shrink(self, account: _Account, size: int) -> bool:
        """Whether `size` bytes fit, after evicting to the low watermark if they would pass the high one."""
        if account.used + size > account.budget * HIGH:
            goal = account.budget * LOW - size
            while account.used - account.out > goal and self._evict(account):
                pass
        return account.used + size <= account.budget

    def _evict(self, account: _Account) -> bool:
        accounts = self._tenants.values() if account is self._all else (account,)
        firsts = [entry for one in accounts if (entry := one.order.first(self._may_go)) is not None]
        victim = min(firsts, key=lambda entry: (entry.rank, entry.used), default=None)
        if victim is None:
            return False
        self._clock = max(self._clock, victim.rank)
        self.evicted += 1
        self._remove(victim)
        return True

    def _free_memory(self, size: int) -> bool:
        """With a disk: whether `size` bytes fit in memory, after dropping what is on disk as well."""
        budget = self.limits.memory
        if self.memory + size > budget * HIGH:
            for entry in [entry for entry in self._warm.values() if not entry.leases]:
                if self.memory + size <= budget * LOW:
                    break
                self._cool(entry)
        return self.memory + size <= budget

    def _cool(self, entry: Entry) -> None:
        if not entry.on_disk:  # it could not be written
            self.evicted += 1
            self._remove(entry)
            return
        self.memory -= entry.size
        self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        entry.in_memory = False
        self._warm.pop(entry.name, None)
        self.dropped.append(entry.name)

    def _doom(self, entry: Entry) -> None:
        self._doomed.append(entry)
        self._index_out += entry.indexed
        for account in (self._all, self._account(entry)):
            account.out += self._footprint(entry)

    def _charge(self, entry: Entry, sign: int) -> None:
        size = sign * self._footprint(entry)
        self.index += sign * entry.indexed
        self._all.used += size
        self._account(entry).used += size

    def _account(self, entry: Entry) -> _Account:
        account = self._tenants.get(entry.tag)
        if account is None:
            account = self._tenants[entry.tag] = _Account(min(self.limits.tenant, self.limits.home))
        return account

    def _footprint(self, entry: Entry) -> int:
        return -(-entry.size // DISK_PAGE) * DISK_PAGE if self.limits.disk else entry.size
