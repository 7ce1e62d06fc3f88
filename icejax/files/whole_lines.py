"""A file of lines that grows: each line is on the disk, whole, before the next is begun.

`icejax.evaluation.answers` and `icejax.commands.many` call it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from icejax.checks.errors import InputError

LOG = logging.getLogger(__name__)
UNLOCKABLE = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # of file systems without flock(2)


class WholeLines:
    """The lines of a file, to which others are added; one writer at a time may have it.

    Attributes:
        size: bytes of the lines that the file had at first.
    """

    def __init__(self, path: Path, file: BinaryIO, take: Callable[[bytes], None]) -> None:
        """Reads the file, and removes a last line without an end: a writer that was killed has left it.

        Args:
            path: where the file is, for messages.
            file: open at its beginning, to be written and, unless it is new, read.
            take: called with every line, the torn one included; it raises InputError for a line that is none of the caller's,
                before anything is removed.

        Raises:
            InputError: another process writes the file.
            OSError: it cannot be read or written.
        """
        self._file, self.size = file, 0
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            told = f"{path} is being written by another process: wait for it, or give another --output"
            raise InputError(told) from None
        except OSError as error:
            if error.errno not in UNLOCKABLE:
                raise
            LOG.warning("%s is on a file system without locks: let no other process write it", path)
        for line in file if file.readable() else ():
            take(line)
            self.size += len(line) if line.endswith(b"\n") else 0
        file.truncate(self.size)
        file.seek(self.size)

    def add(self, line: bytes) -> None:
        """Adds a line, without its end; it is on the disk afterwards."""
        self._file.write(line + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file; another process may write it."""
        self._file.close()
