"""Options of an answer: an unknown one is refused, and the message names the right one."""

import pytest

import icejax
from icejax.cache.registry import Full

WRONG = {
    "max_tokens": r"there is no option 'max_tokens': expected one of sampling, max_new_tokens, .*\(did you mean max_new_tokens\?\)",
    "temperature": r"'temperature' is an option of sampling: give sampling=icejax\.Sampling\(temperature=\.\.\.\)",
}


@pytest.mark.parametrize("name", WRONG)
def test_an_unknown_option_is_told_with_the_right_one(bundled, name):
    session = icejax.Session(*bundled, cache=Full(), context_length=300)
    for call in (session.ask, session.chat, lambda text, **options: icejax.generate(*bundled, text, **options)):
        with pytest.raises(TypeError, match=WRONG[name]):
            call("x", **{name: 3})
