"""Memory of `icejax chat`: its imports, the weights, the cache, and little else."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from icejax.api.generate import ASSETS
from icejax.checkpoint.load import abstract, read_config
from icejax.checkpoint.readers import huggingface
from tests.helpers import families
from tests.text.test_chat_turns import BUNDLED

EXCESS = 1.3  # times the weights and the cache: what a chat may hold beyond its imports after its second answer
SIZES = dict(hidden_size=1024, intermediate_size=4096, num_attention_heads=16, num_key_value_heads=8, num_hidden_layers=8)


@pytest.fixture(scope="module")
def half_a_gigabyte(tmp_path_factory):
    """A model with a chat template and 0.5 GB of random weights."""
    folder = tmp_path_factory.mktemp("model") / "large"
    shutil.copytree(ASSETS, folder)
    (folder / "model.safetensors").unlink()
    (folder / "chat_template.jinja").write_text(BUNDLED)
    families.edit_config(folder, **SIZES, dtype="float32")
    parameters, noise = abstract(read_config(folder), "float32")[1], np.random.default_rng(0)
    weights = ((key, 0, 0.02 * noise.standard_normal(x.shape, np.float32)) for key, x in parameters.items())
    huggingface.write(folder, {key: (x.shape, "F32") for key, x in parameters.items()}, weights)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("cache", ["full", "clustered"])
def test_a_chat_holds_its_weights_its_cache_and_little_else(half_a_gigabyte, cache):
    line = ["--model", str(half_a_gigabyte), "--caches", cache, "--context-length", "16384", "--words", "200"]
    as_users_run = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "MALLOC_ARENA_MAX")}
    result = subprocess.run(
        [sys.executable, "-m", "bench.memory", *line], env=as_users_run, capture_output=True, text=True, check=True
    )
    row = json.loads(result.stdout)
    print(row)
    assert row["weights"] > 5e8 and row["cache_bytes"] > 5e8
    assert 1 <= row["excess"] <= EXCESS
