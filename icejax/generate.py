"""``python -m icejax.generate``: the command line of `icejax.command`."""

import sys

from icejax.command import main

if __name__ == "__main__":
    sys.exit(main())
