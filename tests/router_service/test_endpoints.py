"""EndpointSlices as the API server gives them."""

from __future__ import annotations

from typing import Any

from router_service.endpoints import Endpoint, read_slices


def slice_of(*endpoints: dict[str, Any], port: int | None = 50051, **metadata: Any) -> dict[str, Any]:
    ports = [{"name": "metrics", "port": 9090}, {"name": "grpc", "port": port}]
    return {"metadata": metadata, "endpoints": list(endpoints), "ports": ports}


def at(address: str, **conditions: bool | None) -> dict[str, Any]:
    return {"addresses": [address], "conditions": conditions}


def test_ready_serving_and_terminating_are_told_apart() -> None:
    found = read_slices(
        [
            slice_of(
                at("10.0.0.1", ready=True, serving=True, terminating=False),
                at("10.0.0.2", ready=True, serving=False, terminating=False),  # published although it is not ready
                at("10.0.0.3", ready=False, serving=True, terminating=True),
                at("10.0.0.4", ready=False, serving=False, terminating=True),
            )
        ]
    )
    assert found == (
        Endpoint("10.0.0.1:50051"),
        Endpoint("10.0.0.2:50051", serving=False),
        Endpoint("10.0.0.3:50051", leaving=True),
        Endpoint("10.0.0.4:50051", serving=False, leaving=True),
    )


def test_conditions_that_are_unset_mean_what_the_api_says() -> None:
    """Unset ready is ready; unset serving is what ready is; unset terminating is not."""
    found = read_slices([slice_of({"addresses": ["10.0.0.1"]}, at("10.0.0.2", ready=None), at("10.0.0.3", ready=False))])
    assert [endpoint.serving for endpoint in found] == [True, True, False]
    assert not any(endpoint.leaving for endpoint in found)


def test_an_endpoint_in_two_slices_counts_once_in_its_better_state() -> None:
    worse, better = slice_of(at("10.0.0.1", serving=False)), slice_of(at("10.0.0.1", serving=True))
    assert read_slices([worse, better]) == read_slices([better, worse]) == (Endpoint("10.0.0.1:50051"),)


def test_pods_of_a_stateful_set_have_names_that_certificates_can_carry() -> None:
    metadata = {"namespace": "llm", "labels": {"kubernetes.io/service-name": "demo-expert"}}
    entry = {**at("10.0.0.1"), "hostname": "demo-expert-0-1"}
    assert read_slices([slice_of(entry, **metadata)])[0].address == "demo-expert-0-1.demo-expert.llm.svc:50051"


def test_addresses_of_the_sixth_version_are_bracketed() -> None:
    assert read_slices([slice_of(at("fd00::1"))])[0].address == "[fd00::1]:50051"


def test_slices_without_the_port_or_without_endpoints_are_nothing() -> None:
    assert read_slices([slice_of(at("10.0.0.1"), port=None), {"ports": None, "endpoints": None}, slice_of()]) == ()


def test_order_and_names_of_slices_do_not_matter() -> None:
    a, b = slice_of(at("10.0.0.1"), name="x"), slice_of(at("10.0.0.2"), name="y")
    assert read_slices([a, b]) == read_slices([{**b, "metadata": {"name": "z"}}, a])
