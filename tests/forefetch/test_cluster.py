"""The cluster's process handling, with stand-ins for the services that load in milliseconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import PATIENCE_S, until

from forefetch.cluster import MALLOC, Cluster, ClusterConfig, Extra
from forefetch.errors import ConfigError, Unavailable
from forefetch.process import Process
from forefetch.shapes import synthetic_config

# Prints the ready line and waits. Flags bend it: --fake=deaf ignores SIGTERM, --fake=mute never gets ready, --fake=broken ends.
STAND_IN = """
    import json, os, signal, socket, sys, time
    flags = dict(arg.partition("=")[::2] for arg in sys.argv[1:])
    host, _, port = flags["--listen"].rpartition(":")
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((host, int(port)))
    server.listen()
    fake = flags.get("--fake", "")
    print("loading", sys.argv[0].rsplit("/", 2)[-2], *sys.argv[1:], file=sys.stderr, flush=True)
    if fake == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if fake == "broken":
        print("fake: error: --model: it is broken", file=sys.stderr)
        sys.exit(2)
    if fake == "mute":
        time.sleep(600)
    print("not json")
    print(json.dumps({"event": "loading", "what": "experts", "done": 3, "total": 4}))
    print(json.dumps({"event": "ready", "address": f"{host}:{server.getsockname()[1]}", "metrics": ""}), flush=True)
    time.sleep(600)
"""


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder that shadows the three services with `STAND_IN`, plus a checkpoint's config.json."""
    for name in ("router_service", "expert_worker", "kv_service"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__main__.py").write_text(textwrap.dedent(STAND_IN))
    (tmp_path / "config.json").write_text(json.dumps(synthetic_config("synthetic:olmoe-1b-7b")))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


@pytest.fixture
def config(stand_ins: Path) -> ClusterConfig:
    return ClusterConfig(model=str(stand_ins), port=0, start_s=PATIENCE_S)


def loading_line(process: Process) -> str:
    """The stub's report of its flags; standard error is read on a thread, so it may come a moment after the ready line."""
    until(lambda: any(line.startswith("loading") for line in list(process.tail)))
    return next(line for line in list(process.tail) if line.startswith("loading"))


def gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_starts_everything_and_stops_it(config: ClusterConfig) -> None:
    seen: list[tuple[str, int, int]] = []
    with Cluster.start(config, on_loading=lambda *step: seen.append(step)) as cluster:
        assert set(cluster.processes) == {"worker-0", "worker-1", "kv", "router"}
        assert [step[1:] for step in seen if step[0] == "worker-1"] == [(0, 0), (3, 4), (1, 1)]
        assert seen[-1] == ("router", 1, 1)
        assert cluster.address == cluster.processes["router"].address
        line = loading_line(cluster.processes["router"])
        assert f"--workers={cluster.processes['worker-0'].address},{cluster.processes['worker-1'].address}" in line
        assert f"--kv={cluster.processes['kv'].address}" in line
        assert "--shard=1 --shards=2" in loading_line(cluster.processes["worker-1"])
        pids = [process.pid for process in cluster.processes.values()]
        assert all(os.getpgid(pid) == pid for pid in pids), "a terminal's Ctrl-C must not reach the services"
    assert all(gone(pid) for pid in pids)


def test_link_local_is_a_router_alone(config: ClusterConfig) -> None:
    alone = ClusterConfig(model=config.model, port=0, link="local", kv=False, slots="50%", miss="in-place", metrics_port=9)
    with Cluster.start(alone) as cluster:
        assert list(cluster.processes) == ["router"]
        line = loading_line(cluster.processes["router"])
        assert "--workers=local" in line
        assert "--slots=50% --miss=in-place" in line
        assert "--metrics-listen=127.0.0.1:9" in line


def test_a_folder_for_the_kv_service(config: ClusterConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Cluster.start(replace(config, kv_dir="kept")) as cluster:
        assert f"--dir={tmp_path / 'kept'}" in loading_line(cluster.processes["kv"])


def test_children_get_allocator_and_thread_settings_but_the_users_win(
    config: ClusterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_TOP_PAD_", "4096")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with Cluster.start(config) as cluster:
        environment = Path(f"/proc/{cluster.processes['worker-0'].pid}/environ").read_text()
        cores = len(os.sched_getaffinity(0))
        assert f"MALLOC_MMAP_THRESHOLD_={MALLOC['MALLOC_MMAP_THRESHOLD_']}\0" in environment
        assert "MALLOC_TOP_PAD_=4096\0" in environment
        assert f"OMP_NUM_THREADS={max(1, cores // 2)}\0" in environment
        assert "OMP_WAIT_POLICY=PASSIVE\0" in environment


def test_a_service_that_cannot_start_is_named_with_its_last_words(config: ClusterConfig) -> None:
    with pytest.raises(Unavailable, match=r"^worker-[01] ended with status 2: --model: it is broken$"):
        Cluster.start(config, extra=Extra(worker=["--fake=broken"]))


def test_one_that_ends_is_told_of_while_others_load(config: ClusterConfig) -> None:
    with pytest.raises(Unavailable, match=r"^kv ended with status 2: --model: it is broken$"):
        Cluster.start(config, extra=Extra(worker=["--fake=mute"], kv=["--fake=broken"]))


def test_a_service_that_is_never_ready_is_given_up(config: ClusterConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is over when the workers are ready and it has said that it loads."""
    made: list[Process] = []

    class Noted(Process):
        def __init__(self, *args: Any, **how: Any) -> None:
            super().__init__(*args, **how)
            made.append(self)

    def over() -> bool:
        return [process.name for process in made if not process.ready] == ["kv"] and bool(made[-1].tail)

    clock = SimpleNamespace(sleep=time.sleep, monotonic=lambda: 1000.0 * over())
    monkeypatch.setattr("forefetch.cluster.Process", Noted)
    monkeypatch.setattr("forefetch.cluster.time", clock)
    with pytest.raises(Unavailable, match=r"kv was not ready within .* s: loading kv_service"):
        Cluster.start(config, extra=Extra(kv=["--fake=mute"]))


def test_a_taken_port_is_a_clear_error(config: ClusterConfig) -> None:
    with Cluster.start(config) as cluster:
        port = int(cluster.address.rpartition(":")[2])
        for taken, flag in (({"port": port}, "--port"), ({"listen": cluster.address}, "--listen")):
            with pytest.raises(ConfigError, match=rf"^{flag}: 127.0.0.1:{port} is in use$"):
                Cluster.start(replace(config, kv=False, **taken))


def test_kill_and_restart_keep_the_address(config: ClusterConfig) -> None:
    with Cluster.start(config) as cluster:
        worker = cluster.processes["worker-1"]
        address, pid = worker.address, worker.pid
        cluster.kill("worker-1")
        assert not worker.running
        assert worker.ending().startswith("was ended by SIGKILL")
        cluster.restart("worker-1")
        assert worker.ready
        assert worker.address == address
        assert worker.pid != pid


def test_the_watch_restarts_workers_and_kv_with_growing_delays(config: ClusterConfig) -> None:
    with Cluster.start(config) as cluster:
        lines: list[str] = []
        cluster.kill("kv")
        lines += cluster.check()
        assert lines == [lines[0]]
        assert lines[0].startswith("kv was ended by SIGKILL")
        assert lines[0].endswith("starting it again in 0.5 s")
        assert list(cluster.check()) == [], "said once"

        def back() -> bool:
            lines.extend(cluster.check())
            return "kv is back" in lines

        until(back)
        cluster.kill("kv")
        assert next(cluster.check()).endswith("starting it again in 1 s")


def test_a_dead_router_ends_the_watch(config: ClusterConfig) -> None:
    with Cluster.start(config) as cluster:
        cluster.kill("router")
        with pytest.raises(Unavailable, match="the router was ended by SIGKILL"):
            cluster.watch(print)


def test_a_deaf_service_is_killed_in_the_end(config: ClusterConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forefetch.cluster.STOP_S", 0.2)
    cluster = Cluster.start(config, extra=Extra(worker=["--fake=deaf"], router=["--fake=deaf"]))
    pids = [process.pid for process in cluster.processes.values()]
    cluster.stop(grace_s=0.2)
    assert all(gone(pid) for pid in pids)
    cluster.stop()


PARENT = """
import os, sys, time
from forefetch.cluster import Cluster, ClusterConfig
cluster = Cluster.start(ClusterConfig(model=sys.argv[1], port=0))
print(*[process.pid for process in cluster.processes.values()], flush=True)
time.sleep(600)
"""


@pytest.fixture
def parent(stand_ins: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PARENT, str(stand_ins)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_children_die_with_a_parent_that_was_killed(parent: subprocess.Popen[str]) -> None:
    assert parent.stdout
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 4
    assert not any(gone(pid) for pid in pids)
    parent.send_signal(signal.SIGKILL)
    until(lambda: all(gone(pid) for pid in pids))


def test_restarts_from_a_thread_that_ends_survive_it(config: ClusterConfig) -> None:
    """PR_SET_PDEATHSIG would kill such a child as soon as the thread ends."""
    import threading

    with Cluster.start(config) as cluster:
        thread = threading.Thread(target=cluster.restart, args=("kv",))
        thread.start()
        thread.join()
        time.sleep(0.3)
        assert cluster.processes["kv"].running


def test_process_reports_lines_as_they_come(stand_ins: Path) -> None:
    lines: list[tuple[str, str]] = []
    environment = dict(os.environ)
    process = Process("x", "kv_service", ["--a=b"], environment, on_line=lambda name, line: lines.append((name, line)))
    process.spawn()
    process.wait_ready(240)
    process.end(20.0)
    assert lines[0] == ("x", "loading kv_service --a=b --listen=127.0.0.1:0")
    assert not process.running


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": ""}, "--model: name the folder"),
        ({"model": "/nowhere"}, "holds no config.json"),
        ({"workers": 0}, "--workers: at least 1"),
        ({"workers": 65}, "--workers: at most 64, got 65"),
        ({"workers": 64, "spread": True}, "--workers: at most 63, got 64"),
        ({"model": "synthetic:olmoe-1b-7b,experts=8", "workers": 9}, "--workers: at most 8, got 9"),
        ({"port": 70000}, "--port: must be within 0 and 65535"),
        ({"link": "carrier-pigeon"}, "--link: must be one of auto, local, shm, grpc"),
    ],
)
def test_bad_settings_are_named(change: dict[str, object], message: str, stand_ins: Path) -> None:
    values: dict[str, object] = {"model": str(stand_ins), **change}
    with pytest.raises(ConfigError, match=message):
        Cluster.start(ClusterConfig(**values))  # type: ignore[arg-type]


def test_gpus_by_number_make_workers_on_their_own(config: ClusterConfig) -> None:
    """And every GPU holds a part of the experts, the router's the first."""
    with Cluster.start(ClusterConfig(model=config.model, port=0, kv=False, gpus="2,0,5")) as cluster:
        assert list(cluster.processes) == ["worker-0", "worker-1", "router"]
        for place, worker in enumerate(cluster.worker_names, 1):
            assert f"--device=cuda:{place}" in loading_line(cluster.processes[worker])
            assert f"--shard={place} --shards=3" in loading_line(cluster.processes[worker])
        line = loading_line(cluster.processes["router"])
        assert "--device=cuda:0" in line
        assert "--link=p2p" in line
        assert f"--workers=local,{cluster.processes['worker-0'].address},{cluster.processes['worker-1'].address}" in line
        assert "--slots=100%" in line
    assert cluster.config.visible(None) == {"CUDA_VISIBLE_DEVICES": "2,0,5"}
    assert cluster.config.visible("GPU-a,GPU-b,3,4,5,6") == {"CUDA_VISIBLE_DEVICES": "3,GPU-a,6"}
    with pytest.raises(ConfigError, match="2 are visible"):
        cluster.config.visible("0,1")


def test_processes_may_share_a_gpu(config: ClusterConfig) -> None:
    shared = replace(config, gpus="3,1,3")
    assert [shared.device_of(place) for place in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert shared.visible(None) == {"CUDA_VISIBLE_DEVICES": "3,1"}


def test_the_routers_gpu_may_hold_no_experts(config: ClusterConfig) -> None:
    with Cluster.start(ClusterConfig(model=config.model, port=0, kv=False, gpus="0,1", apart=True)) as cluster:
        assert "--shard=0 --shards=1" in loading_line(cluster.processes["worker-0"])
        line = loading_line(cluster.processes["router"])
        assert f"--workers={cluster.processes['worker-0'].address}" in line
        assert "--link=p2p" in line
    for changes in ({"slots": "50%"}, {"link": "shm"}, {"placement": "x"}):
        assert not replace(config, gpus="0,1", **changes).resolved().spread, changes  # type: ignore[arg-type]
    for changes in ({}, {"gpus": "0,1", "spread": True}):
        with pytest.raises(ConfigError, match="--apart"):
            replace(config, apart=True, **changes).validate()  # type: ignore[arg-type]


def test_a_part_of_the_experts_can_be_with_the_router_over_any_link(config: ClusterConfig) -> None:
    assert replace(config, spread=True).resolved().shards == config.workers + 1
    for changes in ({"placement": "x"}, {"link": "local"}, {"planned": True}):
        with pytest.raises(ConfigError, match="--spread"):
            replace(config, spread=True, **changes).validate()  # type: ignore[arg-type]


def test_planned_workers_hold_nothing_at_first_and_the_router_plans(config: ClusterConfig) -> None:
    with Cluster.start(replace(config, planned=True, kv=False)) as cluster:
        assert "--placed" in loading_line(cluster.processes["worker-0"])
        assert "--plan" in loading_line(cluster.processes["router"])
    for changes in ({"placement": "x"}, {"link": "local"}, {"gpus": "0,1"}):
        with pytest.raises(ConfigError, match="--planned"):
            replace(config, planned=True, **changes).validate()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [{"gpus": "0"}, {"gpus": "0,x"}, {"gpus": "0,1", "device": "cuda"}, {"gpus": "0,1", "link": "local"}],
)
def test_gpus_that_make_no_sense_are_refused(changes: dict[str, str], config: ClusterConfig) -> None:
    with pytest.raises(ConfigError, match="--gpus"):
        ClusterConfig(model=config.model, **changes).validate()  # type: ignore[arg-type]


def test_services_can_inherit_their_settings(config: ClusterConfig) -> None:
    inherited = ClusterConfig(model=config.model, port=0, kv=False, inherit=True, link="shm", drain_s=7.0, listen="127.0.0.1:0")
    with Cluster.start(inherited) as cluster:
        workers = ",".join(cluster.processes[f"worker-{shard}"].address for shard in range(2))
        assert f"--device=auto --workers={workers} --drain-s=7.0 --link=shm" in loading_line(cluster.processes["router"])
        assert "--device=auto --shard=1 --shards=2 --listen" in loading_line(cluster.processes["worker-1"])
