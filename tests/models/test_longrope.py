"""LongRoPE: a generation or session whose capacity is within the original context takes the short factors, else the long."""

import jax
import pytest
import torch

import icejax
from icejax.cache.registry import Full
from icejax.session.session import Session
from tests.helpers import families
from tests.helpers.family_rows import LONG, SHORT
from tests.helpers.letters import Letters

PROMPT, NEW = "abcdefghijklmnopqrst", 12


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    theirs = families.build(families.row("phi3-long"), num_hidden_layers=1)
    return theirs, families.load(theirs, tmp_path_factory.mktemp("model"))


def test_a_short_generation_equals_transformers(models):
    theirs, ours = models
    ids = Letters()(PROMPT)["input_ids"]
    with torch.no_grad():
        expected = theirs.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)[0, len(ids) :].tolist()
    (reply,) = icejax.generate(ours, Letters(), PROMPT, cache=Full(), max_new_tokens=NEW)
    assert reply.token_ids == tuple(expected)


def test_a_session_takes_those_of_its_room(models):
    factors = [Session(models[1], Letters(), context_length=room)._model.config.rope_scaling.factors for room in (64, 65)]
    assert factors == [tuple(SHORT), tuple(LONG)]


@pytest.mark.parametrize("room", [64, 65])
def test_a_session_is_gone_on_with_whatever_its_room(models, tmp_path, room):
    session = Session(models[1], Letters(), cache=Full(), context_length=room)
    session.ask(PROMPT, max_new_tokens=4)
    session.save(tmp_path / "kept")
    loaded = Session.load(tmp_path / "kept", models[1], Letters())
    answers = [x.ask("xyz", max_new_tokens=4).token_ids for x in (session, loaded)]
    assert answers[0] == answers[1]


def test_the_arrays_are_the_same(models):
    _, ours = models
    short = ours.for_capacity(64)
    assert ours.for_capacity(65) is ours and short.config.rope_scaling.factors == tuple(SHORT)
    assert all(x is y for x, y in zip(*(jax.tree.leaves(m) for m in (ours, short)), strict=True))
