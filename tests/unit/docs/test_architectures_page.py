"""The page of models lists what tests/engine/test_architectures.py tests."""

from __future__ import annotations

import re

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from reference.architectures import ARCHITECTURES, BLIP2
from steergate_server.schema.hooks import HOOKS
from unit.docs.pages import ROOT, table


def test_the_tested_architectures() -> None:
    rows = table(ROOT / "docs" / "architectures.md", "<!-- tested architectures: checked against the tests -->")
    found = []
    for name, hooks, _ in rows:
        assert hooks.startswith("all")
        lacking = re.findall(r"`?(\w+)`?", hooks.removeprefix("all but")) if "but" in hooks else []
        assert lacking == [hook for hook in HOOKS if hook in lacking]
        found.append((name.partition(",")[0].strip("`"), [hook for hook in HOOKS if hook not in lacking]))
    tested = [
        (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[architecture.config().model_type], architecture)
        for architecture in ARCHITECTURES.values()
    ]
    tested.append((MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES["blip-2"], BLIP2))
    assert found == [(name, [hook for hook in HOOKS if hook in one.widths()]) for name, one in tested]
