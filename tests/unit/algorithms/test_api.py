"""The extension API: preparation of payloads, the registry, and the table of capabilities."""

import copy

import pytest
import torch

import steergate_server.algorithms  # noqa: F401 - registers the built-in algorithms
from steergate_server.algorithms import registry
from steergate_server.algorithms.base import BaseSteerVectorAlgorithm
from steergate_server.algorithms.registry import create_algorithm, get_algorithm, register_algorithm
from steergate_server.capabilities import ALGORITHM_CAPABILITIES
from unit.algorithms.cases import HIDDEN, NORMALIZING, make, router

torch.set_num_threads(1)


class Doubling(BaseSteerVectorAlgorithm):
    def _transform(self, hidden_state, params):  # noqa: ARG002
        return hidden_state * 2


@pytest.fixture
def names(monkeypatch):
    """A registry of this test's own."""
    monkeypatch.setattr(registry, "_ALGORITHMS", dict(registry._ALGORITHMS))


def test_the_capability_table_and_the_registry_name_the_same_algorithms():
    assert set(ALGORITHM_CAPABILITIES) == set(registry.registered_algorithms())


def test_the_tests_cover_every_algorithm():
    assert {*HIDDEN, "moe_router"} == set(ALGORITHM_CAPABILITIES)
    assert {name for name, can in ALGORITHM_CAPABILITIES.items() if can.normalize} == set(NORMALIZING)


def test_a_new_name(names):  # noqa: ARG001
    assert register_algorithm("doubling")(Doubling) is Doubling
    assert get_algorithm("doubling") is Doubling
    assert isinstance(create_algorithm("doubling", normalize=True), Doubling)
    assert create_algorithm("doubling", normalize=True).normalize is True
    assert create_algorithm("doubling").normalize is False


@pytest.mark.parametrize("name", ["direct", "moe_router"])
def test_a_name_is_given_once(names, name):  # noqa: ARG001
    taken = get_algorithm(name)
    with pytest.raises(ValueError, match=name):
        register_algorithm(name)(Doubling)
    assert get_algorithm(name) is taken


def test_an_unknown_name_lists_what_there_is():
    for use in (get_algorithm, create_algorithm):
        with pytest.raises(ValueError, match="doubling") as caught:
            use("doubling")
        assert all(name in str(caught.value) for name in ALGORITHM_CAPABILITIES)


def test_the_defaults_of_the_base_class():
    algorithm = Doubling()
    assert algorithm.payload is None
    assert algorithm.normalize is False
    assert algorithm.graph_family is None
    assert algorithm.graph_payload_problem() is None
    assert algorithm.graph_payload_problem(object()) is None
    assert algorithm.wire_rank(object()) is None
    with pytest.raises(NotImplementedError):
        algorithm.graph_lower(torch.ones(2), 1.0)
    with pytest.raises(TypeError):
        BaseSteerVectorAlgorithm()


@pytest.mark.parametrize("name", [*HIDDEN, "moe_router"])
def test_no_payload_is_refused(name):
    algorithm = create_algorithm(name)
    with pytest.raises(ValueError, match="payload"):
        algorithm.set_payload(None)
    assert algorithm.payload is None


def same(a, b):
    """Whether two payloads hold the same numbers."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


@pytest.mark.parametrize("name", [*HIDDEN, "moe_router"])
def test_the_source_of_a_payload_is_left_alone(name, rng):
    payload = router(rng, 6, "soft_random") if name == "moe_router" else make(name, rng, 6, 0.5).payload
    kept = copy.deepcopy(payload)
    rows = torch.ones(3, 6)
    for scale in (0.5, 1.0, 0.25):
        algorithm = create_algorithm(name)
        algorithm.set_payload(payload, scale)
        params = algorithm.payload
        if name == "moe_router":
            params = {**params, "positions": torch.arange(3)}
        algorithm._transform(rows, params).fill_(-7)
        if isinstance(algorithm.payload, torch.Tensor):
            algorithm.payload.fill_(-7)
        get_algorithm(name).graph_lower(payload, scale) if algorithm.graph_family else None
        assert same(payload, kept)
    assert torch.equal(rows, torch.ones(3, 6))


def test_a_tensor_is_scaled_and_a_dict_gets_the_scale():
    algorithm = Doubling()
    algorithm.set_payload(torch.tensor([1.0, -2.0]), 3.0)
    assert algorithm.payload.tolist() == [3.0, -6.0]
    algorithm.set_payload(torch.tensor([1.0, -2.0]))
    assert algorithm.payload.tolist() == [1.0, -2.0]
    source = {"a": 1, "scale_factor": 9.0}
    algorithm.set_payload(source, -0.5)
    assert algorithm.payload == {"a": 1, "scale_factor": -0.5}
    assert source == {"a": 1, "scale_factor": 9.0}
    other = [1, 2]
    algorithm.set_payload(other, 3.0)
    assert algorithm.payload is other
