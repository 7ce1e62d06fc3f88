"""The folder of results of `bench.device`: JSONL files that grow line by line, a log and the page."""

from __future__ import annotations

import json
import os
from pathlib import Path

from icejax.checks.errors import InputError

MOST = 15 * 2**20  # largest bytes of a file
TAIL, LOG_MOST = 16 * 2**10, 4 * 2**20  # characters of the log, per part and in all
LOG, PAGE = "log.txt", "device.md"
DONE = "done"


class Results:
    """Rows of every part, each with the part's name, and after them a line with the part's end."""

    def __init__(self, folder: Path, *, tiny: bool) -> None:
        """Opens a folder of results, or makes it.

        Raises:
            InputError: the path is not a folder, or it holds other JSONL files, or results of other sizes.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--out must be a folder that can be written, got {folder}: {error.strerror}") from None
        self.folder, self._tiny = folder, tiny
        for file in folder.glob("*.jsonl"):
            if any("part" not in row for row in _lines(file)):
                raise InputError(f"--out must be a new folder or one of earlier results, got {folder} with another {file.name}")
        if any(end["tiny"] != tiny for end in self.ends().values()):
            other_sizes, way = ("the whole sizes", "without") if tiny else ("--tiny", "with")
            raise InputError(f"--out {folder} holds results of {other_sizes}: choose another folder, or run {way} --tiny")

    def rows(self) -> list[dict]:
        """Returns every row of every part, without lines that were cut off."""
        return [row for file in sorted(self.folder.glob("*.jsonl")) for row in _lines(file) if "end" not in row]

    def ends(self) -> dict[str, dict]:
        """Returns the end of every part by name: its field `end` is `done`, or says what went wrong."""
        ends = [row for file in self.folder.glob("*.jsonl") for row in _lines(file) if "end" in row]
        return {row["part"]: row for row in ends}

    def begin(self, part: str, file: str) -> list[dict]:
        """Removes and returns the rows that an earlier run of a part left."""
        path = self.folder / file
        lines = _lines(path)
        old = [row for row in lines if row["part"] == part]
        if old:
            new_path = path.with_suffix(".new")
            new_path.write_text("".join(json.dumps(row) + "\n" for row in lines if row["part"] != part))
            os.replace(new_path, path)
        return [row for row in old if "end" not in row]

    def add(self, part: str, file: str, row: dict) -> bool:
        """Writes a row; returns whether the file had room for it."""
        path, line = self.folder / file, json.dumps(dict(part=part) | row) + "\n"
        with path.open("a+b") as out:
            size = out.tell()
            if size + len(line) > MOST and "end" not in row:
                return False
            if size and os.pread(out.fileno(), 1, size - 1) != b"\n":
                out.write(b"\n")
            out.write(line.encode())
        return True

    def end(self, part: str, file: str, how: str, seconds: float, left_out: int) -> None:
        """Writes the end of a part."""
        self.add(part, file, dict(end=how, seconds=round(seconds, 1), rows_left_out=left_out, tiny=self._tiny))

    def log(self, part: str, text: str) -> None:
        """Adds the end of a part's other output to the log."""
        path = self.folder / LOG
        old = path.read_text(errors="replace") if path.exists() else ""
        path.write_text((old + f"== {part}\n{text[-TAIL:].strip()}\n")[-LOG_MOST:])


def _lines(file: Path) -> list[dict]:
    rows = []
    for line in file.read_text(errors="replace").splitlines() if file.exists() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows += [row] if isinstance(row, dict) else []
    return rows
