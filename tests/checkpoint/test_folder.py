"""Where a model's folder comes from: a revision of a hub id, and what is told where no network brings it."""

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, RevisionNotFoundError

from icejax.api.generate import load
from icejax.checkpoint.folder import resolve
from icejax.checks.errors import InputError


def hub_raising(monkeypatch, error: Exception, cause: Exception | None = None) -> None:
    def snapshot_download(*_, **__):
        raise error from cause

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


def test_without_a_network_the_line_says_so(monkeypatch):
    beginning = "org/name: no such folder, its files are not all in the hub's cache, and "
    end = ": connect, or give the folder of a model that is on this machine"
    with pytest.raises(InputError) as told:
        resolve("org/name")  # the tests run with HF_HUB_OFFLINE=1
    assert str(told.value) == f"{beginning}HF_HUB_OFFLINE forbids the network{end}"
    cause = ConnectionError("[Errno -2] Name or service not known")
    hub_raising(monkeypatch, LocalEntryNotFoundError("a long text"), cause)
    with pytest.raises(InputError) as told:
        resolve("org/name")
    assert str(told.value) == f"{beginning}no network reaches the hub ({cause}){end}"


def test_a_revision_of_a_hub_id_is_asked_for(monkeypatch, tmp_path):
    asked = []

    def snapshot_download(hub_id, *, revision, allow_patterns):
        asked.append((hub_id, revision))
        return tmp_path

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve("org/name") == resolve("org/name", revision="refs/pr/1") == tmp_path
    with pytest.raises(InputError, match="is empty: expected a Hugging Face"):
        load("org/name", revision="v1.0")
    assert asked == [("org/name", None), ("org/name", "refs/pr/1"), ("org/name", "v1.0")]


@pytest.mark.parametrize("revision", ["", "../main", "a//b", "a b", 3])
def test_a_revision_that_is_no_name_is_refused(revision):
    with pytest.raises(InputError, match="revision must be a branch, a tag or a commit, got "):
        resolve("org/name", revision=revision)


def test_a_revision_that_cannot_be_is_told(monkeypatch, tmp_path):
    with pytest.raises(InputError, match="is a folder, and only a hub id has revisions: leave revision v1 out"):
        resolve(tmp_path, revision="v1")
    hub_raising(monkeypatch, RevisionNotFoundError.__new__(RevisionNotFoundError))
    with pytest.raises(InputError, match="org/name has no revision v1 on the hub: expected a branch, a tag or a commit"):
        resolve("org/name", revision="v1")


@pytest.mark.parametrize(
    "model", ["nosuch.gguf", "models/nosuch.gguf", "models/NOSUCH.GGUF", "/a/b/nosuch.gguf", "org/a/b.gguf"]
)
def test_a_gguf_file_that_does_not_exist_is_told(model):
    with pytest.raises(InputError) as told:
        resolve(model)
    assert str(told.value) == (
        f"{model}: expected a checkpoint folder, a GGUF file or a hub id such as org/name, found no such file"
    )


@pytest.mark.parametrize("model", ["org/Some-8B-GGUF", "org/Some-8B-gguf"])
def test_a_hub_id_of_gguf_files_asks_for_one_of_them(model):
    with pytest.raises(InputError, match=f"name one of them behind it, as {model}:FILE.gguf"):
        resolve(model)
