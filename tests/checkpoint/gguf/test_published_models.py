"""Published GGUF files: 64 greedy tokens behind 4,000 of real text are transformers', with the full and the clustered cache.

On several devices they have the logits and the text of one.
"""

from pathlib import Path

import pytest

from bench import published
from icejax.checks.errors import InputError
from tests import tolerances
from tests.helpers import published_on_devices
from tests.helpers.greedy_text import NEW_TOKENS, PROMPT_TOKENS, text_after

HOME = Path("~/.cache/icejax/published").expanduser()  # the user's cache, so that a file is fetched once
SHORT = ("smollm2-135m",)  # two minutes: among the slow tests too


@pytest.mark.published
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SHORT)) for name in published.MODELS])
def test_greedy_text_is_transformers(name, monkeypatch):
    """Of the file itself and of the folder that transformers' own reader makes of it, on the same token ids."""
    monkeypatch.setattr(published, "home", lambda: HOME)
    try:
        file, folder = published.gguf(name), published.folder(name)
    except InputError as error:
        pytest.skip(str(error))
    ours = text_after("icejax", file, [])
    assert len(ours["tokens"]) == PROMPT_TOKENS
    expected = text_after("transformers", folder, ours["tokens"])["full"]
    assert len(expected) == NEW_TOKENS
    assert (ours["full"], ours["clustered"]) == (expected, expected)
    again = text_after("icejax", folder, ours["tokens"])
    assert (again["full"], again["clustered"]) == (expected, expected)


@pytest.mark.published
@pytest.mark.parametrize(
    ("name", "devices"), [pytest.param("smollm2-135m", 3, marks=pytest.mark.slow), ("qwen2.5-coder-0.5b", 2)]
)
def test_several_devices_decode_a_file_as_one(name, devices, monkeypatch):
    """As many devices as the models have KV heads; their weights stay codes.

    With a small budget the text alone is compared: sums in another order can move a token to another page, which moved logits of
    Qwen2.5-Coder by 0.022.
    """
    monkeypatch.setattr(published, "home", lambda: HOME)
    try:
        file = published.gguf(name)
    except InputError as error:
        pytest.skip(str(error))
    *exact, small = published_on_devices.compared(file, devices, "full", "clustered-1024", "clustered-64")
    assert all(result["error"] < tolerances.LOGITS for result in exact), exact
    assert all(result["same_tokens"] for result in (*exact, small)), small
