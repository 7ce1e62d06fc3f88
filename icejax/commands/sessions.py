"""The command ``icejax sessions DIR``: lists, verifies or removes the sessions saved in a folder."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from types import NoneType
from typing import Any

from icejax.checks.errors import InputError, printable, quoted, suggestion
from icejax.commands.options import Parser
from icejax.commands.terminal.phases import progress
from icejax.commands.terminal.process import ending, write
from icejax.commands.terminal.stderr import stderr_console
from icejax.engine.snapshot.fingerprint import Damaged, damaged
from icejax.files.atomic_folder import claim, current_folder, marked_folders
from icejax.session.storage import ABOUT, ARRAYS, StoredSession, read_session

HEAD = ["name", "size", "model", "cache", "tokens", "messages", "age"]
# Fields of a session's identity that are shown: shown name, key, allowed types.
IDENTITY = (
    ("model", "config.model_type", (str,)),
    ("layers", "config.num_hidden_layers", (int,)),
    ("hidden_size", "config.hidden_size", (int,)),
    ("cache", "cache.name", (str,)),
    ("budget", "cache.budget", (int, NoneType)),
)


def main(argv: list[str] | None = None, *, name: str = "icejax sessions") -> int:
    """Runs the command line; exit status 2 if a verified session is damaged, or a session could not be removed."""
    return ending(name, lambda: _run(argv, name))


def _run(argv: list[str] | None, name: str) -> int:
    parser = Parser(prog=name, description="List the sessions in a folder; no model is loaded.")
    parser.add_argument("folder", metavar="DIR", type=Path, help="a folder that holds sessions, or one of a session")
    parser.add_argument("--json", action="store_true", help="print one JSON object per session; sizes in bytes, unix times")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--verify", action="store_true", help="check every byte; exit status 2 if one is not as it was saved")
    action.add_argument("--remove", nargs="+", metavar="NAME", help="remove these sessions")
    arguments = parser.parse_args(argv)
    folders = _find(arguments.folder)
    if arguments.remove is not None:
        rows = _remove(arguments.folder, folders, list(dict.fromkeys(arguments.remove)))
    else:
        with progress(stderr_console()) as bars:
            tracked = bars.track(folders.items(), description="sessions")
            rows = [_describe(name, path, verify=arguments.verify) for name, path in tracked]
    if arguments.json:
        write("".join(json.dumps(row) + "\n" for row in rows))
    elif not rows:
        write(f"{printable(str(arguments.folder))} holds no sessions\n")
    else:
        write(_table([_cells(row) for row in rows] if arguments.remove is not None else [HEAD, *map(_cells, rows)]))
    listing = not arguments.verify and arguments.remove is None
    return 0 if listing or not any("damaged" in row or "not_removed" in row for row in rows) else 2


def _find(folder: Path) -> dict[str, Path]:
    """Returns the sessions in `folder` by name, or `folder` itself if it is a session."""
    if os.path.exists(current_folder(folder) / ABOUT):
        return {Path(os.path.realpath(folder)).name: folder}
    try:
        return marked_folders(folder, mark=ABOUT)
    except OSError as error:
        raise InputError(f"{folder} cannot be read ({error.strerror}): expected a folder that holds sessions") from None


def _describe(name: str, path: Path, *, verify: bool, tries: int = 3) -> dict[str, Any]:
    """Returns the fields of a session, or the reason why it cannot be continued.

    Args:
        verify: whether every byte is checked.
        tries: the largest number of tries, in case another process saves the session meanwhile.
    """
    row, stored = dict[str, Any](name=name), None
    try:
        with os.scandir(current_folder(path)) as files:
            row["bytes"] = sum(file.stat(follow_symlinks=False).st_size for file in files)
        row["saved"] = (current_folder(path) / ABOUT).stat().st_mtime
        stored = read_session(path)
        identity = {}
        for shown, key, kinds in IDENTITY:
            identity[shown] = stored.identity.get(key)
            if type(identity[shown]) not in kinds:
                damaged(path, f"{key} is {quoted(identity[shown])}")
        if verify:
            stored.verify()
        with stored.open():  # checks that the arrays exist and have their size
            pass
        return (
            row
            | identity
            | dict(
                tokens=stored.about.tokens,
                messages=len(stored.about.messages),
                started=stored.about.started,
            )
        )
    except (OSError, InputError) as error:
        if tries > 1 and _saved_anew(path, stored):
            return _describe(name, path, verify=verify, tries=tries - 1)
        return row | dict(damaged=error.strerror if isinstance(error, OSError) else _why(error, path))


def _saved_anew(path: Path, stored: StoredSession | None) -> bool:
    """Says whether a session is valid now and differs from `stored`: another process has saved it meanwhile."""
    with contextlib.suppress(InputError, OSError):
        return read_session(path) != stored
    return False


def _remove(folder: Path, folders: dict[str, Path], names: list[str]) -> list[dict[str, Any]]:
    """Removes sessions one by one and returns a row for each.

    Raises:
        InputError: a name is unknown; no session is removed then.
    """
    for name in names:
        if name not in folders:
            raise InputError(f"{folder} holds no session {name!r}, and nothing was removed{suggestion(name, folders)}")
    rows = []
    for name in names:
        try:
            with claim(folders[name], mark=ABOUT) as session_claim:
                if others := {file.name for file in folders[name].iterdir()} - {ABOUT, ARRAYS}:
                    raise InputError(f"{folders[name]} holds more than a session ({quoted(min(others))}): remove it by hand")
                session_claim.remove()
            rows.append(dict(name=name, removed=True))
        except OSError as error:
            rows.append(dict(name=name, not_removed=error.strerror))
        except InputError as error:
            rows.append(dict(name=name, not_removed=_why(error, folders[name])))
    return rows


def _why(error: InputError, path: Path) -> str:
    """Returns the fault in an error of the session at `path`."""
    return error.fault if isinstance(error, Damaged) else str(error).removeprefix(f"{path} ")


def _cells(row: dict[str, Any]) -> list[str]:
    """Returns the cells of a row: as many as `HEAD` has, or fewer, the last of which says what happened."""
    name = printable(row["name"])
    if "removed" in row:
        return [name, "removed"]
    if "not_removed" in row:
        return [name, printable(f"not removed: {row['not_removed']}")]
    size = f"{row['bytes'] / 2**20:.1f} MiB" if "bytes" in row else ""
    if "damaged" in row:
        return [name, size, printable(f"damaged: {row['damaged']}")]
    model = f"{row['model']}, {row['layers']} layers of {row['hidden_size']}"
    cache = row["cache"] if row["budget"] is None else f"{row['cache']}, budget {row['budget']}"
    counts = [str(row["tokens"]), str(row["messages"])]
    return [name, size, printable(model), printable(cache), *counts, _age(time.time() - row["saved"])]


def _age(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def _table(rows: list[list[str]]) -> str:
    """Returns the rows with aligned columns; the last cell of a row may be wider than its column."""
    widths = [max([len(row[i]) for row in rows if i < len(row) - 1], default=0) for i in range(len(HEAD))]
    return "".join("  ".join(map(str.ljust, row, widths)).rstrip() + "\n" for row in rows)
