"""A tokenizer of words and single marks, and a model that has it, for tests of prompts."""

import re
from types import SimpleNamespace


def encode(text: str, add_special_tokens: bool = True) -> list[str]:
    """Returns the tokens of a text, none of which is special."""
    return re.findall(r"\w+|\W", text)


def model(max_length: int = 10_000) -> SimpleNamespace:
    """Returns what tasks ask of a `HarnessModel`."""
    tokenizer = SimpleNamespace(decode=lambda tokens, skip_special_tokens: "".join(tokens))
    return SimpleNamespace(tok_encode=encode, tokenizer=tokenizer, max_length=max_length)


def requests(task, **options) -> list[tuple]:
    """Returns the prompt and the options of the answer of each request that a task makes."""
    task.build_all_requests(rank=0, world_size=1, **options)
    return [request.args for request in task.instances]
