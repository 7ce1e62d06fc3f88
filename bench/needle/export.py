"""Writes a trained run as a Hugging Face folder; the bundled model also gets the example prompt.

``python -m bench.needle.export --run DIR --to icejax/assets``
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from bench.needle import stages, task
from bench.needle.members import MEMBERS
from bench.needle.train import untrained

EXAMPLE_LENGTH, EXAMPLE_FACTS, EXAMPLE_SEED = 16_372, 4, 1


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer whose ids 0 to 255 are the bytes of UTF-8, and id 256 the end of a text."""
    # Byte-level BPE (GPT-2) writes bytes as characters: printable bytes as themselves, the others from chr(256) on.
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_in = {b: chr(b) for b in printing}
    stand_in |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in stand_in)}
    tokenizer = Tokenizer(models.BPE(vocab={stand_in[b]: b for b in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<eos>",
        clean_up_tokenization_spaces=False,
        model_max_length=stages.MAX_POSITION,
    )
    assert wrapped.eos_token_id == task.EOS
    return wrapped


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, help="folder of bench.needle.train")
    parser.add_argument("--to", type=Path, required=True, help="folder to write")
    arguments = parser.parse_args(argv)
    state = torch.load(arguments.run / "state.pt")
    name, _ = state["run"]
    model = untrained(MEMBERS[name])
    model.load_state_dict(state["model"])
    model.generation_config = GenerationConfig(eos_token_id=task.EOS, pad_token_id=task.EOS)
    model.to(torch.bfloat16).save_pretrained(arguments.to)
    (arguments.to / "model.safetensors").chmod(0o644)
    byte_tokenizer().save_pretrained(arguments.to)
    if name != "bundled":
        return
    rng = np.random.default_rng(EXAMPLE_SEED)
    drawn = task.draw(rng, task.Facts(keys=EXAMPLE_FACTS), "heldout")
    text = task.hide(rng, drawn, length=EXAMPLE_LENGTH, split="heldout", kinds=("code",)).decode()
    (arguments.to / "prompt.txt").write_text(text + drawn.questions[0].text)
    print("the answer to the example is", drawn.questions[0].answer)


if __name__ == "__main__":
    main()
