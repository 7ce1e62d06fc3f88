"""The built wheel: its files, the `icejax` command and the bundled model, run away from the sources."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import icejax
from icejax.commands import COMMANDS

PACKAGE = Path(icejax.__file__).parent
SCRIPT = "import sys; from importlib.metadata import entry_points as e; sys.exit([*e(name='icejax')][0].load()())"


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The folder of the unpacked wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "built")]
    subprocess.run(command, cwd=PACKAGE.parent, check=True, capture_output=True)
    (wheel,) = (folder / "built").iterdir()
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder / "installed")
    return folder / "installed"


def run(installed: Path, tmp_path: Path, *arguments: str, after: str = "") -> tuple[int, str, str]:
    """Runs Python in `tmp_path` with the wheel first on the path; `after` is shell text behind the command, a redirection."""
    shell = ["sh", "-c", f'exec "$@" {after}', "sh", sys.executable, "-P", *arguments]
    environment = os.environ | {"PYTHONPATH": str(installed)}
    process = subprocess.run(shell, cwd=tmp_path, env=environment, capture_output=True, text=True)
    return process.returncode, process.stdout, process.stderr


def test_it_holds_the_packages_and_nothing_else(installed):
    assert sorted(re.sub(r"-.*\.", ".", path.name) for path in installed.iterdir()) == ["icejax", "icejax.dist-info"]
    assert {path.name for path in (installed / "icejax/commands").iterdir()} >= {f"{name}.py" for name in COMMANDS}
    for folder, name in (("assets", "model.safetensors"), ("serving/page", "index.html")):
        files = [
            {path.name: path.read_bytes() for path in (root / folder).iterdir()} for root in (PACKAGE, installed / "icejax")
        ]
        assert files[0] == files[1] and name in files[0]


def test_it_is_the_wheel_that_runs(installed, tmp_path):
    code = "import icejax; print(*icejax.__path__)"
    assert run(installed, tmp_path, "-c", code) == (0, f"{installed / 'icejax'}\n", "")


def test_the_command_tells_of_itself(installed, tmp_path):
    version = f"icejax {icejax.__version__}\n"
    assert run(installed, tmp_path, "-m", "icejax", "--version") == (0, version, "")
    assert run(installed, tmp_path, "-c", SCRIPT, "--version") == (0, version, "")
    status, out, err = run(installed, tmp_path, "-c", SCRIPT)
    assert (status, err) == (0, "") and all(f"  {name} " in out for name in COMMANDS)
    assert run(installed, tmp_path, "-m", "icejax", "--help") == (0, out, "")


def test_a_command_that_there_is_not_is_one_line(installed, tmp_path):
    status, out, err = run(installed, tmp_path, "-m", "icejax", "generat")
    expected = "icejax: error: there is no command 'generat': expected one of generate, chat, serve, evaluate, convert, bench, doctor, sessions"
    assert (status, out, err) == (2, "", f"{expected} (did you mean generate?)\n")
    status, out, err = run(installed, tmp_path, "-m", "icejax", "--version", after=">&-")
    assert (status, out) == (2, "") and err.startswith("icejax: error: stdout is closed: ") and err.count("\n") == 1


def test_a_command_gets_its_own_arguments(installed, tmp_path):
    status, out, err = run(installed, tmp_path, "-m", "icejax", "convert", "nowhere")
    assert (status, out) == (2, "") and err == "icejax convert: error: the following arguments are required: DST\n"


@pytest.mark.slow  # imports, loads and compiles
def test_the_bundled_model_answers(installed, tmp_path):
    arguments = ["-m", "icejax", "generate", "--prompt", "import os", "--max-new-tokens", "2", "--cache", "full", "--quiet"]
    status, out, err = run(installed, tmp_path, *arguments)
    assert (status, err) == (0, "") and len(out) > 1
    assert list(tmp_path.iterdir()) == []
