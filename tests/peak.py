"""How much memory loading takes, in a process of its own."""

import subprocess
import sys
from pathlib import Path

CODE = """
import sys, threading, time, jax, psutil, icejax.checkpoint
jax.devices(); jax.numpy.zeros(3).block_until_ready()
rss = psutil.Process().memory_info
before = peak = rss().rss

def watch():
    global peak
    while True:
        peak = max(peak, rss().rss)
        time.sleep(0.001)

threading.Thread(target=watch, daemon=True).start()
model = icejax.checkpoint.load_model(sys.argv[1], dtype=sys.argv[2])
jax.block_until_ready(jax.tree.leaves(model))
print(peak - before)
"""


def loading_peak(folder: Path, dtype: str) -> int:
    """Returns the bytes that a process has at most, while it loads the model in `folder`, beyond what it had before."""
    command = [sys.executable, "-c", CODE, str(folder), dtype]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
