"""``python -m convert.orbax_to_hf SRC DST``: converts an icejax (Orbax) folder to a Hugging Face folder."""

from icejax.commands.terminal.process import launch

if __name__ == "__main__":
    launch("icejax.commands.convert", name="convert.orbax_to_hf", to="hf")
