"""Third-party algorithms: modules named by the entry-point group `steergate.algorithms`.

Such a module registers its class with `register_algorithm` and sets `ALGORITHM_CAPABILITIES[name]`. It is imported in
every process of a server. One that fails is left out, with a line in the log; the others load.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import entry_points

logger = logging.getLogger(__name__)

GROUP = "steergate.algorithms"


@cache
def load_extensions() -> tuple[str, ...]:
    """Import every third-party module, once in a process; return the names of the entry points that loaded."""
    loaded = []
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        try:
            point.load()
        except Exception:
            logger.exception("SteerGate: the algorithm extension %r (%s) failed to load", point.name, point.value)
        else:
            loaded.append(point.name)
    return tuple(loaded)
