"""Memory of one process that another reads in place."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from forefetch.errors import Mismatch
from forefetch.lending import Lent, Name, borrow
from forefetch.settings import child_environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="lent memory needs Linux")


def test_another_process_reads_it_and_cannot_write() -> None:
    lent = Lent(10_000)
    lent.memory[9_990:] = b"0123456789"
    show = "print(len(m), bytes(m[9_990:]), any(m[:9_990]), m.readonly)"
    code = f"from forefetch.lending import Name, borrow\nm = borrow({lent.name!r})\n{show}"
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, capture_output=True, text=True, check=True, env=child_environment()).stdout
    assert told.split() == ["10000", "b'0123456789'", "False", "True"]


def test_it_stays_while_somebody_refers_to_it_and_is_found_while_its_maker_does() -> None:
    lent = Lent(100)
    name, mine, other = lent.name, lent.memory, borrow(lent.name)
    mine[5] = 7
    assert other[5] == 7
    del lent
    mine[5] = 8
    assert other[5] == 8
    with pytest.raises(Mismatch, match="cannot be reached"):
        borrow(name)


def test_what_is_no_lent_memory_is_refused() -> None:
    lent, (pipe, end) = Lent(100), os.pipe()
    plain = os.memfd_create("plain")  # whoever made it could cut it short
    os.write(plain, bytes(8192))
    for name in (
        lent.name._replace(nonce=bytes(16)),
        Name(os.getpid(), pipe, bytes(16)),
        Name(os.getpid(), plain, bytes(16)),
        Name(2**22 + 1, 3, bytes(16)),
    ):
        with pytest.raises(Mismatch):
            borrow(name)
    for file in (pipe, end, plain):
        os.close(file)
