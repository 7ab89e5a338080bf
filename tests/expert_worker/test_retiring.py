"""When withdrawn experts may go: scenarios with several routers, silent ones and new ones."""

from __future__ import annotations

from expert_worker.retiring import NEW_S, SILENT_S, Retiring

A, B = (0, 1), (0, 2)


def test_it_waits_for_every_router_that_asks() -> None:
    retiring = Retiring()
    retiring.acknowledge("r", 4, 0.0)
    retiring.acknowledge("s", 4, 0.0)
    retiring.withdraw(A, 5, 0.0)
    retiring.acknowledge("r", 5, 2.0)
    retiring.acknowledge("s", 4, 2.0)
    assert retiring.due(2.0) == []
    retiring.acknowledge("s", 6, 2.5)
    assert retiring.due(2.5) == [A]
    assert retiring.due(2.5) == [], "told once"


def test_a_router_that_went_silent_is_not_waited_for() -> None:
    retiring = Retiring()
    retiring.acknowledge("r", 4, 0.0)
    retiring.withdraw(A, 5, 1.0)
    assert retiring.due(SILENT_S - 0.1) == []
    assert retiring.due(SILENT_S) == [A]


def test_one_that_has_not_asked_yet_has_a_moment() -> None:
    retiring = Retiring()
    retiring.withdraw(A, 1, 0.0)
    assert retiring.due(NEW_S / 2) == []
    assert retiring.due(NEW_S) == [A]


def test_a_late_answer_takes_nothing_back() -> None:
    retiring = Retiring()
    retiring.acknowledge("r", 5, 0.0)
    retiring.acknowledge("r", 4, 0.1)  # two requests overtook one another
    retiring.withdraw(A, 5, 0.0)
    assert retiring.due(2.0) == [A]


def test_what_is_wanted_again_stays() -> None:
    retiring = Retiring()
    retiring.withdraw(A, 1, 0.0)
    retiring.withdraw(B, 1, 0.0)
    assert retiring.due(2.0, {A}) == [B]
    assert retiring.due(9.0) == []
