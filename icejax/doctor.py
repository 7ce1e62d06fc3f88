"""``python -m icejax.doctor``: what this machine has, as `icejax.examine` finds it."""

from icejax.launch import launch

if __name__ == "__main__":
    launch("icejax.examine", name="icejax.doctor")
