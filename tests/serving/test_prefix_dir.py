"""Documents that stay: a server that starts again answers behind the prefixes that the same key has stored, and no other's."""

import stat

import pytest

import icejax
from icejax.commands import serve
from icejax.serving.service import Service
from tests.helpers.server import live

KEYS = ("sk-first-key", "sk-other-key")
DOCUMENT = "def add(a, b):\n    return a + b\n" * 9  # the bundled model has a token per byte


@pytest.fixture
def answer(chatty, tmp_path):
    """Starts a server, asks questions about a document, ends it, and returns their numbers of cached tokens and their texts."""
    command = ["--prefix-dir", str(tmp_path / "prefixes"), "--slots", "1", "--context-length", "400", "--max-new-tokens", "8"]
    options = serve.engine_options(serve.parser("x").parse_args(command))

    def run(*questions: tuple[str, str]) -> list[tuple[int, str]]:
        def start():
            return *chatty, icejax.Engine(*chatty, cache=icejax.Full(), **options)

        with live(Service(names=("m",), root="m", keys=KEYS, places=1), start) as server:
            told = []
            for key, question in questions:
                body = dict(prompt=DOCUMENT + question, max_tokens=4, temperature=0)
                body = server.ask("/v1/completions", body, Authorization=f"Bearer {key}")
                told.append((body["usage"]["prompt_tokens_details"]["cached_tokens"], body["choices"][0]["text"]))
            return told

    return run


@pytest.mark.slow
def test_documents_outlive_the_server_for_their_own_key(answer, tmp_path):
    first, other = KEYS
    assert [cached for cached, _ in answer((first, "add(1"), (first, "add(2"))] == [0, 255]  # a block, and its logits again
    (mine, text), (theirs, same_text) = answer((first, "add(3"), (other, "add(3"))
    assert (mine, theirs) == (256, 0) and text == same_text
    paths = [*(tmp_path / "prefixes").rglob("*")]
    assert len([path for path in paths if path.suffix == ".arrays"]) == 1
    assert {stat.S_IMODE(path.stat().st_mode) for path in [tmp_path / "prefixes", *paths]} == {0o700, 0o600}
    for path in paths:
        told = path.name.encode() + (path.read_bytes() if path.is_file() else b"")
        assert not any(part in told for part in (b"sk-", first.encode(), b"return"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("full", 1700), ("clustered", 1440)])
def test_the_second_question_about_a_document_is_computed_alone(chatty, name, least):
    """As completions, and as chats whose one message is the document and the question; another key computes all again."""
    document, sizes = DOCUMENT * 6, dict(batch_size=2, context_length=2000, max_new_tokens=8)

    def start():
        cache = icejax.Full() if name == "full" else icejax.Clustered(budget=2048)
        return *chatty, icejax.Engine(*chatty, cache=cache, **sizes)

    with live(Service(names=("m",), root="m", keys=KEYS, places=2), start) as server:
        for path, form in (
            ("/v1/completions", lambda text: dict(prompt=text)),
            ("/v1/chat/completions", lambda text: dict(messages=[dict(role="user", content=text)])),
        ):
            told = []
            for key, question in ((KEYS[0], "add(1"), (KEYS[0], "add(2"), (KEYS[1], "add(2")):
                body = form(document + question) | dict(max_tokens=4, temperature=0)
                body = server.ask(path, body, Authorization=f"Bearer {key}")
                (choice,) = body["choices"]
                told.append(
                    (body["usage"]["prompt_tokens_details"]["cached_tokens"], choice.get("text", choice.get("message")))
                )
            cached, texts = zip(*told, strict=True)
            assert cached[0] == cached[2] == 0 and least <= cached[1] < 1800 and texts[1] == texts[2]
