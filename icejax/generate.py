"""``python -m icejax.generate``: `icejax generate`."""

from icejax.launch import launch

if __name__ == "__main__":
    launch("icejax.commands.generate", name="icejax.generate")
