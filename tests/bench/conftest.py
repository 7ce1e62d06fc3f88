"""Marks the tests of `bench/`, which run with `make test-bench`."""

from pathlib import Path

import pytest


def pytest_ignore_collect(config):
    """Leaves the folder out where none of its tests would run; else each process imports all of `bench/`."""
    return "not bench" in config.option.markexpr or None


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.bench)
