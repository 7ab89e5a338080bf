"""deploy/chart: it renders, Kubernetes would take what comes out, and the services read every setting that they get."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python as helm
import kubernetes_validate
import pytest
import yaml
from charts import CHART, EXAMPLES, ROOT, Manifest, manifests, render, values_of

from expert_worker.config import ExpertConfig
from forefetch import settings
from forefetch.version import VERSION
from kv_service.config import KvConfig
from router_service.config import RouterConfig

VERSIONS = ("1.30", "1.36")
CONFIGS: dict[str, type[settings.ServiceConfig]] = {
    "router_service": RouterConfig,
    "expert_worker": ExpertConfig,
    "kv_service": KvConfig,
}
FOREIGN = ("monitoring.coreos.com/v1", "keda.sh/v1alpha1")  # no schema of Kubernetes' own


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


def pods(objects: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """(name, pod spec) of everything that makes pods."""
    for thing in objects:
        if thing["kind"] in ("Deployment", "StatefulSet"):
            yield thing["metadata"]["name"], thing["spec"]["template"]["spec"]
        elif thing["kind"] == "Pod":
            yield thing["metadata"]["name"], thing["spec"]


def containers(objects: list[Manifest]) -> Iterator[Manifest]:
    for _, spec in pods(objects):
        yield from (*spec.get("initContainers", ()), *spec["containers"])


def environment(container: Manifest, objects: list[Manifest]) -> dict[str, str]:
    """What the process would see: ConfigMaps first, then the container's own; "3" for what Kubernetes fills in."""
    seen: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        name = source["configMapRef"]["name"]
        seen.update(next(t["data"] for t in objects if t["kind"] == "ConfigMap" and t["metadata"]["name"] == name))
    for entry in container.get("env", ()):
        seen[entry["name"]] = entry.get("value", "0")
    return seen


def configs(objects: list[Manifest]) -> Iterator[tuple[str, Any]]:
    """(service, its config as read from what the chart passes) of every container of a service."""
    for container in containers(objects):
        service = container.get("args", [""])[0]
        if service in CONFIGS:
            yield service, settings.build(CONFIGS[service], {}, environment(container, objects))


def test_the_services_read_every_setting(objects: list[Manifest]) -> None:
    seen = 0
    for container in containers(objects):
        cls = CONFIGS.get(container.get("args", [""])[0])
        if cls is None:
            continue
        variables = environment(container, objects)
        known = {cls.ENV + name.upper() for name in cls.__dataclass_fields__}
        assert set(variables) <= known, "a variable that nobody reads"
        settings.build(cls, {}, variables)  # raises ConfigError for a value that the service would refuse
        seen += 1
    assert seen >= 2


def test_values_arrive_as_they_were_written() -> None:
    values = {"router": {"settings": {"kv_memory_mb": 1_000_000, "worker_grace_s": 0.5, "reflection": True, "slots": "25%"}}}
    config = dict(configs(manifests(values)))["router_service"]
    assert config.kv_memory_mb == 1_000_000, "and not 1e+06"
    assert (config.worker_grace_s, config.reflection, config.slots) == (0.5, True, "25%")


def test_the_router_knows_its_workers_and_the_workers_their_shards() -> None:
    objects = manifests(values_of("three-nodes"))
    router = dict(configs(objects))["router_service"]
    sets = [thing for thing in objects if thing["kind"] == "StatefulSet" and "expert" in thing["metadata"]["name"]]
    names = [f"{s['metadata']['name']}-{i}.{s['spec']['serviceName']}" for s in sets for i in range(s["spec"]["replicas"])]
    assert list(router.addresses()) == [f"{name}.llm.svc.cluster.local:50051" for name in names]
    assert len(names) == 8
    services = {thing["metadata"]["name"]: thing["spec"] for thing in objects if thing["kind"] == "Service"}
    for thing in sets:
        assert services[thing["spec"]["serviceName"]]["clusterIP"] == "None"
        shard = thing["spec"]["template"]["spec"]["containers"][0]["env"][0]
        assert shard["name"] == "FOREFETCH_EXPERT_SHARD"
        assert shard["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['apps.kubernetes.io/pod-index']"
        assert thing["spec"]["updateStrategy"]["type"] == "OnDelete", "both replicas of a shard would roll at a time"


def test_sidecars_share_memory_with_the_router_and_outlive_it() -> None:
    objects = manifests(values_of("eight-gpus"))
    spec = dict(pods(objects))["demo-forefetch-router"]
    router, sidecars = spec["containers"][0], spec["initContainers"]
    workers = [config for service, config in configs(objects) if service == "expert_worker"]
    assert [config.listen for config in workers] == list(dict(configs(objects))["router_service"].addresses())
    assert [config.shard for config in workers] == list(range(7))
    assert {config.shards for config in workers} == {7}
    shm = {"name": "shm", "mountPath": "/dev/shm"}
    assert all(shm in container["volumeMounts"] for container in (router, *sidecars))
    assert all(container["restartPolicy"] == "Always" for container in sidecars), "ended after the router, not with it"
    ports = [port["containerPort"] for container in (router, *sidecars) for port in container["ports"]]
    assert len(set(ports)) == len(ports)
    assert sum(container["resources"]["limits"]["nvidia.com/gpu"] for container in (router, *sidecars)) == 8


def test_callers_need_a_token_where_there_is_a_secret() -> None:
    objects = manifests(values_of("three-nodes"))
    config = next(config for service, config in configs(objects) if service == "router_service")
    assert config.auth_tokens == "/etc/forefetch/auth/tokens"
    assert not config.allow_anonymous
    found = dict(pods(objects))
    for name, key in (("demo-forefetch-router", "tokens"), ("demo-forefetch-test", "test-token")):
        secret = next(volume["secret"] for volume in found[name]["volumes"] if volume["name"] == "auth")
        assert [item["path"] for item in secret["items"]] == [key], "and nothing else of the Secret"
    assert dict(configs(manifests({})))["router_service"].allow_anonymous


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


def test_routers_that_place_workers_may_ask_for_just_that() -> None:
    objects = manifests(values_of("planned"))
    read = configs(objects)
    router = next(config for service, config in read if service == "router_service")
    assert router.service == ("llm", "demo-forefetch-expert")
    rules = {
        (group, resource): set(rule["verbs"])
        for thing in objects
        if thing["kind"] == "Role"
        for rule in thing["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert set(rules) == {("discovery.k8s.io", "endpointslices"), ("coordination.k8s.io", "leases")}
    names = next(thing for thing in objects if thing["kind"] == "Role")["rules"][-1]["resourceNames"]
    assert names == [f"{router.service[1]}-planner"], "the Lease that routers write"
    worker = next(config for service, config in configs(objects) if service == "expert_worker")
    assert worker.placed
    assert not any(thing["kind"] == "Role" for thing in manifests({})), "nothing is granted where nothing is asked"


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
            assert spec["terminationGracePeriodSeconds"] > int(sleep) + drain[container["args"][0]] + last_resort


@pytest.mark.parametrize(
    "values",
    [
        {"rotuer": {}},
        {"router": {"replica": 2}},
        {"router": {"settings": {"max_bacth": 2}}},
        {"router": {"settings": {"max_batch": "many"}}},
        {"router": {"settings": {"link": "carrier-pigeon"}}},
        {"router": {"settings": {"listen": "0.0.0.0:1"}}},
        {"expert": {"settings": {"shard": 1}}},
        {"expert": {"mode": "pod"}},
        {"kv": {"settings": {"budget_gb": 2}}},
        {"telemetry": {"traceRatio": 2}},
        {"model": {"path": "/etc"}},
        {"image": {"digest": "latest"}},
    ],
)
def test_unknown_and_wrong_values_are_refused(values: Manifest) -> None:
    with pytest.raises(helm.HelmError):
        helm.Chart.load(CHART).validate_schema(values)
    with pytest.raises(helm.HelmError):
        render(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tls": {"allowPlaintext": False}}, "existingSecret"),
        ({"model": {"persistentVolumeClaim": "a", "init": {"image": "b"}}}, "not both"),
    ],
)
def test_values_that_cannot_work_together_are_refused(values: Manifest, message: str) -> None:
    with pytest.raises(helm.HelmError, match=message):
        render(values)


def test_an_init_container_can_bring_the_model() -> None:
    objects = manifests({"model": {"init": {"image": "fetch:1", "args": ["x"]}}})
    for name in ("demo-forefetch-router", "demo-forefetch-expert-0"):
        spec = dict(pods(objects))[name]
        mounts = {mount["mountPath"]: mount for mount in spec["initContainers"][0]["volumeMounts"]}
        assert not mounts["/models"].get("readOnly")
        assert "emptyDir" in next(volume for volume in spec["volumes"] if volume["name"] == "model")


def test_settings_in_the_schema_are_those_of_the_services() -> None:
    """`python scripts/generate_chart_schema.py` after a change of settings."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "scripts" / "generate_chart_schema.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert (CHART / "values.schema.json").read_text() == generate.text()


def test_every_value_is_in_the_schema_and_commented_briefly() -> None:
    text = (CHART / "values.yaml").read_text()
    assert len(text.splitlines()) < 150
    schema = json.loads((CHART / "values.schema.json").read_text())

    def walk(values: Manifest, properties: Manifest, at: str) -> None:
        for name, value in values.items():
            assert name in properties, f"{at}{name}"
            if isinstance(value, dict) and "properties" in properties[name]:
                walk(value, properties[name]["properties"], f"{at}{name}.")

    walk(yaml.safe_load(text), schema["properties"], "")


def test_notes_tell_a_call_that_the_command_takes(example: str) -> None:
    import shlex

    from forefetch import cli

    notes = next(text for path, text in render(values_of(example)).items() if path.endswith("NOTES.txt"))
    calls = [shlex.split(line)[1:] for line in notes.splitlines() if line.startswith("  forefetch ")]
    assert {call[0] for call in calls} == {"generate", "stats"}
    for call in calls:
        cli.parser().parse_args(call)
    assert ("tls-ca" in notes) == ("token-file" in notes) == (example == "three-nodes")


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


CHECKOV = Path(sys.prefix) / "checkov" / "bin" / "checkov"


@pytest.mark.skipif(not CHECKOV.exists(), reason="`make install` puts checkov, whose pins would fight ours, into .venv/checkov")
def test_checkov_finds_nothing_that_is_not_justified(tmp_path: Path) -> None:
    for name in EXAMPLES:
        texts = [text for path, text in render(values_of(name)).items() if not path.endswith("NOTES.txt")]
        (tmp_path / f"{name}.yaml").write_text("\n---\n".join(texts))
    command = [CHECKOV, "--config-file", CHART / "checkov.yaml", "--directory", tmp_path, "--output", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    report = json.loads(done.stdout)
    assert report["summary"]["passed"] > 100, "it looked at something"
    failed = [f"{check['check_id']} {check['resource']}" for check in report["results"]["failed_checks"]]
    assert failed == []
