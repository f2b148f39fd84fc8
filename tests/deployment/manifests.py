"""What a manifest of KubeRay's may hold, as far as the examples use it: names and types of its fields, nothing else allowed.

KubeRay's API reference (https://ray-project.github.io/kuberay/reference/api/) names the Ray fields, Kubernetes' (v1 Pod) the
rest. The custom resource definitions themselves are a megabyte each and not kept here; ``KVFABRIC_KUBERAY_CRDS`` names a
folder with them (``ray-operator/config/crd/bases`` of https://github.com/ray-project/kuberay).
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
QUANTITY: Schema = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|Ki|Mi|Gi|Ti)?$"}


def closed(required: str = "", **fields: Schema) -> Schema:
    """An object of these fields and no others."""
    return {"type": "object", "properties": fields, "required": required.split(), "additionalProperties": False}


def several(of: Schema) -> Schema:
    return {"type": "array", "items": of, "minItems": 1}


QUANTITIES: Schema = {"type": "object", "additionalProperties": QUANTITY}
CONTAINER = closed(
    "name image resources",
    name=TEXT,
    image=TEXT,
    env=several(closed("name value", name=TEXT, value=TEXT)),
    ports=several(closed("containerPort", containerPort=COUNT, name={"type": "string", "maxLength": 15})),
    resources=closed("limits requests", limits=QUANTITIES, requests=QUANTITIES),
    volumeMounts=several(closed("name mountPath", name=TEXT, mountPath=TEXT)),
)
VOLUME = closed(
    "name",
    name=TEXT,
    configMap=closed("name", name=TEXT),
    emptyDir=closed(medium={"enum": ["", "Memory"]}, sizeLimit=QUANTITY),
)
POD = closed("containers", containers=several(CONTAINER), volumes=several(VOLUME), terminationGracePeriodSeconds=COUNT)
TEMPLATE = closed("spec", metadata={"type": "object"}, spec=POD)
CLUSTER_SPEC = closed(
    "headGroupSpec",
    rayVersion={"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
    enableInTreeAutoscaling=FLAG,
    autoscalerOptions=closed(version={"enum": ["v1", "v2"]}, idleTimeoutSeconds=COUNT),
    authOptions=closed(mode={"enum": ["disabled", "token"]}),
    headGroupSpec=closed("template", rayStartParams=TEXTS, template=TEMPLATE),
    workerGroupSpecs=several(
        closed(
            "groupName maxReplicas minReplicas template",
            groupName=TEXT,
            replicas=COUNT,
            minReplicas=COUNT,
            maxReplicas=COUNT,
            rayStartParams=TEXTS,
            template=TEMPLATE,
        )
    ),
)
SPECS = {
    "RayCluster": CLUSTER_SPEC,
    "RayService": closed("serveConfigV2 rayClusterConfig", serveConfigV2=TEXT, rayClusterConfig=CLUSTER_SPEC),
}


def manifest(kind: str) -> Schema:
    """A manifest of ``kind`` as a whole."""
    return closed(
        "apiVersion kind metadata spec",
        apiVersion={"const": "ray.io/v1"},
        kind={"const": kind},
        metadata=closed("name", name=TEXT),
        spec=SPECS[kind],
    )


def strictly(schema: Any) -> Any:
    """A definition's schema as ``kubectl --validate=strict`` takes it: a field that it does not name is an error."""
    if isinstance(schema, list):
        return [strictly(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {name: strictly(part) for name, part in schema.items()}
    is_object = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if is_object and not schema.get("x-kubernetes-preserve-unknown-fields"):
        strict.setdefault("additionalProperties", False)
    return strict
