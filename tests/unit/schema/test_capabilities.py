"""The capability table, the hooks, and what importing them costs."""

import subprocess
import sys

import pytest

from steergate_server.capabilities import ALGORITHM_CAPABILITIES
from steergate_server.schema import hooks

# From the table in the algorithms document: payload, source, normalize, params, component.
ROUTER = "expert_ids activate_ids deactivate_ids mode lambda topk epsilon seed"
TABLE = {
    "direct": ("direction", "gguf", True, "", "hidden_states"),
    "attention_add": ("direction", "gguf", False, "", "attention_heads"),
    "erase": ("direction", "gguf", True, "", "hidden_states"),
    "replace": ("direction", "gguf", True, "", "hidden_states"),
    "concept_replace": ("concept_pair", "directory", True, "", "hidden_states"),
    "linear": ("linear", "none", False, "", "hidden_states"),
    "lm_steer": ("lowrank", "none", False, "", "hidden_states"),
    "loreft": ("reft", "none", False, "", "hidden_states"),
    "clamp": ("direction", "gguf", False, "min max value", "hidden_states"),
    "moe_router": ("router", "json", False, ROUTER, "router_logits"),
}


def test_the_table_is_the_documents():
    assert {
        name: (row.payload_kind, row.source, row.normalize, " ".join(row.params), row.target_component)
        for name, row in ALGORITHM_CAPABILITIES.items()
    } == TABLE


def test_rows_are_frozen():
    with pytest.raises(AttributeError):
        ALGORITHM_CAPABILITIES["direct"].normalize = False


def test_hooks_run_in_order():
    assert hooks.HOOKS == ("pre_attn", "attn_heads", "post_attn", "mlp_in", "router_logits", "mlp_out", "post_block")
    sites = [("pre_attn", 1), ("post_block", 0), ("mlp_out", 0), ("attn_heads", 0)]
    ordered = sorted(sites, key=lambda site: hooks.site_order(*site))
    assert ordered == [("attn_heads", 0), ("mlp_out", 0), ("post_block", 0), ("pre_attn", 1)]
    with pytest.raises(KeyError):
        hooks.site_order("nowhere", 0)


def test_gates_use_the_hidden_states_only():
    hidden = {hook for hook, component in hooks.HOOK_COMPONENTS.items() if component == "hidden_states"}
    assert hidden == hooks.PROBED_HOOKS == hooks.GATE_STEERED_HOOKS
    assert hooks.HOOK_COMPONENTS["attn_heads"] == "attention_heads"
    assert hooks.HOOK_COMPONENTS["router_logits"] == "router_logits"


def test_the_schema_loads_nothing_but_msgspec():
    modules = "decode, errors, hooks, payloads, registry, reports, requests, rules"
    code = f"import sys, msgspec; before = set(sys.modules); from steergate_server.schema import {modules}"
    code += "; import steergate_server.capabilities; print(*sorted(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    foreign = {name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names) - {"steergate_server"}
    assert foreign <= {"msgspec"}
