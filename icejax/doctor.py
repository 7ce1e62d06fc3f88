"""``python -m icejax.doctor``: the command `icejax doctor`."""

from icejax.commands.terminal.process import launch

if __name__ == "__main__":
    launch("icejax.commands.doctor", name="icejax.doctor")
