"""Front-side settings: what the API server process needs beyond the engine's, secrets included.

They travel in the environment, never on vLLM's command line, which vLLM logs.
"""

from __future__ import annotations

import os

import msgspec

FRONT_ENVIRONMENT = "STEERGATE_FRONT"


class FrontConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """`sources`: where a request's numbers may come from. `max_inline_bytes`: bytes of a request's `steering` member
    after base64 decoding. `default_file`: path of the server default to start with. `keys`: steering keys; empty means
    mutations are refused. `development`: vLLM's development mode, in which an empty `keys` lets mutations through."""

    sources: tuple[str, ...] = ("name", "inline")
    max_inline_bytes: int = 16 * 2**20
    default_file: str | None = None
    keys: tuple[str, ...] = ()
    development: bool = False


def load_front_config() -> FrontConfig:
    """The settings that `steergate-serve` left in the environment. Raises KeyError where it did not run."""
    return msgspec.json.decode(os.environ[FRONT_ENVIRONMENT], type=FrontConfig)


def store_front_config(config: FrontConfig) -> None:
    """Leave the settings to this process's children."""
    os.environ[FRONT_ENVIRONMENT] = msgspec.json.encode(config).decode()
