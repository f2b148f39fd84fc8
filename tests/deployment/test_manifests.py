"""The example files are what Ray, KubeRay and the fabric take: each against its own schema, each shown to refuse a slip."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from kvfabric.actors.spec import FabricSpec

from .manifests import manifest, strictly

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CRDS = os.environ.get("KVFABRIC_KUBERAY_CRDS", "")
PLURAL = {"RayCluster": "rayclusters", "RayService": "rayservices"}
GPU_POD = ("spec", "workerGroupSpecs", 0)


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / "kuberay" / name).read_text(encoding="utf-8")))


def of_ray() -> list[dict[str, Any]]:
    found = [d for path in (EXAMPLES / "kuberay").iterdir() for d in documents(path.name)]
    return [d for d in found if d["apiVersion"] == "ray.io/v1"]


def refusals(schema: dict[str, Any], document: Any) -> list[str]:
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(document)]


def inside(document: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        document = document[step]
    return document


SLIPS: list[tuple[str, tuple[Any, ...], str, Any]] = [
    ("RayCluster", GPU_POD, "maxReplica", 8),
    ("RayCluster", GPU_POD, "minReplicas", "1"),
    ("RayCluster", ("spec", "authOptions"), "mode", "tokens"),
    ("RayService", ("spec",), "serveConfig", ""),
]
"""A wrong name, a wrong type, a wrong word."""


def refuses_slips(schema_of: Any) -> None:
    for document in of_ray():
        schema = schema_of(document["kind"])
        assert refusals(schema, document) == []
        for kind, path, field, value in SLIPS:
            if kind == document["kind"]:
                wrong = copy.deepcopy(document)
                inside(wrong, path)[field] = value
                assert refusals(schema, wrong), (kind, field)


def test_every_manifest_has_the_fields_that_kuberay_and_kubernetes_document() -> None:
    assert {d["kind"] for d in of_ray()} == set(PLURAL)
    refuses_slips(manifest)


@pytest.mark.skipif(not CRDS, reason="KVFABRIC_KUBERAY_CRDS: no folder with KubeRay's definitions is named")
def test_every_manifest_is_valid_against_kuberays_own_definitions() -> None:
    def schema_of(kind: str) -> Any:
        definition = yaml.safe_load(Path(CRDS, f"ray.io_{PLURAL[kind]}.yaml").read_text(encoding="utf-8"))
        version = next(v for v in definition["spec"]["versions"] if v["name"] == "v1")
        schema = strictly(version["schema"]["openAPIV3Schema"])
        schema["properties"]["metadata"] = {"type": "object"}  # Kubernetes' own
        return schema

    refuses_slips(schema_of)


def specs() -> list[Any]:
    """Every fabric's spec in the examples."""
    maps = [d for d in documents("cluster.yaml") if d["kind"] == "ConfigMap"]
    return [
        yaml.safe_load((EXAMPLES / "fabric.yaml").read_text()),
        *(yaml.safe_load(d["data"]["fabric.yaml"]) for d in maps),
    ]


def test_every_spec_in_the_examples_is_one_and_leaves_time_to_move_state_away() -> None:
    plain, on_kubernetes = map(FabricSpec.load, specs())
    cluster = next(d for d in of_ray() if d["kind"] == "RayCluster")
    (group,) = cluster["spec"]["workerGroupSpecs"]
    grace_s = group["template"]["spec"]["terminationGracePeriodSeconds"]
    assert on_kubernetes.notices.sigterm_s < grace_s
    assert plain.notices.sigterm_s < 30, "what `ray start --block` gives after SIGTERM"
    scale = on_kubernetes.scale
    assert scale.idle_s is not None
    assert cluster["spec"]["autoscalerOptions"]["idleTimeoutSeconds"] > scale.idle_s + scale.drain_s
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert on_kubernetes.memory_bytes < int(limits["memory"].removesuffix("Gi")) << 30
    offered = json.loads(json.loads(group["rayStartParams"]["resources"]))
    assert on_kubernetes.takes(offered)
    assert not on_kubernetes.takes({"CPU": 2.0}), "the head gets no holder"


def test_the_ray_up_file_is_valid_against_rays_own_schema_and_gives_workers_what_the_spec_asks_for() -> None:
    import ray.autoscaler

    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text(encoding="utf-8"))
    config = yaml.safe_load((EXAMPLES / "ray_up.yaml").read_text(encoding="utf-8"))
    assert [e.message for e in jsonschema.Draft7Validator(schema).iter_errors(config)] == []
    for slip in ({"max_worker": 8}, {"max_workers": "8"}, {"setup_commands": "pip install kvfabric"}):
        assert [e.message for e in jsonschema.Draft7Validator(schema).iter_errors(config | slip)]
    types = config["available_node_types"]
    assert config["head_node_type"] in types
    spec = FabricSpec.load(specs()[0])
    takers = {name for name, node in types.items() if spec.takes(node["resources"])}
    assert takers == {"gpu"}
    assert spec.scale.idle_s is not None
    assert config["idle_timeout_minutes"] * 60 > spec.scale.idle_s + spec.scale.drain_s


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")  # ray.serve.config
def test_the_service_deploys_what_the_example_builds() -> None:
    from ray.serve.schema import ServeDeploySchema

    (service,) = documents("service.yaml")
    config = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    (application,) = config.applications
    module, _, builder = application.import_path.partition(":")
    found = importlib.util.spec_from_file_location(module, EXAMPLES / f"{module}.py")
    assert found is not None
    assert found.loader is not None
    example = importlib.util.module_from_spec(found)
    found.loader.exec_module(example)
    settings = example.Settings(**application.args)
    assert settings.replicas == service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["minReplicas"]
    assert callable(getattr(example, builder))
