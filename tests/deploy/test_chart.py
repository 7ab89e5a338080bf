"""deploy/chart: it renders, and Kubernetes would take what comes out: names, probes, locks, time to load and to drain."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import helm_python as helm
import kubernetes_validate
import pytest
import yaml
from charts import (
    CHART,
    CONFIGS,
    EXAMPLES,
    Manifest,
    configs,
    containers,
    environment,
    manifests,
    pods,
    render,
    service_of,
    values_of,
)

from forefetch.version import VERSION

VERSIONS = ("1.30", "1.36")
FOREIGN = ("monitoring.coreos.com/v1", "keda.sh/v1alpha1")  # no schema of Kubernetes' own
CHECKOV = Path(sys.prefix) / "checkov" / "bin" / "checkov"


def test_it_lints_strictly(example: str) -> None:
    report = helm.lint(CHART, values_of(example), strict=True)
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_every_object(objects: list[Manifest], version: str) -> None:
    checked = [thing for thing in objects if thing["apiVersion"] not in FOREIGN]
    assert len(checked) > 5
    for thing in checked:
        kubernetes_validate.validate(thing, version, strict=True)


def test_the_validation_bites() -> None:
    thing = next(thing for thing in manifests({}) if thing["kind"] == "Deployment")
    thing["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(thing, VERSIONS[0], strict=True)


def test_blocks_outlive_a_pod_where_there_is_a_volume() -> None:
    objects = manifests({"kv": {"storage": {"sizeGiB": 100, "storageClass": "fast"}}})
    config = dict(configs(objects))["kv_service"]
    spec = dict(pods(objects))["demo-forefetch-kv"]
    data = next(mount for mount in spec["containers"][0]["volumeMounts"] if mount["name"] == "data")
    assert config.dir.startswith(data["mountPath"])
    assert config.disk_gb * 1.25 < 100, "the file may take a quarter more"
    claim = next(
        thing["spec"] for thing in objects if thing["kind"] == "StatefulSet" and thing["metadata"]["name"].endswith("-kv")
    )
    assert claim["volumeClaimTemplates"][0]["spec"]["storageClassName"] == "fast"
    memory = dict(configs(manifests(values_of("cpu-trial"))))["kv_service"]
    assert memory.dir == ""


def test_every_name_that_is_referred_to_exists(objects: list[Manifest]) -> None:
    names = {(thing["kind"], thing["metadata"]["name"]) for thing in objects}
    assert len(names) == len(objects)
    for container in containers(objects):
        for source in container.get("envFrom", ()):
            assert ("ConfigMap", source["configMapRef"]["name"]) in names
    claims = {
        thing["metadata"]["name"]: {claim["metadata"]["name"] for claim in thing["spec"].get("volumeClaimTemplates", ())}
        for thing in objects
        if thing["kind"] == "StatefulSet"
    }
    for name, spec in pods(objects):
        volumes = {volume["name"] for volume in spec["volumes"]} | claims.get(name, set())
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    labels = [thing["spec"]["template"]["metadata"]["labels"] for thing in objects if "template" in thing.get("spec", {})]
    for thing in objects:
        if thing["kind"] in ("Service", "PodDisruptionBudget", "NetworkPolicy"):
            spec = thing["spec"]
            selector = spec.get("podSelector", spec.get("selector", {}))
            wanted = selector.get("matchLabels", selector)
            assert any(wanted.items() <= pod.items() for pod in labels), f"{thing['metadata']['name']} selects nothing"


def test_pods_are_locked_down(objects: list[Manifest]) -> None:
    asks = {thing["kind"] for thing in objects} & {"Role"}
    for name, spec in pods(objects):
        assert spec["automountServiceAccountToken"] is bool(asks and name.endswith("-router")), name
        assert spec["securityContext"]["runAsNonRoot"] is True
    for container in containers(objects):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_probes_ask_names_that_are_served_on_the_port_that_serves_them(objects: list[Manifest]) -> None:
    served = {"startup", "liveness", "readiness"}
    for container in containers(objects):
        if container.get("args", [""])[0] in CONFIGS:
            variables = environment(container, objects)
            listen = next(value for name, value in variables.items() if name.endswith("HEALTH_LISTEN"))
            probes = {kind: probe["grpc"] for kind, probe in container.items() if kind.endswith("Probe")}
            assert {"livenessProbe", "readinessProbe"} <= set(probes)
            for kind, probe in probes.items():
                assert probe["service"] == kind.removesuffix("Probe")
                assert probe["service"] in served
                assert listen == f"0.0.0.0:{probe['port']}"


def test_a_larger_model_gets_more_time_to_load() -> None:
    def patience(size: int) -> int:
        probe = dict(pods(manifests({"model": {"sizeGiB": size}})))["demo-forefetch-router"]["containers"][0]["startupProbe"]
        return int(probe["failureThreshold"] * probe["periodSeconds"])

    assert patience(64) >= 64 * 1024 / 200 + 60
    assert patience(640) >= 640 * 1024 / 200 + 60


def test_there_is_time_to_drain(objects: list[Manifest]) -> None:
    drain = {service: config.drain_s for service, config in configs(objects)}
    for name, spec in pods(objects):
        if not name.endswith("-test"):
            container = spec["containers"][0]
            sleep = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])[1]
            last_resort = 10
            assert spec["terminationGracePeriodSeconds"] > int(sleep) + drain[service_of(container)] + last_resort


def test_an_init_container_can_bring_the_model() -> None:
    objects = manifests({"model": {"init": {"image": "fetch:1", "args": ["x"]}}})
    for name in ("demo-forefetch-router", "demo-forefetch-expert-0"):
        spec = dict(pods(objects))[name]
        mounts = {mount["mountPath"]: mount for mount in spec["initContainers"][0]["volumeMounts"]}
        assert not mounts["/models"].get("readOnly")
        assert "emptyDir" in next(volume for volume in spec["volumes"] if volume["name"] == "model")


def test_notes_tell_a_call_that_the_command_takes(example: str) -> None:
    import shlex

    from forefetch import cli

    notes = next(text for path, text in render(values_of(example)).items() if path.endswith("NOTES.txt"))
    calls = [shlex.split(line)[1:] for line in notes.splitlines() if line.startswith("  forefetch ")]
    assert {call[0] for call in calls} == {"generate", "stats"}
    for call in calls:
        cli.parser().parse_args(call)
    assert ("tls-ca" in notes) == ("token-file" in notes) == (example == "three-nodes")


def test_notes_name_objects_that_exist(example: str, objects: list[Manifest]) -> None:
    notes = next(text for path, text in render(values_of(example)).items() if path.endswith("NOTES.txt"))
    named = re.findall(r"(deployment|service|statefulset)/([\w-]+)", notes)
    assert len(named) >= 2
    made = {(thing["kind"].lower(), thing["metadata"]["name"]) for thing in objects}
    assert set(named) <= made
    assert ("scale" in notes) == (example == "planned")


def test_helm_test_calls_what_the_command_takes(objects: list[Manifest]) -> None:
    from forefetch import cli

    spec = dict(pods(objects))["demo-forefetch-test"]
    for container in (*spec["initContainers"], *spec["containers"]):
        module, *arguments = container["args"]
        assert module == "forefetch.cli"
        parsed = cli.parser().parse_args(arguments)
        assert parsed.address == "demo-forefetch-router:50051"
    assert parsed.max_tokens == 1


def test_versions_agree() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == VERSION


@pytest.mark.skipif(not CHECKOV.exists(), reason="`make install` puts checkov, whose pins would fight ours, into .venv/checkov")
def test_checkov_finds_nothing_that_is_not_justified(tmp_path: Path) -> None:
    for name in EXAMPLES:
        texts = [text for path, text in render(values_of(name)).items() if not path.endswith("NOTES.txt")]
        (tmp_path / f"{name}.yaml").write_text("\n---\n".join(texts))
    command = [CHECKOV, "--config-file", CHART / "checkov.yaml", "--directory", tmp_path, "--output", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290, check=False)
    report = json.loads(done.stdout)
    assert report["summary"]["passed"] > 100, "it looked at something"
    failed = [f"{check['check_id']} {check['resource']}" for check in report["results"]["failed_checks"]]
    assert failed == []
