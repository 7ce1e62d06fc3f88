"""A served model: the bundled one, with a chat template, whose cache holds all tokens.

Without the packages of the extra `serve` the tests of this folder are not collected.
"""

import copy
import importlib.util

import pytest

import icejax
from icejax.commands.serve import NEEDED

collect_ignore_glob = [] if all(map(importlib.util.find_spec, NEEDED)) else ["test_*.py"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning %}({{ m.reasoning }}){% endif %}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SIZES = dict(batch_size=3, context_length=300, max_new_tokens=200)


@pytest.fixture(scope="session")
def chatty(bundled):
    """The bundled model, and its tokenizer with a chat template."""
    model, tokenizer = bundled[0], copy.deepcopy(bundled[1])
    tokenizer.chat_template = TEMPLATE
    return model, tokenizer


@pytest.fixture(scope="session")
def narrow(chatty, tmp_path_factory):
    """A random model of one narrow layer, of which an answer is little work, and the same tokenizer."""
    from icejax.checkpoint.load import load_model
    from tests.helpers.on_devices import LLAMA, checkpoint

    raw = LLAMA | dict(vocab_size=257, num_hidden_layers=1, eos_token_id=256)
    return load_model(checkpoint(raw, tmp_path_factory.mktemp("narrow"))), chatty[1]


@pytest.fixture(scope="module")
def server(chatty):
    """A server of the bundled model."""
    from icejax.serving.service import Service
    from tests.helpers.server import live

    service = Service(names=("bundled", "other-name"), root="here", places=SIZES["batch_size"], max_queue=6)

    def start():
        return *chatty, icejax.Engine(*chatty, cache=icejax.Full(), **SIZES)

    with live(service, start) as server:
        yield server


@pytest.fixture(scope="session")
def alone(chatty):
    """Returns what `icejax.generate` answers, with the cache of the server."""

    def answer(prompt, **options) -> icejax.GenerationResponse:
        return icejax.generate(*chatty, prompt, cache=icejax.Full(), context_length=300, **options)[0]

    return answer
