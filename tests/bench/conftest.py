"""Tests of `bench/` run with `make test-bench`: nothing of the package depends on it."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.bench)
