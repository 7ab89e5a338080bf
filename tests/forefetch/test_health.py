from __future__ import annotations

from typing import Any

from forefetch.rpc.health import Pulse, States, Vitals


class World:
    def __init__(self) -> None:
        self.now, self.steps, self.working = 0.0, 0, False
        self.pulse = Pulse(lambda: self.steps, lambda: self.working, 10.0, lambda: self.now)

    def after(self, seconds: float) -> bool:
        self.now += seconds
        return self.pulse()


def test_idleness_is_life() -> None:
    world = World()
    assert world.after(1000)


def test_work_that_does_not_move_is_not() -> None:
    world = World()
    world.working = True
    assert world.after(9)
    assert not world.after(2)


def test_every_step_gives_the_whole_time_again() -> None:
    world = World()
    world.working = True
    for _ in range(5):
        world.steps += 1
        assert world.after(9)


def test_time_without_work_is_not_held_against_the_next_work() -> None:
    world = World()
    assert world.after(1000)
    world.working = True
    assert world.after(9)


def test_a_process_that_moves_again_lives_again() -> None:
    world = World()
    world.working = True
    assert not world.after(11)
    world.steps += 1
    assert world.after(0)


def said(states: States) -> dict[str, bool]:
    from grpc_health.v1.health_pb2 import HealthCheckResponse

    return {name: state == HealthCheckResponse.SERVING for name, state in states.changes()}


def test_names_say_different_things() -> None:
    vital: dict[str, Any] = {"ready": False, "alive": True}
    states = States("a.Service", Vitals(lambda: vital["ready"], lambda: vital["alive"]))
    welcome = ("", "a.Service", "readiness")
    assert said(states) == {**dict.fromkeys(welcome, False), "startup": False, "liveness": True}
    states.loaded = states.accepting = True
    assert said(states) == {"startup": True}, "loaded, but it could not serve yet"
    vital["ready"] = True
    assert said(states) == dict.fromkeys(welcome, True)
    vital["alive"] = False
    assert said(states) == {"liveness": False}
    vital["alive"], states.accepting = True, False
    assert said(states) == {**dict.fromkeys(welcome, False), "liveness": True}, "a drain is not an illness"
    assert said(states) == {}, "only changes are told"
