"""The memory of a session's cache, which ``/stats`` of `icejax chat` shows."""

from __future__ import annotations

from icejax.engine.usage import Usage, usage
from icejax.session.session import Session


def session_usage(session: Session) -> Usage | None:
    """Returns the bytes that a session's cache reserves and uses; None before the first text, and after an interrupted one."""
    if session._run is None or session._run.interrupted:
        return None
    return usage(session._plan, session._run)
