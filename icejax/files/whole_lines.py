"""A file of lines that grows: each line is on the disk, whole, before the next is begun.

`icejax.evaluation.answers` and `icejax.commands.many` call it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import BinaryIO


class WholeLines:
    """The lines of a file, to which others are added.

    Attributes:
        size: bytes of the lines that the file had at first.
    """

    def __init__(self, file: BinaryIO, take: Callable[[bytes], None]) -> None:
        """Reads the file, and removes a last line without an end: a writer that was killed has left it.

        Args:
            file: open at its beginning, to be written and, unless it is new, read.
            take: called with every line, the torn one included; it raises InputError for a line that is none of the caller's,
                before anything is removed.

        Raises:
            OSError: the file cannot be read or written.
        """
        self._file, self.size = file, 0
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
        """Closes the file."""
        self._file.close()
