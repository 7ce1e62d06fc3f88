"""``python -m icejax.generate``: the command line of `icejax.command`."""

import os
import sys

from icejax.command import BROKEN_PIPE, INTERRUPTED, main

if __name__ == "__main__":
    status = main()
    if status in (INTERRUPTED, BROKEN_PIPE):  # Python's own way out crashes while an abandoned program still runs
        os._exit(status)
    sys.exit(status)
