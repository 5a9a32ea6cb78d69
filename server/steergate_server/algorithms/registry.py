"""The registry of algorithms by wire name. Nothing here loads weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from steergate_server.algorithms.base import BaseSteerVectorAlgorithm

AlgorithmClass = TypeVar("AlgorithmClass", bound=type[BaseSteerVectorAlgorithm])

_ALGORITHMS: dict[str, type[BaseSteerVectorAlgorithm]] = {}


def register_algorithm(name: str) -> Callable[[AlgorithmClass], AlgorithmClass]:
    """Class decorator that registers an algorithm. Raises ValueError if the name is taken."""

    def register(cls: AlgorithmClass) -> AlgorithmClass:
        if name in _ALGORITHMS:
            raise ValueError(f"algorithm {name!r} is already registered, by {_ALGORITHMS[name].__qualname__}")
        _ALGORITHMS[name] = cls
        return cls

    return register


def get_algorithm(name: str) -> type[BaseSteerVectorAlgorithm]:
    """The class registered under a name. Raises ValueError that lists what is available."""
    try:
        return _ALGORITHMS[name]
    except KeyError:
        raise ValueError(f"unknown algorithm {name!r}; available: {', '.join(sorted(_ALGORITHMS))}") from None


def create_algorithm(name: str, normalize: bool = False) -> BaseSteerVectorAlgorithm:
    """A new instance of a registered algorithm. Raises ValueError for an unknown name."""
    return get_algorithm(name)(normalize=normalize)


def registered_algorithms() -> tuple[str, ...]:
    """The names that `get_algorithm` knows, sorted."""
    return tuple(sorted(_ALGORITHMS))


def works_on_parts(name: str, *, normalize: bool) -> bool:
    """Whether a registered algorithm can change a part of a row without knowing the rest: pure additions can."""
    return get_algorithm(name).graph_family == "additive" and not normalize
