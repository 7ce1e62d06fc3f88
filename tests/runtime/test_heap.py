"""Freed memory goes back to the system, as the kernel counts it."""

import ctypes
import platform

import psutil
import pytest

from icejax.runtime import heap

BLOCK, BLOCKS = 50_000, 2000  # smaller than what glibc maps and unmaps by itself; 100 MB together


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps freed memory and gives it back")
def test_freed_memory_goes_back_to_the_system():
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    resident = psutil.Process().memory_info
    blocks = [libc.malloc(BLOCK) for _ in range(BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK)
    *freed, _ = blocks  # the last one stays, so that the heap cannot shrink
    for block in freed:
        libc.free(block)
    held = resident().rss
    heap.give_back()
    assert held - resident().rss > 0.8 * BLOCK * BLOCKS
    libc.free(blocks[-1])
