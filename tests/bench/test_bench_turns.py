"""`bench.turns` runs two checkouts in alternation: ratios of known figures, and no worktree or folder is left."""

import json
import subprocess
import textwrap

import pytest

from bench import turns

# Each run prints the next figure of its checkout's list; the journal records which checkout ran.
PROGRAM = """
    import json, pathlib, sys
    journal = pathlib.Path(sys.argv[1])
    before = journal.read_text().splitlines() if journal.exists() else []
    journal.write_text("\\n".join([*before, "SIDE"]) + "\\n")
    run = before.count("SIDE")
    print("a line that is no JSON")
    for context in CONTEXTS:
        print(json.dumps(dict(policy="full", context=context, device="cpu: cpu", peak_rss_bytes=len(before), kept_bytes=BYTES,
                              tpot_s=context * SECONDS[run], tokens_per_s=1 / SECONDS[run], ttft_s=None, scope_ms={})))
"""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository whose only commit takes 1 s per token of context at first; a test then changes the working tree."""
    folder = tmp_path / "repository"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "somebody")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "somebody@example.org")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    write(folder, "old", "[1.0, 1.0, 2.0]", contexts="(4, 8)", kept=100)
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "old"]):
        subprocess.run(["git", *command], check=True)
    return folder


def write(folder, side, seconds, contexts, kept):
    program = textwrap.dedent(PROGRAM).replace("SIDE", side).replace("SECONDS", seconds)
    (folder / "program.py").write_text(program.replace("CONTEXTS", contexts).replace("BYTES", str(kept)))


def nothing_left(repository):
    worktrees = subprocess.run(["git", "worktree", "list"], capture_output=True, text=True, check=True).stdout
    return len(worktrees.splitlines()) == 1 and not [*repository.parent.glob("turns-*")]


def test_ratios_are_of_runs_that_follow_each_other(repository, tmp_path, capsys):
    write(repository, "new", "[0.5, 1.5, 1.0]", contexts="(8, 4, 16)", kept=50)
    journal = tmp_path / "journal"
    assert turns.main(["HEAD", "--pairs", "3", "--", "python", "program.py", str(journal)]) == 0
    out, err = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    assert journal.read_text().split() == ["old", "new", "new", "old", "old", "new"]
    assert [row["row"] for row in rows] == [dict(policy="full", context=n, device="cpu: cpu") for n in (8, 4)]
    for row in rows:  # 0.5/1, 1.5/1 and 1/2
        assert (row["min"], row["low"], row["ratio"], row["high"], row["max"], row["pairs"]) == (0.5, 0.5, 0.5, 1.0, 1.5, 3)
        assert row["field"] == "tpot_s" and row["device"] == "cpu: cpu"
        assert (row["old"], row["new"]) == (row["row"]["context"], row["row"]["context"])
        assert row["versions"]["new"] == row["versions"]["old"] + "+" and row["versions"]["jax"]
    assert "1 rows are left out" in err and "context=8" in err and nothing_left(repository)


@pytest.mark.parametrize(
    "argv, message",
    [
        (["nothing", "--", "python", "program.py", "j"], "REV must name a commit of "),
        (["HEAD"], "a command must follow `--`"),
        (["HEAD", "--pairs", "0", "--", "true"], "--pairs must be at least 1, got 0"),
        (
            ["HEAD", "--", "python", "-c", "raise SystemExit('no such shape')"],
            "fails in the old checkout (status 1): no such shape",
        ),
        (["HEAD", "--", "python", "-c", "print(3)"], "must print JSON objects, a line each, got none in the old checkout"),
        (["HEAD", "--", "no-such-program"], "cannot be run: No such file or directory: no-such-program"),
        (["HEAD", "--pairs", "1", "--field", "tpot", "--", "python", "program.py", "j"], "must print a row with tpot"),
    ],
)
def test_what_cannot_be_compared_is_one_line_and_leaves_nothing(repository, capsys, argv, message):
    with pytest.raises(SystemExit) as end:
        turns.main(argv)
    err = capsys.readouterr().err
    assert end.value.code == 2 and len(err.splitlines()) == 1 and message in err and nothing_left(repository)


def test_outside_a_repository_git_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        turns.main(["HEAD", "--", "true"])
    err = capsys.readouterr().err
    assert end.value.code == 2 and len(err.splitlines()) == 1 and "not a git repository" in err
