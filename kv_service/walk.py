"""Goes through LMDB files, given as folders, to the end: what would end a process on its way ends this one.

Run as a file of its own by `crashes.py`, on a folder that no process has open. Status 1: damaged. 0: nothing was found.
"""

from __future__ import annotations

import sys
from typing import Any

import lmdb


def walk(folder: str) -> None:
    """Looks at every key of its trees and at the end of every value."""
    env = lmdb.open(folder, readonly=True, lock=False, max_dbs=8, readahead=False)
    names = _look(env, None)
    if b"rows" in names:  # the blocks' file; the sessions' has no trees by name
        for name in names:
            _look(env, env.open_db(name, create=False))
    env.close()


def _look(env: lmdb.Environment, tree: Any) -> list[bytes]:
    keys = []
    with env.begin(db=tree, buffers=True) as txn:
        for key, value in txn.cursor():
            keys.append(bytes(key))
            bytes(value[-1:])
    return keys


if __name__ == "__main__":
    try:
        walk(sys.argv[1])
    except lmdb.Error as error:
        print(error)
        sys.exit(1)
