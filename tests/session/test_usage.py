"""Reserved and used bytes of a session's cache, against counts of its tokens."""

import jax
import pytest

from icejax.cache.options import make_policy
from icejax.session.session import Session
from icejax.session.usage import session_usage

LAYERS, KV_HEADS, HEAD_DIM, ITEM = 4, 2, 64, 4  # of the bundled model
TOKEN = LAYERS * KV_HEADS * 2 * HEAD_DIM * ITEM  # bytes of a token's keys and values


def session_with(bundled, tokens: int, cache: str, **options) -> Session:
    """Returns a session whose cache holds `tokens` tokens; a byte is a token."""
    session = Session(*bundled, cache=make_policy(cache, options), context_length=700)
    session.ask("x" * tokens, max_new_tokens=1)
    return session


def test_a_full_cache_uses_what_its_tokens_take(bundled):
    session = session_with(bundled, 300, "full")
    used = session_usage(session)
    arrays = sum(x.nbytes for x in jax.tree.leaves(session._cache.run.state.cache.layers))
    assert (used.device, used.host, used.host_used) == (arrays, 0, 0) and arrays >= 700 * TOKEN
    assert used.device_used == 300 * TOKEN
    session.ask("y" * 100, max_new_tokens=1)  # behind the last answer's one token
    assert session_usage(session).device_used == 401 * TOKEN and session_usage(session).device == arrays


def test_a_pool_uses_what_its_tokens_take(bundled):
    """Tokens that are neither sinks nor in the window are in the pool."""
    session = session_with(bundled, 300, "quest", budget=64)
    used, run = session_usage(session), session._cache.run
    assert used.host == run.pool.nbytes > used.host_used
    on_device = sum(int(x.sum()) for x in _slots(session)) // (LAYERS * KV_HEADS)
    assert 0 <= on_device <= 64 and used.host_used == (300 - on_device) * TOKEN
    assert used.device == sum(x.nbytes for x in jax.tree.leaves(run.state.cache.layers)) > used.device_used > on_device * TOKEN


def _slots(session: Session):
    plan, cache = session._cache.plan, session._cache.run.state.cache
    return [policy.report(state, cache.lengths).slots for policy, state in zip(plan.policies, cache.layers, strict=True)]


@pytest.mark.slow
def test_all_that_is_reserved_can_be_used(bundled):
    for name, options in (("full", {}), ("clustered", {"budget": 64}), ("snapkv", {"budget": 64})):
        used = session_usage(session_with(bundled, 600, name, **options))
        assert 0 < used.device_used <= used.device and used.host_used <= used.host


def test_before_the_first_text_nothing_is_reserved(bundled):
    assert session_usage(Session(*bundled)) is None
