"""Places of equal size for experts that come and go: who lies where. Pure; `fill` moves the bytes."""

from __future__ import annotations

from collections.abc import Callable

Fill = Callable[[int, int], None]
"""(place, number): brings an expert there. Raises what it raises."""


class Shelf:
    """`capacity` places. An expert gets one by `put` and has it until `drop`. Not for concurrent use."""

    def __init__(self, capacity: int, fill: Fill) -> None:
        self.capacity, self._fill = capacity, fill
        self.place_of: dict[int, int] = {}
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def room(self) -> int:
        """Free places."""
        return len(self._free)

    def put(self, number: int) -> None:
        """Brings an expert in that is not here. ValueError without a free place; what `fill` raises leaves all as it was."""
        if number in self.place_of or not self._free:
            raise ValueError(f"no place for expert {number}")
        place = self._free[-1]
        self._fill(place, number)
        self._free.pop()
        self.place_of[number] = place

    def drop(self, number: int) -> None:
        """Its place may become another's at once."""
        self._free.append(self.place_of.pop(number))
