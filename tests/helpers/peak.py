"""Measures the peak memory of an expression in a process of its own."""

import subprocess
import sys

CODE = """
import sys, threading, time, jax, psutil, icejax.checkpoint, icejax.checkpoint.convert
jax.devices(); jax.numpy.zeros(3).block_until_ready()
rss = psutil.Process().memory_info
before = peak = rss().rss

def watch():
    global peak
    while True:
        peak = max(peak, rss().rss)
        time.sleep(0.001)

threading.Thread(target=watch, daemon=True).start()
made = eval(sys.argv[1])
jax.block_until_ready(jax.tree.leaves(made))
print(peak - before)
"""


def resident_peak(expression: str) -> int:
    """Returns the growth of peak resident memory, in bytes, while a fresh process evaluates `expression` on `icejax`."""
    command = [sys.executable, "-c", CODE, expression]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
