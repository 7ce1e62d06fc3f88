"""The page at `/` in a headless Chromium, against an engine whose answers the test gives, and once against a model."""

import dataclasses
import threading
import time

import numpy as np
import pytest

import icejax
from bench.needle import task
from icejax.cache.registry import Clustered
from icejax.engine.response import Attention
from icejax.serving.service import Service
from tests.helpers import browser as browsers
from tests.helpers.server import live, wait_for
from tests.serving.test_lifecycle import Engine, piece
from tests.serving.test_page import REPORT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browsers.PROGRAM is None, reason="no Chromium is installed (chromium-headless-shell, chromium)"),
]
TEXT = "document.body.innerText"
SIZES = {"wide": (1280, 800), "phone": (390, 844)}


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browsers.browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def open_page(chromium, tmp_path):
    """Opens the page of a server; afterwards the console must be empty, and the server the only host that was asked."""
    ports = []

    def open_page(server) -> browsers.Browser:
        ports.append(server.port)
        chromium.size(*SIZES["wide"])
        chromium.go(f"http://127.0.0.1:{server.port}/")
        return chromium

    chromium.requests.clear(), chromium.complaints.clear()
    yield open_page
    chromium.run("1")  # reads what the browser has still told
    assert chromium.complaints == []
    assert chromium.requests and all(address.startswith(f"http://127.0.0.1:{ports[0]}/") for address in chromium.requests)


@pytest.fixture
def engine() -> Engine:
    engine = Engine()
    engine.context_length, engine.max_new_tokens, engine.report, engine.full_kv_bytes = 300, 100, REPORT, 7000
    engine.can_explain = True
    return engine


@pytest.fixture
def server(engine, chatty):
    with live(Service(names=("m",), root="m"), lambda: (*chatty, engine)) as server:
        yield server


def ask(page, text: str) -> None:
    """Writes a message and sends it."""
    page.wait("!document.querySelector('#message').disabled")
    page.run("document.querySelector('#message').focus()")
    page.type(text)
    page.press("Enter", windowsVirtualKeyCode=13)


def drop(page, name: str, text: str) -> None:
    """Drops a text file on the page."""
    page.wait("!document.querySelector('#message').disabled")
    script = f"const data = new DataTransfer(); data.items.add(new File([{text!r}], {name!r})); "
    page.run(f"{{{script} window.dispatchEvent(new DragEvent('drop', {{dataTransfer: data, cancelable: true}})); }} 0")


def newest(engine, count: int = 1):
    wait_for(lambda: len(engine.handles) == count and engine.handles[-1].listener)
    return engine.handles[-1]


def answers(page, count: int = 1) -> list[str]:
    """Waits for the end of so many answers; returns all their texts."""
    page.wait(f"document.querySelectorAll('.message.model:not(.busy)').length == {count}")
    return page.run("[...document.querySelectorAll('.message.model .body')].map((body) => body.textContent)")


def test_text_comes_as_it_is_made_and_is_never_html(open_page, server, engine):
    page = open_page(server)
    ask(page, "Say <b>it</b>.")
    handle = newest(engine)
    handle.give(dataclasses.replace(piece(""), reasoning="hm "))
    handle.give(piece("<img src=x onerror=alert(1)>"))
    page.wait(f"{TEXT}.includes('onerror')")
    assert page.run("document.querySelector('#log').ariaBusy") == "true"
    assert page.run("document.querySelector('.message.model details').open") is False
    handle.give(piece("\n```python\nx = 1\n```\n"))
    handle.give(piece("done", "stop"))
    assert answers(page) == ["<img src=x onerror=alert(1)>\nx = 1\ndone"]
    assert page.run("document.querySelector('.message pre').textContent") == "x = 1\n"
    assert page.run("document.querySelectorAll('#log img, #log b').length") == 0
    assert page.run("document.querySelector('details .text').textContent") == "hm "
    cost = page.run("document.querySelector('.cost').textContent")
    assert cost.startswith("first token ") and "tokens/s · 4 tokens · prompt 3" in cost
    assert page.run("document.activeElement.id") == "message"
    # The next question has the conversation before it.
    page.run("document.querySelector('#seed').value = 7; document.querySelector('#temperature').value = 0")
    ask(page, "And then?")
    newest(engine, 2).give(piece("", "stop"))
    answers(page, 2)
    request, options = engine.asked[1]
    assert str(request.prompt) == (
        "<user>Say <b>it</b>.\n<assistant><img src=x onerror=alert(1)>\n```python\nx = 1\n```\ndone\n<user>And then?\n<assistant>"
    )
    assert (options["seed"], options["sampling"].temperature, request.explain) == (7, 0, False)


def test_stop_ends_the_answer_in_the_engine_too(open_page, server, engine):
    page = open_page(server)
    ask(page, "Go on.")
    newest(engine).give(piece("one "))
    page.wait(f"{TEXT}.includes('one')")
    assert page.run("document.activeElement.id") == "stop"
    page.press(" ", windowsVirtualKeyCode=32, text=" ")
    wait_for(lambda: engine.handles[0].cancelled)
    engine.handles[0].give(None)
    assert answers(page) == ["one "] and "Stopped." in page.run(TEXT)
    page.click("#new-chat")
    assert page.run("document.querySelectorAll('.message').length") == 0


def test_a_new_chat_forgets_the_one_whose_answer_runs(open_page, server, engine):
    page = open_page(server)
    ask(page, "Go on.")
    newest(engine).give(piece("one "))
    page.wait(f"{TEXT}.includes('one')")
    page.click("#new-chat")
    wait_for(lambda: engine.handles[0].cancelled)
    engine.handles[0].give(None)
    page.wait("document.getElementById('stop').hidden")
    ask(page, "Anew.")
    newest(engine, 2).give(piece("two", "stop"))
    assert "Go on." not in str(engine.asked[-1]) and "Anew." in str(engine.asked[-1])


def test_a_dropped_file_stands_before_the_question(open_page, server, engine):
    page = open_page(server)
    drop(page, "long.txt", "x" * 300)
    page.wait(f"{TEXT}.includes('300 tokens and the context')")
    assert ["400" in text for text in page.complaints] == [True]  # the server's refusal
    page.complaints.clear()
    drop(page, "none.bin", "\0")
    page.wait(f"{TEXT}.includes('none.bin is empty, or no text in UTF-8.')")
    drop(page, "huge.txt", "y" * 600_000)
    page.wait(f"{TEXT}.includes('huge.txt has too many tokens')")
    drop(page, "notes.txt", "The key is 7.")
    page.wait(f"{TEXT}.includes('notes.txt, 13 tokens')")
    ask(page, "Which key?")
    newest(engine).give(piece("7", "stop"))
    assert answers(page) == ["7"] and str(engine.asked[0][0].prompt).startswith("<user>The key is 7.\n\nWhich key?\n")
    assert page.run("document.querySelector('#document').hidden")


def test_no_question_goes_before_its_document_is_read(open_page, server, engine, monkeypatch):
    """Of two files the one that was dropped last is the document, and a new chat has none."""
    page, read, released = open_page(server), [], threading.Event()
    tokens = Service.tokens

    def slow(self, prompt, **options):
        read.append(prompt)
        if len(read) in (1, 3):
            assert released.wait(60)
        return tokens(self, prompt, **options)

    monkeypatch.setattr(Service, "tokens", slow)
    drop(page, "first.txt", "The key is 7.")
    page.wait(f"{TEXT}.includes('first.txt is read')")
    ask(page, "Which key?")
    assert engine.asked == [] and page.run("document.querySelector('#send').disabled")
    drop(page, "second.txt", "The key is eight.")
    page.wait(f"{TEXT}.includes('second.txt, 17 tokens')")
    released.set()
    page.wait("!document.querySelector('#send').disabled")
    page.click("#send")
    newest(engine).give(piece("8", "stop"))
    assert answers(page) == ["8"] and "The key is eight.\n\nWhich key?" in str(engine.asked[0][0].prompt)
    released.clear()
    drop(page, "third.txt", "The key is 9.")
    page.wait(f"{TEXT}.includes('third.txt is read')")
    page.click("#new-chat")
    released.set()
    wait_for(lambda: len(read) == 3)
    page.wait("document.querySelector('#document').hidden && !document.querySelector('#send').disabled")


def test_the_picture_grows_and_a_place_shows_its_passage(open_page, server, engine):
    page = open_page(server)
    page.wait("!document.querySelector('#explain').disabled")
    page.click("#explain")
    drop(page, "notes.txt", "0123456789" * 12)
    page.wait(f"{TEXT}.includes('120 tokens')")
    ask(page, "?")
    tokens = len("<user>" + "0123456789" * 12 + "\n\n?\n<assistant>")
    weights = np.zeros((2, tokens))
    weights[1, 60] = 0.5
    handle = newest(engine)
    assert engine.asked[0][0].explain
    handle.give(dataclasses.replace(piece("a"), attention=Attention((0, 5), tokens, 1, weights)))
    page.wait("!document.querySelector('#picture-box').hidden")
    weights[0, 20] = 1.0
    handle.give(dataclasses.replace(piece("b", "stop"), attention=Attention((0, 5), tokens, 2, weights)))
    answers(page)
    count = (
        "(() => { const c = document.querySelector('#picture'); const d = c.getContext('2d').getImageData(0, 0, c.width, c.height)"
        ".data; let n = 0; for (let i = 0; i < d.length; i += 4) n += d[i] > 100; return n / d.length * 4; })()"
    )
    assert 0 < page.run(count) < 0.1  # two bright places on a dark ground
    page.click("#picture", at=((60.5) / tokens, 0.75))
    page.wait("document.querySelector('mark')")
    assert page.run("document.querySelector('#passage-title').textContent") == "Layer 5, position 60"
    assert page.run("document.querySelector('mark').textContent") == "4"  # behind the six letters of <user>
    passage = page.run("document.querySelector('#passage').textContent")
    assert passage == ("<user>" + "0123456789" * 12)[20:101]
    page.click("#brightest")
    page.wait("document.querySelector('#passage-title').textContent == 'Layer 0, position 20'")
    page.run("document.querySelector('#picture').focus()")
    page.press("ArrowRight", windowsVirtualKeyCode=39)
    page.press("ArrowDown", windowsVirtualKeyCode=40)
    page.press("Enter", windowsVirtualKeyCode=13)
    page.wait("document.querySelector('#passage-title').textContent == 'Layer 5, position 21'")
    page.click("#new-chat")
    assert page.run("['picture-box', 'passage-box'].every((id) => document.getElementById(id).hidden)")


def test_a_key_is_asked_for_and_stays_in_the_tab(chromium, engine, chatty):
    with live(Service(names=("m",), root="m", keys=("sk-1",)), lambda: (*chatty, engine)) as server:
        chromium.go(f"http://127.0.0.1:{server.port}/")
        unknown = "The server does not know this key."
        for key, told in (("wrong", unknown), ("sk-1\u200b", unknown), ("sk-1", "on the device")):
            chromium.wait("!document.querySelector('#key-form')?.hidden && document.activeElement.id == 'key'")
            chromium.type(key)
            chromium.press("Enter", windowsVirtualKeyCode=13, text="\r")
            chromium.wait(f"{TEXT}.includes({told!r})")
            time.sleep(0.3)  # the words may be those about the key before
            assert "cannot be reached" not in chromium.run(TEXT)
        chromium.wait("!document.querySelector('#message').disabled")
        assert chromium.run("document.querySelector('#key-form').hidden") and "clustered, 64 tokens" in chromium.run(TEXT)
        assert chromium.run("[localStorage.length, document.cookie, location.href.includes('sk-1')]") == [0, "", False]
        ask(chromium, "Hello")
        newest(engine).give(piece("yes", "stop"))
        assert answers(chromium) == ["yes"]
    assert {text for text in chromium.complaints if "401" not in text} == set()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", SIZES)
def test_nothing_is_wider_than_the_window(open_page, server, engine, tmp_path, name, scheme):
    page = open_page(server)
    page.size(*SIZES[name], scheme=scheme)
    page.wait("!document.querySelector('#explain').disabled")
    page.click("#explain")
    drop(page, "a_file_with_a_name_that_is_rather_long_for_a_phone_0123456789.txt", "0123456789" * 12)
    page.wait(f"{TEXT}.includes('120 tokens')")
    ask(page, "What does this file say? " + "long" * 30)
    handle = newest(engine)
    picture = Attention((*range(4),), 139, 3, np.random.default_rng(0).exponential(size=(4, 139)) ** 4)
    handle.give(dataclasses.replace(piece("It counts:\n```\n" + "0123456789" * 20), attention=picture))
    handle.give(piece("\n```\nand begins again.", "stop"))
    answers(page)
    page.click("#brightest")
    page.wait("document.querySelector('mark')")
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    for place in ("#composer", "aside"):
        page.run(f"document.querySelector('{place}').scrollIntoView()")
        page.picture(tmp_path / f"{name}-{scheme}-{place.strip('#')}.png")  # to look at: --basetemp keeps them


def test_a_model_answers_and_the_place_of_the_fact_is_bright(open_page, bundled, tmp_path):
    context = task.context(np.random.default_rng(7), length=1500, facts=task.Facts(keys=1), split="heldout")
    (question,) = context.questions
    options = dict(cache=Clustered(budget=64), batch_size=1, context_length=2048, max_new_tokens=6, prefix_memory=0)
    service = Service(names=("bundled",), root="bundled")
    with live(service, lambda: (*bundled, icejax.Engine(*bundled, **options))) as server:
        page = open_page(server)
        page.wait("!document.querySelector('#explain').disabled")
        page.click("#explain")
        page.run("document.querySelector('#temperature').value = 0")
        drop(page, "facts.txt", context.text.decode() + question.text)
        page.wait(f"{TEXT}.includes('facts.txt, ')")
        page.click("#send")
        assert answers(page) == [question.answer]
        page.click("#brightest")
        page.wait("document.querySelector('mark')")
        assert question.answer in page.run("document.querySelector('#passage').textContent")
