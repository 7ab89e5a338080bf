"""What a process that its files ended leaves behind, and what the next one does about it.

LMDB ends a process where a page is not what it should be: by an assertion, or by a read beyond the file. No exception says so,
and the next start would end the same way. So the kernel's fatal signals write into `crash.log` (faulthandler). A start that
finds something there has a process of its own go through the files first; one that ends this process, too, is set aside.
"""

from __future__ import annotations

import faulthandler
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from forefetch.errors import ConfigError
from kv_service import walk
from kv_service.disk import set_aside

_log = logging.getLogger(__name__)
FILE = "crash.log"
FOLDERS = ("blocks", "sessions")


def look_back(folder: Path) -> int:
    """How many files were set aside because a process before this one died and they end a process. For the holder of the
    folder's lock."""
    file = folder / FILE
    if not file.is_file() or not file.stat().st_size:
        return 0
    _log.error("the last process was ended by a fatal signal: %s", file.read_text(errors="replace"))
    damaged = [folder / name for name in FOLDERS if (folder / name / "data.mdb").exists() and not _ends_well(folder / name)]
    for one in damaged:
        set_aside(one)
    file.write_bytes(b"")
    return len(damaged)


def _ends_well(folder: Path) -> bool:
    done = subprocess.run([sys.executable, "-P", walk.__file__, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        _log.error("going through %s ended with %d: %s", folder.name, done.returncode, done.stdout + done.stderr)
    return done.returncode == 0


def look_ahead(folder: Path) -> Callable[[], None]:
    """From now on fatal signals leave their mark in `folder`, until what is returned is called. For a process of its own."""
    try:
        file = (folder / FILE).open("a")
    except OSError as error:
        raise ConfigError(f"--dir: {error.strerror}") from None
    faulthandler.enable(file, all_threads=False)

    def end() -> None:
        faulthandler.disable()
        file.close()

    return end
