"""Schemas of what `deploy/` uses: the fields of each kind, from the references of Kubernetes, KubeRay and LeaderWorkerSet.

A field that is not listed is refused, so a manifest with a misspelt one fails.
"""

from typing import Any

TEXT, FLAG, PLAIN = {"type": "string"}, {"type": "boolean"}, {"type": "integer", "minimum": 0}
NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}
QUANTITY = {"type": "string", "pattern": "^[0-9]+(m|Ki|Mi|Gi|Ti)?$"}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}


def fields(needed: dict[str, Any], **others: Any) -> dict[str, Any]:
    """Returns the schema of an object that has the fields `needed`, and may have others."""
    return {"type": "object", "properties": needed | others, "required": list(needed), "additionalProperties": False}


def items(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a list that is not empty."""
    return {"type": "array", "items": schema, "minItems": 1}


def each(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of an object whose names are anyone's."""
    return {"type": "object", "additionalProperties": schema}


SECRET = fields({"secretKeyRef": fields({"name": NAME, "key": TEXT})})
CONTAINER = fields(
    {"name": NAME, "image": TEXT},
    command=items(TEXT),
    args=items(TEXT),
    env=items(fields({"name": TEXT}, value=TEXT, valueFrom=SECRET)),
    ports=items(fields({"containerPort": PORT})),
    readinessProbe=fields({"httpGet": fields({"path": TEXT, "port": PORT})}, timeoutSeconds=PLAIN),
    resources=fields({"limits": each(QUANTITY)}),
    volumeMounts=items(fields({"name": NAME, "mountPath": TEXT}, readOnly=FLAG)),
)
CLAIM = fields({"name": NAME, "persistentVolumeClaim": fields({"claimName": NAME})})
IN_MEMORY = fields({"name": NAME, "emptyDir": fields({"medium": {"const": "Memory"}, "sizeLimit": QUANTITY})})
POD = fields(
    {"containers": items(CONTAINER)},
    restartPolicy={"enum": ["Always", "OnFailure", "Never"]},
    nodeSelector=each(TEXT),
    terminationGracePeriodSeconds=PLAIN,
    securityContext=fields({}, fsGroup=PLAIN),
    volumes=items({"oneOf": [CLAIM, IN_MEMORY]}),
)
TEMPLATE = fields({"spec": POD}, metadata=fields({}, labels=each(TEXT), annotations=each(TEXT)))
METADATA = fields({"name": NAME}, annotations=each(TEXT), labels=each(TEXT))
CLUSTER = fields(
    {"headGroupSpec": fields({"rayStartParams": each(TEXT), "template": TEMPLATE})},
    rayVersion=TEXT,
    workerGroupSpecs=items(
        fields(
            {"groupName": NAME, "rayStartParams": each(TEXT), "template": TEMPLATE},
            replicas=PLAIN,
            minReplicas=PLAIN,
            maxReplicas=PLAIN,
        )
    ),
)
SPECS = {
    ("batch/v1", "Job"): fields(
        {"template": TEMPLATE},
        completionMode={"enum": ["NonIndexed", "Indexed"]},
        completions=PLAIN,
        parallelism=PLAIN,
        backoffLimitPerIndex=PLAIN,
        podFailurePolicy=fields(
            {
                "rules": items(
                    fields(
                        {"action": {"enum": ["FailJob", "FailIndex", "Ignore", "Count"]}},
                        onPodConditions=items(fields({"type": TEXT})),
                    )
                )
            }
        ),
    ),
    ("ray.io/v1", "RayJob"): fields(
        {"entrypoint": TEXT, "rayClusterSpec": CLUSTER}, backoffLimit=PLAIN, shutdownAfterJobFinishes=FLAG
    ),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): fields(
        {
            "leaderWorkerTemplate": fields(
                {"workerTemplate": TEMPLATE},
                leaderTemplate=TEMPLATE,
                size={"type": "integer", "minimum": 1},
                restartPolicy={"enum": ["RecreateGroupOnPodRestart", "None"]},
            )
        },
        replicas=PLAIN,
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
    ),
    ("v1", "Service"): fields({"ports": items(fields({"port": PORT}))}, selector=each(TEXT)),
    ("ray.io/v1", "RayService"): fields({"serveConfigV2": TEXT, "rayClusterConfig": CLUSTER}),
}


def schema(manifest: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a manifest's kind."""
    version, kind = manifest["apiVersion"], manifest["kind"]
    return fields(
        {"apiVersion": {"const": version}, "kind": {"const": kind}, "metadata": METADATA, "spec": SPECS[version, kind]}
    )
