"""The schema that msgspec exports: it agrees with decoding, as far as JSON Schema can say."""

import json

import jsonschema
import msgspec
import pytest

from steergate_server.schema import registry, reports
from steergate_server.schema.requests import SteeringRequest
from unit.schema.examples import FULL, changed, gate, places, vector, without
from unit.schema.test_decode import OBJECTS, REQUIRED, WRONG

VALIDATOR = jsonschema.Draft202012Validator(msgspec.json.schema(SteeringRequest))
# What JSON Schema cannot say: 1.0 is an integer there, and base64 is only an annotation.
SAYABLE = [row for row in WRONG if row[0][-1] != "data" and not isinstance(row[1], float)]
SAYABLE += [row for row in WRONG if row[1] in (1.01, -0.01)]


def test_the_schema_is_sound():
    jsonschema.Draft202012Validator.check_schema(VALIDATOR.schema)
    json.dumps(VALIDATOR.schema, allow_nan=False)


@pytest.mark.parametrize("document", [FULL, {}, {"vectors": [vector()]}, {"gates": [gate()]}], ids=str)
def test_good_requests_validate(document):
    VALIDATOR.validate(document)


@pytest.mark.parametrize("row", SAYABLE, ids=str)
def test_bad_members_do_not(row):
    assert not VALIDATOR.is_valid(changed(FULL, row[0], row[1]))


@pytest.mark.parametrize("path", OBJECTS, ids=str)
def test_unknown_fields_do_not(path):
    assert not VALIDATOR.is_valid(changed(FULL, (*path, "zz"), 1))


@pytest.mark.parametrize("path", REQUIRED, ids=str)
def test_missing_fields_do_not(path):
    assert not VALIDATOR.is_valid(without(FULL, path))


def test_every_pattern_ends_in_the_same_way_in_every_language():
    schema = msgspec.json.schema(registry.RegisterRequest)
    patterns = [value for path, value in places([VALIDATOR.schema, schema]) if path and path[-1] == "pattern"]
    assert patterns
    assert all(pattern.endswith(r"(?![\s\S])") for pattern in patterns)


def test_every_integer_is_bounded():
    for path, value in places(VALIDATOR.schema):
        if isinstance(value, dict) and value.get("type") == "integer" and "params" not in path:
            assert value["maximum"] < 2**31, path
            assert value["minimum"] > -(2**31), path


@pytest.mark.parametrize("module", [registry, reports])
def test_every_other_struct_exports(module):
    structs = [getattr(module, name) for name in module.__all__]
    _, components = msgspec.json.schema_components(structs)
    assert {struct.__name__ for struct in structs} <= set(components)
    assert all(component["additionalProperties"] is False for component in components.values())
