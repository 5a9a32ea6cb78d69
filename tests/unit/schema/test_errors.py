"""The closed list of codes, paths as people read them, and the exception's shape."""

import pickle

import pytest

from steergate_server.schema.errors import ERROR_CODES, SteeringError, format_path

# Typed from the wire document, apart from the table under test.
SHAPE = """invalid_json unknown_field missing_field invalid_type unknown_kind out_of_range not_finite invalid_name
    invalid_base64 shape_mismatch duplicate_layer too_many_vectors payload_too_large"""
RULES = """empty_selection exclude_without_phase invalid_window invalid_position vector_conflict probe_not_single_site
    steer_before_probe inline_conversation_steer conversation_id_required payload_kind unknown_param
    normalize_not_supported layers_required hook_not_allowed observe_scope zero_vector"""
MODEL = """too_many_gates unknown_vector unknown_algorithm algorithm_not_enabled unknown_layer layer_not_in_payload
    unknown_hook hook_not_steerable width_mismatch rank_too_large not_lowerable gates_unavailable nothing_to_attenuate
    selects_nothing inline_not_allowed default_locked gates_overridden steering_not_supported_here reserved_field
    conversation_single_choice over_capacity not_implemented"""
REGISTRY = "name_conflict digest_mismatch registry_full invalid_metadata"
AUTH = "unauthorized steering_key_required"
LATE = "algorithm_failed gate_state_lost"
UNUSUAL = {
    "payload_too_large": (413, "invalid_request_error"),
    "inline_not_allowed": (403, "permission_error"),
    "default_locked": (403, "permission_error"),
    "gates_overridden": (403, "permission_error"),
    "name_conflict": (409, "conflict_error"),
    "registry_full": (409, "conflict_error"),
    "unauthorized": (401, "authentication_error"),
    "steering_key_required": (403, "permission_error"),
}


def test_the_list_is_the_wire_documents():
    by_ring = {"shape": SHAPE, "rules": RULES, "model": MODEL, "registry": REGISTRY, "auth": AUTH, "late": LATE}
    expected = {code: ring for ring, codes in by_ring.items() for code in codes.split()}
    assert {code: row.ring for code, row in ERROR_CODES.items()} == expected
    for code, row in ERROR_CODES.items():
        assert (row.status, row.type) == UNUSUAL.get(code, (400, "invalid_request_error")), code


@pytest.mark.parametrize(
    ("path", "prefix", "text"),
    [
        (("gates", 0, "when", "threshold"), "steering", "steering.gates[0].when.threshold"),
        ((0, "when"), "steering", "steering[0].when"),
        (("packed", "post_block", "data"), "", "packed.post_block.data"),
        (("layers", "3", "mode"), "", 'layers["3"].mode'),
        (("params", "a b"), "", 'params["a b"]'),
        (("params", 'say "x"\\\n'), "", r'params["say \"x\"\\\n"]'),
        (("params", "ok\n"), "", r'params["ok\n"]'),
        (("params", "\ud800é"), "", r'params["\ud800\u00e9"]'),
        (("params", ""), "", 'params[""]'),
        ((), "steering", "steering"),
        ((), "", ""),
    ],
)
def test_paths(path, prefix, text):
    assert format_path(path, prefix) == text


def test_an_error_has_openais_shape():
    error = SteeringError("name_conflict", "It exists.", "name")
    assert (error.status, error.type) == (409, "conflict_error")
    assert error.body() == {
        "error": {"message": "It exists.", "type": "conflict_error", "param": "name", "code": "name_conflict"}
    }


def test_the_registry_answers_404_for_a_name_that_does_not_exist():
    error = SteeringError("unknown_vector", "No such name.", "name", status=404)
    assert (error.status, error.type) == (404, "not_found_error")
    assert SteeringError("unknown_vector", "No such name.").status == 400


def test_a_code_outside_the_list_is_a_bug():
    with pytest.raises(KeyError):
        SteeringError("made_up", "x")


def test_errors_cross_process_borders():
    error = pickle.loads(pickle.dumps(SteeringError("unknown_vector", "m", "p", status=404)))
    assert (error.code, error.message, error.param, error.status, error.type) == (
        "unknown_vector",
        "m",
        "p",
        404,
        "not_found_error",
    )
