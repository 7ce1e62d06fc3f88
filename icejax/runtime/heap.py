"""The heap of the C library, which holds memory that the process has freed. A chat and an engine give it back."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Returns freed memory to the system; does nothing where the C library is not glibc.

    Compiling frees hundreds of MB in small pieces, which glibc keeps in the heaps of all threads that compiled. Freed arrays of
    some MB it keeps too, and seldom uses again, since XLA asks for aligned memory.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
