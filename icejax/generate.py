"""``python -m icejax.generate``: the command `icejax generate`.

When this module is imported, the function `icejax.generate` replaces it, which it would otherwise hide.
"""

import sys

if __name__ == "__main__":
    from icejax.commands.terminal.process import launch

    launch("icejax.commands.generate", name="icejax.generate")

from icejax.api.generate import generate

sys.modules[__name__] = generate  # when the import ends, Python binds `icejax.generate` to this entry
