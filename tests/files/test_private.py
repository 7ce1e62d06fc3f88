"""Files and folders that only the user may read, whatever the umask and whatever is in their place."""

import os

import pytest

from icejax.files import private


@pytest.mark.parametrize("mask", [0, 0o777])
def test_a_new_file_is_the_users_alone(tmp_path, mask):
    old_mask = os.umask(mask)
    try:
        with private.new_file(tmp_path / "file") as file:
            file.write(b"said")
    finally:
        os.umask(old_mask)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600 and (tmp_path / "file").read_bytes() == b"said"


def test_a_link_is_not_followed(tmp_path, monkeypatch):
    (tmp_path / "theirs").write_text("precious")
    (tmp_path / "file").symlink_to("theirs")
    private.new_file(tmp_path / "file").close()
    assert (tmp_path / "theirs").read_text() == "precious" and not (tmp_path / "file").is_symlink()
    monkeypatch.setattr("pathlib.Path.unlink", lambda *_, **__: None)  # as if it were planted again at once
    with pytest.raises(FileExistsError):
        private.new_file(tmp_path / "file")


def test_missing_folders_are_made_for_the_user_alone(tmp_path):
    tmp_path.chmod(0o755)
    old_mask = os.umask(0)
    try:
        private.make_folder(tmp_path / "a" / "b")
        private.make_folder(tmp_path / "a" / "b")
    finally:
        os.umask(old_mask)
    assert [path.stat().st_mode & 0o777 for path in (tmp_path, tmp_path / "a", tmp_path / "a" / "b")] == [0o755, 0o700, 0o700]
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        private.make_folder(tmp_path / "file" / "a")
