"""Bases of the generated structs: requests are strict, answers are tolerant."""

from __future__ import annotations

import msgspec


class Contract(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of what a client sends. Members that have their default are left out."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what a server answers. Members that a newer server adds are skipped."""
