"""``python -m icejax.generate``: the command line of `icejax.command`."""

from icejax.launch import launch

if __name__ == "__main__":
    launch("icejax.command", name="icejax.generate")
