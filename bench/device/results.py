"""The folder of results: a few JSONL files that grow line by line, the log and the page."""

from __future__ import annotations

import json
import os
from pathlib import Path

from icejax.checks.errors import InputError

MOST = 15 * 2**20  # bytes of a file
TAIL, LOG_MOST = 16 * 2**10, 4 * 2**20  # characters of the log, per part and in all
LOG, PAGE = "log.txt", "device.md"
DONE = "done"


class Results:
    """Rows of every part, each with the part's name, and behind them a line that says how the part ended."""

    def __init__(self, folder: Path, *, tiny: bool) -> None:
        """Takes up a folder of results, which need not be there yet.

        Raises:
            InputError: it is no folder, or holds other things, or results at other sizes.
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
            other, way = ("the whole sizes", "without") if tiny else ("--tiny", "with")
            raise InputError(f"--out {folder} holds results of {other}: choose another folder, or run {way} --tiny")

    def rows(self) -> list[dict]:
        """Returns every row of every part; a line that was being written when the machine went is left out."""
        return [row for file in sorted(self.folder.glob("*.jsonl")) for row in _lines(file) if "end" not in row]

    def ends(self) -> dict[str, dict]:
        """Returns how the parts ended, by name: `end` is `done` or says what went wrong."""
        found = [row for file in self.folder.glob("*.jsonl") for row in _lines(file) if "end" in row]
        return {row["part"]: row for row in found}

    def begin(self, part: str, file: str) -> list[dict]:
        """Takes out what an earlier try of a part left, and returns it."""
        path = self.folder / file
        lines = _lines(path)
        old = [row for row in lines if row["part"] == part]
        if old:
            beside = path.with_suffix(".new")
            beside.write_text("".join(json.dumps(row) + "\n" for row in lines if row["part"] != part))
            os.replace(beside, path)
        return [row for row in old if "end" not in row]

    def add(self, part: str, file: str, row: dict) -> bool:
        """Writes a row, and says whether the file had room for it."""
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
        """Writes how a part ended."""
        self.add(part, file, dict(end=how, seconds=round(seconds, 1), rows_left_out=left_out, tiny=self._tiny))

    def log(self, part: str, text: str) -> None:
        """Keeps the end of what a part said beside its rows."""
        path = self.folder / LOG
        old = path.read_text(errors="replace") if path.exists() else ""
        path.write_text((old + f"== {part}\n{text[-TAIL:].strip()}\n")[-LOG_MOST:])


def _lines(file: Path) -> list[dict]:
    found = []
    for line in file.read_text(errors="replace").splitlines() if file.exists() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        found += [row] if isinstance(row, dict) else []
    return found
