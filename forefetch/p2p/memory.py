"""Memory of one GPU that another process of the node maps: CUDA's virtual memory management, handles passed as file
descriptors.

What PyTorch's symmetric memory is made of, without its rendezvous: that waits for the other side without a bound, one group
at a time per process, and a lane must survive the death of either side at any moment. Physical memory lives until both have
let go of it, so that writing to a peer that was killed is harmless. NVLink multicast is never used.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from typing import Any

import torch
from torch import Tensor

from forefetch.errors import Mismatch, Unavailable


class Mapped:
    """Device memory in this process's address space: made here, or imported from a file descriptor. `close` when no kernel
    uses it."""

    def __init__(self, size: int, device: torch.device, fd: int | None = None) -> None:
        """Raises Mismatch when the device cannot have or reach such memory. fd: imported and closed; None: allocated,
        zeroed."""
        from cuda.bindings import driver

        self._driver, self.device = driver, device
        self.handle: Any = None
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # from here on this thread has the device's context
            prop = self._properties()
            grain = int(self._do(driver.cuMemGetAllocationGranularity(prop, _granularity(driver))))
            self.size = -(-size // grain) * grain
            kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            if fd is None:
                self.handle = self._do(driver.cuMemCreate(self.size, prop, 0))
            else:
                self.handle = self._do(driver.cuMemImportFromShareableHandle(fd, kind))
                os.close(fd)
            self._address = self._do(driver.cuMemAddressReserve(self.size, 0, 0, 0))
            self._do(driver.cuMemMap(self._address, self.size, 0, self.handle, 0))
            access = driver.CUmemAccessDesc()
            access.location = prop.location
            access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            self._do(driver.cuMemSetAccess(self._address, self.size, [access], 1))
        if fd is None:
            self.tensor(torch.uint8, 0, (self.size,)).zero_()
            torch.cuda.synchronize(device)

    @property
    def address(self) -> int:
        """Of the first byte."""
        return int(self._address)

    def export(self) -> int:
        """A file descriptor that another process can import; the caller closes it."""
        driver = self._driver
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return int(self._do(driver.cuMemExportToShareableHandle(self.handle, kind, 0)))

    def tensor(self, dtype: torch.dtype, offset: int, shape: tuple[int, ...]) -> Tensor:
        """A view, said to lie on this process's device even where the memory is a peer's: kernels launched here use it."""
        storage = torch._C._construct_storage_from_data_pointer(self.address, self.device, self.size)
        whole = torch.empty(0, dtype=dtype, device=self.device)
        strides = torch.empty(shape, device="meta").stride()
        return whole.set_(storage, offset // dtype.itemsize, shape, strides)

    def close(self) -> None:
        """Unmaps it and lets go of it."""
        if self.handle is not None:
            driver, self._driver_handle = self._driver, self.handle
            self.handle = None
            driver.cuMemUnmap(self._address, self.size)
            driver.cuMemAddressFree(self._address, self.size)
            driver.cuMemRelease(self._driver_handle)

    def _properties(self) -> Any:
        driver = self._driver
        prop = driver.CUmemAllocationProp()
        prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = self.device.index or 0
        prop.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return prop

    def _do(self, answer: tuple[Any, ...]) -> Any:
        status, *values = answer
        if int(status) != 0:
            raise Mismatch(f"device memory cannot be shared: {getattr(status, 'name', status)}")
        return values[0] if values else None


def _granularity(driver: Any) -> Any:
    return driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED


def available() -> bool:
    """Whether the driver's bindings are installed (extra `gpus`)."""
    try:
        from cuda.bindings import driver  # noqa: F401
    except ImportError:
        return False
    return True


class Meeting:
    """Where two processes of a node exchange one file descriptor each: a socket in the abstract namespace, named at random."""

    def __init__(self, timeout_s: float) -> None:
        self.name = f"forefetch-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.settimeout(timeout_s)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(1)

    def host(self, fd: int) -> int:
        """Waits for the guest, gives fd, takes the guest's. Unavailable when nobody comes in time."""
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            os.close(fd)
            raise Unavailable(f"the worker did not come to exchange memory: {error}") from None
        connection.settimeout(self._listener.gettimeout())
        return _exchange(connection, fd)

    def close(self) -> None:
        """Ends a wait in `host`, too."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def visit(name: str, fd: int, timeout_s: float) -> int:
    """The guest's part. Mismatch when the meeting is not on this node, Unavailable when the host is silent."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        connection.connect(f"\0{name}")
    except OSError as error:
        connection.close()
        os.close(fd)
        raise Mismatch(f"the router cannot be reached on this node: {error.strerror}") from None
    return _exchange(connection, fd)


def _exchange(connection: socket.socket, fd: int) -> int:
    with connection:
        try:
            socket.send_fds(connection, [b"m"], [fd])
            _, fds, _, _ = socket.recv_fds(connection, 1, 1)
        except OSError as error:
            raise Unavailable(f"the exchange of memory broke off: {error}") from None
        finally:
            os.close(fd)
    if len(fds) != 1:
        raise Unavailable("the exchange of memory broke off")
    return fds[0]
