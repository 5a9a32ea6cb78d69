"""Engine-side settings: decided once by `steergate-serve`, read by every engine process.

They travel in vLLM's `additional_config["steering"]`, which is part of the compile-cache key, so everything that
shapes the graph belongs here and nothing that does not (paths travel in the environment).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

SPOOL_ENVIRONMENT = "STEERGATE_SPOOL"
"""Environment variable that names the payload spool's folder to every engine process."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What the workers and the scheduler need to know.

    `hooks`: hooks that carry an op. `algorithms`: what requests may use. `graph_mode` and `graph_max_rank`: how static
    vectors run (and why, where `auto` did not choose in_graph), and the rank that the tables hold at a site.
    `memory_mib`: size of the payload pools in MiB. `max_gates`: gate lanes of a request. `max_slots`: columns of the
    tables, 0 for four times vLLM's `max_num_seqs`. `trace`: record what was applied, for tests.
    """

    hooks: tuple[str, ...] = ("post_block",)
    algorithms: tuple[str, ...] = ("direct", "erase", "replace", "clamp")
    memory_mib: int = 512
    max_gates: int = 4
    max_slots: int = 0
    gates: bool = True
    graph_mode: Literal["eager", "split", "in_graph"] = "in_graph"
    graph_reason: str | None = None
    graph_max_rank: int = 32
    trace: bool = False


def engine_config(additional_config: Mapping[str, Any] | None) -> EngineConfig | None:
    """The steering settings of this engine, or None where steering is off. Raises `msgspec.ValidationError`."""
    raw = (additional_config or {}).get("steering")
    return None if raw is None else msgspec.convert(raw, EngineConfig)
