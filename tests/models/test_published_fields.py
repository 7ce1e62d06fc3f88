"""Fields of published config.json files are taken: their context, and what of them transformers ignores, which is told."""

import logging

import pytest

from icejax.checks.errors import listed
from icejax.models.registry import family
from tests.helpers.published_fields import PUBLISHED
from tests.helpers.raw_configs import BASE, SMALLEST


def whole(fields: dict, model_type: str) -> dict:
    """Returns a config with these fields and the smallest sizes of its family."""
    smallest = BASE | SMALLEST[model_type] | fields | {"model_type": model_type}
    return {name: value for name, value in smallest.items() if value is not ...}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_fields_are_taken(name, caplog):
    model_type, context, ignored, fields = PUBLISHED[name]
    if "text_config" in fields:
        inner = fields["text_config"]
        raw = fields | {"model_type": model_type, "text_config": whole(inner, inner["model_type"])}
    else:
        raw = whole(fields, model_type)
    with caplog.at_level(logging.INFO, logger="icejax"):
        assert family(raw).read_config(raw).context_length == context
    told = f"config.json: fields that transformers ignores are ignored: {listed([*map(repr, ignored.split())])}"
    assert caplog.messages == ([told] if ignored else [])
