"""``python -m convert.hf_to_orbax SRC DST``: converts a Hugging Face folder to an icejax (Orbax) folder."""

from icejax.commands.terminal.process import launch

if __name__ == "__main__":
    launch("icejax.commands.convert", name="convert.hf_to_orbax", to="orbax")
