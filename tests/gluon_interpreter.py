"""Runs the Hopper kernel's Gluon functions on a CPU: values and memory, not the layouts, which the compiler checks.

Asynchronous copies happen when they are issued (`eager`) or only when they are waited for. A kernel whose answers differ
between the two reads what has not arrived or overwrites what is still needed.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ptx
import torch
import triton
from torch import Tensor

_NUMPY = {torch.int8: np.int8, torch.int32: np.int32, torch.float16: np.float16, torch.float32: np.float32}
_NUMPY[torch.bfloat16] = np.int16  # its bits: NumPy has no such type


class Value:
    """A tensor of a kernel, a scalar included; types mix as Triton mixes them."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.type = types.SimpleNamespace(layout=None)

    dtype = property(lambda self: self.data.dtype)
    shape = property(lambda self: list(self.data.shape))

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Value:
        return Value(self.data.contiguous().view(dtype) if bitcast else self.data.to(dtype))

    def __getitem__(self, index: Any) -> Value:
        return Value(self.data[index])

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)

    def __neg__(self) -> Value:
        return Value(-self.data)


class Pointer(Value):
    """Addresses: the number of a memory, times 2^40, plus the element."""

    def __init__(self, memories: list[Tensor], data: Tensor) -> None:
        super().__init__(data)
        self.memories = memories

    @property
    def dtype(self) -> Any:  # type: ignore[override]
        """Of the pointer, as kernels ask for it."""
        return types.SimpleNamespace(element_ty=self.memories[int(self.data.flatten()[0]) >> 40].dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memories, self.data + _tensor(other).long())

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.memories, self.data[index])

    def read(self, wanted: Tensor, other: Any) -> Tensor:
        """What they point to where it is wanted."""
        numbers, places = self.data >> 40, self.data & (2**40 - 1)
        kind = self.memories[int(numbers.flatten()[0])].dtype
        out = torch.full(self.data.shape, other, dtype=kind)
        for number in numbers.unique().tolist():
            mine = wanted & (numbers == number)
            out[mine] = self.memories[number][places[mine]]
        return out


def _tensor(x: Any) -> Tensor:
    return x.data if isinstance(x, Value) else torch.tensor(x)


def _both(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """Promoted: a plain number takes the other's type unless it is a fraction and that is an integer."""
    if isinstance(a, Value) and isinstance(b, Value):
        dtype = torch.promote_types(a.dtype, b.dtype)
        return a.data.to(dtype), b.data.to(dtype)
    tensor, number = (a, b) if isinstance(a, Value) else (b, a)
    whole = not tensor.dtype.is_floating_point and isinstance(number, float)
    tensor, number = tensor.data.to(torch.float32) if whole else tensor.data, torch.tensor(number)
    number = number.to(torch.float32 if whole else torch.int32 if tensor.dtype == torch.bool else tensor.dtype)
    return (tensor, number) if isinstance(a, Value) else (number, tensor)


def _operator(name: str, apply: Callable[[Tensor, Tensor], Tensor]) -> None:
    setattr(Value, f"__{name}__", lambda a, b: b + a if isinstance(b, Pointer) else Value(apply(*_both(a, b))))
    setattr(Value, f"__r{name}__", lambda a, b: Value(apply(*_both(b, a))))


for _name, _apply in {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "truediv": torch.div, "mod": torch.remainder,
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="floor"), "lshift": torch.bitwise_left_shift,
    "rshift": torch.bitwise_right_shift, "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
    "lt": torch.lt, "le": torch.le,
    "gt": torch.gt, "ge": torch.ge, "eq": torch.eq, "ne": torch.ne,
}.items():  # fmt: skip
    _operator(_name, _apply)
_add_values = Value.__add__
Pointer.__radd__ = Pointer.__add__  # type: ignore[method-assign,assignment]


class Shared:
    """A view of shared memory."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.shape = list(data.shape)

    def load(self, layout: Any) -> Value:
        return Value(self.data.clone())

    def store(self, value: Value) -> None:
        self.data.copy_(value.data)

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, start, length))

    def index(self, at: Any) -> Shared:
        return Shared(self.data[int(at)])

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.data.permute(*order))

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
        return Shared(self.data.view(dtype).view(*shape))


class Interpreter:
    """`run` calls a kernel for every program of a grid. `impatient`: every wait lets one more group of copies be late."""

    def __init__(self, eager: bool, impatient: bool = False) -> None:
        self.eager, self.impatient = eager, impatient
        self.place: tuple[int, ...] = ()
        self.grid: tuple[int, ...] = ()
        self.pending: list[list[Callable[[], None]]] = []
        self.issued: list[Callable[[], None]] = []
        self.modules: dict[str, dict[str, Any]] = {}
        self.special = {
            "gl": self.language(),
            "mma_v2": mma,
            "async_copy": self.copies(),
            "fence_async_shared": lambda: None,
            "warpgroup_mma": lambda a, b, acc, is_async: mma(a, Value(b.data), acc),
            "warpgroup_mma_wait": lambda count, deps: deps[0] if len(deps) == 1 else tuple(deps),
            **BY_NAME,
        }

    def run(self, kernel: Any, grid: tuple[int, ...], *arguments: Any) -> None:
        memories = [x.view(-1) for x in arguments if isinstance(x, Tensor)]
        numbers = iter(range(len(memories)))
        given = [
            Pointer(memories, torch.tensor(next(numbers) << 40)) if isinstance(x, Tensor)
            else Value(torch.tensor(x, dtype=torch.int32)) if type(x) is int and not name.isupper() else x
            for name, x in zip(kernel.arg_names, arguments, strict=True)
        ]  # fmt: skip
        function = self.function(kernel)
        for place in itertools.product(*map(range, grid)):
            self.place, self.grid, self.pending, self.issued = place, grid, [], []
            function(*given)

    def function(self, jitted: Any) -> Any:
        """A jitted function as plain Python, whose names mean what they mean here."""
        module = jitted.fn.__module__
        if module not in self.modules:
            self.modules[module] = names = {}
            for name, value in jitted.fn.__globals__.items():
                names[name] = self.meaning(name, value)
        return types.FunctionType(jitted.fn.__code__, self.modules[module])

    def meaning(self, name: str, value: Any) -> Any:
        if name in self.special:
            return self.special[name]
        if isinstance(value, triton.JITFunction):
            return lambda *a: self.function(value)(*a)  # noqa: PLW0108 - only when it is called: modules know each other
        if isinstance(value, triton.language.constexpr):
            return value.value
        if type(value).__name__ == "ConstexprFunction":
            inside = value.fn
            return inside if inside.__module__.endswith("copies") else lambda *a: None
        return value

    def copies(self) -> Any:
        def start(target: Shared, source: Pointer, mask: Any = True) -> None:
            wanted = torch.broadcast_to(_tensor(mask), source.data.shape)

            def copy() -> None:
                target.data.copy_(source.read(wanted, 0))

            copy() if self.eager else self.issued.append(copy)

        def commit() -> None:
            self.pending.append(self.issued)
            self.issued = []

        def wait(count: int) -> None:
            while len(self.pending) > count + self.impatient:
                for copy in self.pending.pop(0):
                    copy()

        return types.SimpleNamespace(async_copy_global_to_shared=start, commit_group=commit, wait_group=wait)

    def language(self) -> Any:
        return types.SimpleNamespace(
            **FUNCTIONS,
            program_id=lambda axis: Value(torch.tensor(self.place[axis], dtype=torch.int32)),
            num_programs=lambda axis: Value(torch.tensor(self.grid[axis], dtype=torch.int32)),
        )


def mma(a: Value, b: Value, acc: Value) -> Value:
    """Integers exactly, float16 with float32 sums."""
    exact = a.data.double() @ b.data.double()
    return Value(exact.to(acc.dtype) + acc.data)


def _turn_bytes(x: Value) -> Value:
    blocks = x.data.shape[0]
    return Value(x.data.reshape(blocks, 4, 2, 4, 2, 2).permute(0, 3, 4, 1, 5, 2).reshape(blocks, 8, 4, 2, 2))


# What `columns.py` does with instructions that move between lanes; programs here run one after the other.
BY_NAME: dict[str, Any] = {
    "await_others": lambda: None,
    "let_others_start": lambda: None,
    "turn_halves": lambda x: Value(x.data.transpose(-1, -2)),
    "turn_bytes": _turn_bytes,
    "every_second": lambda x: Value(x.data[::2].expand(8, 4)),
}


def _load(at: Pointer, mask: Any = True, other: Any = 0) -> Value:
    return Value(at.read(torch.broadcast_to(_tensor(mask), at.data.shape), other))


def _store(at: Pointer, value: Value, mask: Any = True) -> None:
    wanted = torch.broadcast_to(_tensor(mask), at.data.shape)
    memory = at.memories[int(at.data.flatten()[0]) >> 40]
    memory[at.data[wanted] & (2**40 - 1)] = torch.broadcast_to(value.data, at.data.shape)[wanted].to(memory.dtype)


def _inline(text: str, pins: str, args: Sequence[Value], dtype: Any, is_pure: bool, pack: int) -> Any:
    """Elements of a pack are neighbours in the last dimension."""
    kinds, shape = dtype if isinstance(dtype, tuple) else (dtype,), args[0].data.shape
    sizes = [max(1, pack * kind.itemsize // 4) for kind in kinds]
    inputs, number = {}, sum(sizes)
    for arg in args:
        registers = np.ascontiguousarray(arg.data.numpy().reshape(-1, pack)).view(np.uint32)
        for column in range(registers.shape[1]):
            inputs[number] = registers[:, column]
            number += 1
    out = ptx.run(text, inputs, sum(sizes))
    results, at = [], 0
    for kind, size in zip(kinds, sizes, strict=True):
        some = ptx.elements(out[at : at + size], _NUMPY[kind])
        results.append(Value(torch.from_numpy(np.ascontiguousarray(some)).view(kind).reshape(shape)))
        at += size
    return tuple(results) if isinstance(dtype, tuple) else results[0]


def _where(mask: Value, a: Any, b: Any) -> Value:
    if isinstance(a, Pointer):
        return Pointer(a.memories, torch.where(mask.data, a.data, b.data))
    if isinstance(a, Value) or isinstance(b, Value):
        return Value(torch.where(mask.data, *_both(a, b)))
    kind = torch.float32 if isinstance(a, float) or isinstance(b, float) else torch.int32
    return Value(torch.where(mask.data, torch.tensor(a, dtype=kind), torch.tensor(b, dtype=kind)))


def _shared(dtype: torch.dtype, shape: Sequence[int], layout: Any, value: Value | None = None) -> Shared:
    """Poisoned: bytes of 255 are NaN in every float type."""
    data = torch.full(
        tuple(shape), -1, dtype=torch.int8 if dtype == torch.int8 else torch.int16 if dtype.itemsize == 2 else torch.int32
    )
    data = data.view(dtype)
    if value is not None:
        data.copy_(value.data)
    return Shared(data)


def _reduced(apply: Callable[[Tensor, int], Tensor]) -> Callable[[Value, int], Value]:
    return lambda x, axis: Value(apply(x.data.float() if x.dtype == torch.float16 else x.data, axis))


FUNCTIONS: dict[str, Any] = {
    "bfloat16": torch.bfloat16,
    "int8": torch.int8, "int32": torch.int32, "int64": torch.int64, "float16": torch.float16, "float32": torch.float32,
    "constexpr": None, "static_range": range, "SliceLayout": lambda *a: None,
    "arange": lambda low, high, layout=None: Value(torch.arange(low, high, dtype=torch.int32)),
    "full": lambda shape, value, dtype, layout=None: Value(
        torch.broadcast_to(_tensor(value).to(dtype), tuple(shape)).clone()
    ),
    "zeros": lambda shape, dtype, layout=None: Value(torch.zeros(tuple(shape), dtype=dtype)),
    "load": _load, "store": _store, "where": _where, "inline_asm_elementwise": _inline, "allocate_shared_memory": _shared,
    "convert_layout": lambda x, layout, assert_trivial=False: x,
    "expand_dims": lambda x, axis: Value(x.data.unsqueeze(axis)),
    "broadcast": lambda a, b: tuple(Value(t.clone()) for t in torch.broadcast_tensors(a.data, b.data)),
    "reshape": lambda x, shape: Value(x.data.reshape(tuple(shape))),
    "permute": lambda x, order: Value(x.data.permute(*order)),
    "join": lambda a, b: Value(torch.stack((a.data, b.data), -1)),
    "split": lambda x: tuple(Value(part) for part in x.data.unbind(-1)),
    "max": _reduced(lambda x, axis: x.amax(axis)), "sum": _reduced(lambda x, axis: x.sum(axis)),
    "associative_scan": lambda x, axis, sum_of: Value(x.data.cumsum(axis, dtype=x.dtype)),
    "abs": lambda x: Value(x.data.abs()), "exp2": lambda x: Value(torch.exp2(x.data)),
    "maximum": lambda a, b: Value(torch.maximum(*_both(a, b))), "minimum": lambda a, b: Value(torch.minimum(*_both(a, b))),
}  # fmt: skip
