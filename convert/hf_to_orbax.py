"""``python -m convert.hf_to_orbax SRC DST``: a Hugging Face folder into an icejax (Orbax) folder."""

from __future__ import annotations

import sys

from convert import command
from icejax.checkpoint.convert import hf_to_orbax


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    return command.main("hf_to_orbax", hf_to_orbax, "Hugging Face folder or hub id SRC -> icejax (Orbax) folder DST.", argv)


if __name__ == "__main__":
    sys.exit(main())
