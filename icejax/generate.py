"""``python -m icejax.generate``: `icejax generate`. Imported, it is the function of that name, which it would hide else."""

import sys

if __name__ == "__main__":
    from icejax.commands.process import launch

    launch("icejax.commands.generate", name="icejax.generate")

from icejax.api.generate import generate

sys.modules[__name__] = generate  # Python binds `icejax.generate` to what stands here once the import has ended
