"""Tests check the array shapes in icejax's annotations; outside tests nothing does."""

import importlib
import inspect
import pkgutil
import subprocess
import sys
import typing

import jax.numpy as jnp
import pytest
from beartype import beartype
from jaxtyping import TypeCheckError

import icejax
from icejax.cache.pool import page_format
from icejax.ops.attention.dense import merge_by_lse
from icejax.ops.topk import mask_of
from tests.helpers.shapes import has_shape


def test_a_wrong_shape_is_told():
    lse = jnp.zeros(2)
    with pytest.raises(
        TypeCheckError, match="parameters of icejax.ops.attention.dense.merge_by_lse.*\n.*parameter 'other_lse'"
    ):
        merge_by_lse(lse[:, None], lse, lse[:, None], jnp.zeros(3))


def test_a_wrong_dtype_is_told():
    with pytest.raises(TypeCheckError, match="parameter 'indices'"):
        mask_of(jnp.zeros((2, 4)), 8)


def test_a_wrong_result_is_told():
    with pytest.raises(TypeCheckError, match="return value of icejax.cache.pool.page_format.decode_pages"):
        page_format.decode_pages(jnp.zeros((3, 4, 8), jnp.uint32), "int32")


@pytest.mark.parametrize("of_ray", [False, pytest.param(True, marks=pytest.mark.slow)])  # Ray takes seconds to import
def test_every_annotation_can_be_read(of_ray):
    """An annotation with an unknown name or a malformed shape would otherwise be skipped silently, or fail at the first call."""
    if of_ray:
        pytest.importorskip("ray", reason="needs Ray: pip install 'icejax[ray]'")
    num_read = 0
    skipped = ("icejax.__main__", "icejax.generate")  # importing the module would hide the function `icejax.generate`
    names = (module.name for module in pkgutil.walk_packages(icejax.__path__, "icejax."))
    for name in (name for name in names if name not in skipped and name.startswith("icejax.ray") == of_ray):
        module = importlib.import_module(name)
        owners = (module, *(x for x in vars(module).values() if inspect.isclass(x) and x.__module__ == name))
        for function in (inspect.unwrap(getattr(x, "fget", x)) for owner in owners for x in vars(owner).values()):
            # Skips functions that dataclasses generate: their annotations may use names of another module.
            if inspect.isfunction(function) and function.__module__ == name and function.__code__.co_filename != "<string>":
                if any(map(has_shape, typing.get_type_hints(function).values())):
                    beartype(function)
                num_read += 1
    assert num_read > (10 if of_ray else 500)


def test_nothing_is_checked_in_use():
    code = "import numpy as np; from icejax.ops.topk import mask_of; print(mask_of(np.zeros((2, 4)), 8).shape)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "(2, 8)\n"
