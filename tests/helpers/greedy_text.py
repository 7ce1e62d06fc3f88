"""Greedy text of a published model, in a process of its own: ``python -m tests.helpers.greedy_text READER MODEL < PROMPT``.

A model of gigabytes would stay in a test's process, whose programs are compiled without optimisation. The prompt is a JSON list of
token ids; the answer is a JSON object with `NEW_TOKENS` token ids for each cache, and for icejax the token ids of `TEXT`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROMPT_TOKENS, NEW_TOKENS = 4000, 64


def text_after(reader: str, model: Path, prompt: list[int]) -> dict[str, list[int]]:
    """Returns what `READERS[reader]` prints of a model; an empty prompt is the first tokens of real text."""
    environment = dict(os.environ) | {"XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    environment.pop("OMP_NUM_THREADS", None)
    command = [sys.executable, "-m", __name__, reader, str(model)]
    process = subprocess.run(command, input=json.dumps(prompt), env=environment, capture_output=True, text=True, cwd=ROOT)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def _icejax(model: str, prompt: list[int]) -> dict[str, list[int]]:
    import icejax

    loaded, tokenizer = icejax.load(model)
    text = (ROOT / "LICENSE").read_text() + (ROOT / "icejax" / "assets" / "prompt.txt").read_text()
    tokens = tokenizer(text).input_ids[:PROMPT_TOKENS]
    answers = {}
    for name, cache in dict(full=icejax.Full(), clustered=icejax.Clustered(budget=PROMPT_TOKENS + NEW_TOKENS)).items():
        [answer] = icejax.generate(loaded, tokenizer, [prompt or tokens], cache=cache, max_new_tokens=NEW_TOKENS)
        answers[name] = answer.token_ids
    return answers | dict(tokens=tokens)


def _transformers(model: str, prompt: list[int]) -> dict[str, list[int]]:
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        answer = loaded.generate(torch.tensor([prompt]), do_sample=False, min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS)
    return dict(full=answer[0, len(prompt) :].tolist())


READERS = dict(icejax=_icejax, transformers=_transformers)

if __name__ == "__main__":
    print(json.dumps(READERS[sys.argv[1]](sys.argv[2], json.load(sys.stdin))))
