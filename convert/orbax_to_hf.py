"""``python -m convert.orbax_to_hf SRC DST``: an icejax (Orbax) folder into a Hugging Face folder."""

from __future__ import annotations

import sys

from convert import command
from icejax.checkpoint.convert import orbax_to_hf


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    return command.main("orbax_to_hf", orbax_to_hf, "icejax (Orbax) folder SRC -> Hugging Face folder DST.", argv)


if __name__ == "__main__":
    sys.exit(main())
