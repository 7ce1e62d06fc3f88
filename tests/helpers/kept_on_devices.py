"""Keeps caches of a model on several devices: sessions, and the prefixes of an engine, saved and loaded on others; answers.

`tests.helpers.on_devices` runs the cases (`KEPT`).
"""

import tempfile
from pathlib import Path

import numpy as np

import icejax
from icejax.api.choice import Choice
from icejax.cache.options import make_policy
from icejax.cache.registry import Full
from icejax.checkpoint.load import load_model
from icejax.engine.sampling import Sampling
from icejax.evaluation.attention_map import Explanation
from icejax.session.session import Session
from icejax.session.storage import ARRAYS
from icejax.session.text_cache import TextCache
from tests.helpers.letters import Letters
from tests.helpers.on_devices import FEW_KV_HEADS, LATENT, LLAMA, checkpoint

FACTORS = dict(short_factor=[1.0] * 8, long_factor=[1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0])
LONG = LLAMA | dict(
    rope_parameters=dict(rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=128, **FACTORS)
)
SIZES = dict(context_length=700, host_memory_limit=2**30)
# The model, a cache and its options (None: the one that a session chooses, which moves), and how many devices, or the mesh, it is made on
# and loaded on. A latent cache chooses pages for the heads of a device, so that only a budget for all tokens gives the same text.
KEPT = {
    "session-moves": (LLAMA, None, {}, 4, 2),
    "session-latent": (LATENT, "clustered", dict(budget=1024), 2, 4),
    "engine-clustered": (LLAMA, "clustered", dict(budget=64), 4, 2),
    "answers-renewed": (LONG, "clustered", dict(budget=64), 4),
    "pictures": (LLAMA, "clustered", dict(budget=64), 4),
    "session-tokens": (FEW_KV_HEADS, "clustered", dict(budget=1024), "heads=2,tokens=4", 2),
    "engine-tokens": (FEW_KV_HEADS, "clustered", dict(budget=1024), 2, "heads=2,tokens=2"),
    "pictures-tokens": (FEW_KV_HEADS, "clustered", dict(budget=1024), "heads=2,tokens=4"),
}


class ChatLetters(Letters):
    """Letters with a chat template."""

    special_tokens_map: dict[str, str] = {}
    chat_template = "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '~' }}{% endfor %}"


def kept(name: str) -> dict:
    """Returns how a case on several devices compares with one device."""
    raw, cache, options, *meshes = KEPT[name]
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint(raw | dict(num_hidden_layers=1), Path(folder))
        models = [load_model(path, mesh=mesh) for mesh in (None, *meshes)]
        policy = None if cache is None else make_policy(cache, options)
        return dict(session=_sessions, engine=_engines, answers=_answers, pictures=_pictures)[name.partition("-")[0]](
            models, policy, folder
        )


def _sessions(models, policy, folder: str) -> dict:
    """Compares chats on one device and on several, and these after they are saved and loaded on one device and on others."""
    one, several = (_session(model, policy) for model in models[:2])
    texts = [_chat(session) for session in (one, several)]
    several.save(f"{folder}/several")
    loaded = [Session.load(f"{folder}/several", model, ChatLetters()) for model in models]
    loaded[2].save(f"{folder}/others")
    bits = [Path(folder, name, ARRAYS).read_bytes() for name in ("several", "others")]
    last = [session.chat(_words(20, seed=4), max_new_tokens=12).text for session in (one, several, *loaded)]
    return dict(same_texts=texts[0] == texts[1], same_bits=bits[0] == bits[1], same_last=len(set(last)) == 1)


def _engines(models, policy, folder: str) -> dict:
    """Compares answers behind a document that engines store on the disk, on one device, on several, and for others."""
    document, results = _words(300, seed=6), []
    for number, model in ((0, models[0]), (1, models[1]), (1, models[2]), (1, models[0])):
        sizes = dict(batch_size=2, context_length=500, max_new_tokens=16, prefix_memory=2**26, prefix_dir=f"{folder}/{number}")
        with icejax.Engine(model, Letters(), cache=policy, **sizes) as engine:
            asked = (engine.submit(document + question, max_new_tokens=10).result() for question in ("what", "where", "who"))
            results.append([(x.token_ids, x.cached_tokens) for x in asked])
    texts = [[text for text, _ in result] for result in results]
    cached = [[count for _, count in result] for result in results]
    return dict(same_texts=all(x == texts[0] for x in texts), cached=cached)


def _pictures(models, policy, _: str) -> dict:
    """Compares what `--explain` shows, and what a request's answer tells of itself."""
    prompt, options, pictures = [ord(x) - 33 for x in _words(200, seed=8)], dict(cache=policy, max_new_tokens=8), []
    for model in models:
        explanation = Explanation(model, prompt, policy, new_tokens=8)
        request = icejax.Request(prompt=prompt, explain=True)
        (answer,) = icejax.generate(model, Letters(), request, watch=explanation.watch, **options)
        pictures += [answer.attention, explanation.picture()]
    error = max(float(np.abs(picture.weights - pictures[0].weights).max()) for picture in pictures)
    same = error < 1e-3 < float(pictures[0].weights.max())
    return dict(same_texts=same, steps=[picture.steps for picture in pictures])


def _answers(models, policy, _: str) -> dict:
    """Compares several answers to two prompts, of which one outgrows the original context and is prefilled again."""
    options = dict(n=2, sampling=Sampling(temperature=1.0), max_new_tokens=24, cache=policy)
    prompts = [_words(length, seed=length) for length in (115, 60)]
    texts = [[x.token_ids for x in icejax.generate(model, Letters(), prompts, **options)] for model in models]
    return dict(same_texts=texts[0] == texts[1], lengths=[len(text) for text in texts[1]])


def _session(model, policy) -> Session:
    session = Session(model, ChatLetters(), cache=policy, **SIZES)
    if policy is None:
        session._cache = TextCache(model, Choice(Full(movable=True), None, 256), **SIZES)
    return session


def _chat(session: Session) -> list[str]:
    """Returns the answers of a chat of which a turn is taken back."""
    answers = [session.chat(_words(length, seed=length), max_new_tokens=16).text for length in (150, 40)]
    session.undo()
    return [*answers, session.chat(_words(90, seed=3), max_new_tokens=16).text]


def _words(length: int, *, seed: int) -> str:
    """Returns random letters."""
    return "".join(map(chr, np.random.default_rng(seed).integers(97, 123, length)))
