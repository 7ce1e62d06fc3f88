"""Dequantised matrices equal those of the compressed-tensors and AutoAWQ packages, run in `.venv-kvpress` (make test-slow).

GPTQ packages are not installed there: GPTQModel has no wheel, and AutoGPTQ's wheels need CUDA and fit few Python versions.
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
del ROWS["int-channel-flat"]  # the package accepts no 1-D scales
ROWS |= {
    "nvfp4": fp4("nvfp4", 16, error=0.098),
    "mxfp4": fp4("mxfp4", 32, error=0.115),
}  # the package has only these group sizes
SHAPE = (72, 160)


@pytest.fixture(scope="module")
def matrices(tmp_path_factory):
    """For each format: the tensors of a Gaussian matrix, and the weights that the format's package decodes from them."""
    folder, rng = tmp_path_factory.mktemp("matrices"), np.random.default_rng(0)
    tensors = {name: row.write(rng.standard_normal(SHAPE).astype(np.float32)) for name, row in ROWS.items()}
    for name, parts in tensors.items():
        save_file(parts, folder / f"{name}.safetensors")
        config = ROWS[name].config
        weights = config if name == "awq" else config["config_groups"]["group_0"]["weights"]
        (folder / f"{name}.json").write_text(json.dumps(dict(format=config.get("format", name), weights=weights)))
    argv = [KVPRESS, Path(__file__).parents[1] / "helpers" / "official_weights.py", folder]
    process = subprocess.run(list(map(str, argv)), capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    return {name: (parts, load_file(folder / f"{name}.found")["weight"].numpy()) for name, parts in tensors.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_matrix_is_what_its_package_says(name, matrices):
    tensors, theirs = matrices[name]
    np.testing.assert_allclose(read(ROWS[name].config, tensors, SHAPE), theirs, rtol=1e-6, atol=1e-6)
    assert theirs.std() > 0.9
