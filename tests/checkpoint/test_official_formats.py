"""Matrices are what compressed-tensors and AutoAWQ make of them, in `.venv-kvpress` (make test-slow).

GPTQ's packages are not there: GPTQModel has no wheel, and AutoGPTQ's are of CUDA and of few Pythons.
"""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.cache.test_kvpress import KVPRESS
from tests.checkpoint.test_layouts import read
from tests.helpers.quantised import FORMATS, fp4

ROWS = {name: row for name, row in FORMATS.items() if row.config["quant_method"] in ("compressed-tensors", "awq")}
del ROWS["int-channel-flat"]  # the package takes no scales of one axis
ROWS |= {"nvfp4": fp4("nvfp4", 16, error=0.098), "mxfp4": fp4("mxfp4", 32, error=0.115)}  # the package knows these groups alone
SHAPE = (72, 160)


@pytest.fixture(scope="module")
def matrices(tmp_path_factory):
    """The tensors of a Gaussian matrix in every format, and the weights that its package reads in them."""
    folder, rng = tmp_path_factory.mktemp("matrices"), np.random.default_rng(0)
    tensors = {name: row.write(rng.standard_normal(SHAPE).astype(np.float32)) for name, row in ROWS.items()}
    for name, parts in tensors.items():
        save_file(parts, folder / f"{name}.safetensors")
        config = ROWS[name].config
        weights = config if name == "awq" else config["config_groups"]["group_0"]["weights"]
        (folder / f"{name}.json").write_text(json.dumps(dict(format=config.get("format", name), weights=weights)))
    argv = [KVPRESS, Path(__file__).parents[1] / "helpers" / "official_weights.py", folder]
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: (parts, load_file(folder / f"{name}.found")["weight"].numpy()) for name, parts in tensors.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_matrix_is_what_its_package_says(name, matrices):
    tensors, theirs = matrices[name]
    np.testing.assert_allclose(read(ROWS[name].config, tensors, SHAPE), theirs, rtol=1e-6, atol=1e-6)
    assert theirs.std() > 0.9
