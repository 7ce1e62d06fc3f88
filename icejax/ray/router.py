"""Which replica answers a request: the one that has the cache of its document. `icejax.ray.serving` names it to Ray Serve.

Rendezvous hashing: every router ranks the replicas alike without asking any. When one comes or goes, only its documents move.
"""

from __future__ import annotations

import hashlib
import json

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

HEAD = 4096  # characters of a prompt that name its document
FIELDS = ("system", "instructions", "prompt", "messages", "input")  # of the bodies of all routes, in the order of the prompt


def document_of(body: bytes) -> str:
    """Returns a name of the document that a request is about: a hash of the first part of its prompt; empty without one."""
    try:
        fields = json.loads(body)
        parts = [fields[name] for name in FIELDS if fields.get(name)]
    except (ValueError, AttributeError, RecursionError):  # the replica says what is wrong
        return ""
    return hashlib.sha256(json.dumps(parts)[:HEAD].encode()).hexdigest() if parts else ""


def ranked(document: str, replicas: list[str]) -> list[str]:
    """Returns the names of replicas, the one of the document first, then the ones that take its place, in this order."""
    return sorted(replicas, key=lambda replica: hashlib.sha256(f"{document} {replica}".encode()).digest())


class DocumentRouter(RequestRouter):
    """Sends a request to the replica of its document, which is its first argument, or to the next one if that has no room."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns the replicas in ranks; a rank is asked only if those before it take no more requests."""
        document = ""
        if pending_request is not None:
            document = pending_request.args[0]
            pending_request.routing_context.should_backoff = True  # else full replicas would be asked without a pause
        if not document:
            return [candidate_replicas]
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        return [[by_name[name]] for name in ranked(document, list(by_name))]
