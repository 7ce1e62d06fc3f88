"""``python -m convert.orbax_to_hf SRC DST``: an icejax (Orbax) folder into a Hugging Face folder."""

from icejax.launch import launch

if __name__ == "__main__":
    launch("convert.command", "orbax_to_hf", name="convert.orbax_to_hf")
