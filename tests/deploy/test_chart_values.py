"""Values of deploy/chart on their way to the services: every setting is read, parts know one another, nonsense is refused."""

from __future__ import annotations

import importlib.util
import json

import helm_python as helm
import pytest
import yaml
from charts import CHART, CONFIGS, ROOT, UP, Manifest, configs, containers, environment, manifests, pods, render, values_of


def test_the_services_read_every_setting(objects: list[Manifest]) -> None:
    seen = 0
    for container in containers(objects):
        args = container.get("args", [""])
        services = ["router_service", "expert_worker"] if args[:2] == UP else [args[0]]
        classes = [CONFIGS[service] for service in services if service in CONFIGS]
        if not classes:
            continue
        known = {cls.ENV + name.upper() for cls in classes for name in cls.__dataclass_fields__}
        assert set(environment(container, objects)) <= known, "a variable that nobody reads"
        seen += len(classes)
    assert seen >= 2
    assert len(list(configs(objects))) >= 2  # raises ConfigError for a value that the service would refuse


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
    values = values_of("eight-gpus")
    values["router"]["gpus"], values["expert"] = 1, {"mode": "sidecars", "shards": 7, "gpus": 1}
    objects = manifests(values)
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


def test_processes_share_a_container_and_see_every_gpu() -> None:
    """What the container is told makes a router and seven workers with the chart's settings, each with its part of experts."""
    objects = manifests(values_of("eight-gpus"))
    spec = dict(pods(objects))["demo-forefetch-router"]
    (container,) = spec["containers"]
    assert "initContainers" not in spec
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert [volume["mountPath"] for volume in container["volumeMounts"]].count("/dev/shm") == 1
    found = list(configs(objects))
    router = next(config for service, config in found if service == "router_service")
    workers = [config for service, config in found if service == "expert_worker"]
    assert (router.max_batch, router.kv_memory_mb, router.link, router.device) == (128, 49152, "p2p", "cuda:0")
    assert router.addresses()[0] == "local"
    assert router.kv
    assert router.health_listen
    assert [(worker.device, worker.shard, worker.shards) for worker in workers] == [(f"cuda:{n}", n, 8) for n in range(1, 8)]
    assert {worker.model for worker in workers} == {router.model}
    for change in ({"apart": True}, {"settings": {"slots": "50%"}}):
        found = list(configs(manifests({**values_of("eight-gpus"), "expert": {"mode": "processes", **change}})))
        workers = [config for service, config in found if service == "expert_worker"]
        assert [(worker.shard, worker.shards) for worker in workers] == [(n, 7) for n in range(7)], change


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
