"""Runs `icejax generate` within the test's process."""

from icejax.commands import generate as command

SHORT = ["--max-new-tokens", "4", "--compile-cache", "none"]


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    """Returns exit status, stdout and stderr of the command line."""
    try:
        status = command.main([*arguments])
    except SystemExit as end:
        status = end.code
    return status, *capsys.readouterr()
