"""Turns a failed decoding into a refusal that names the very member and says what is allowed there.

msgspec says what is wrong, but not always where (`[...]` stands for any key) and in no closed set of codes. On a
failure, and only then, the document is read once more with the standard library to find the rest.
"""

import difflib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from .errors import PathPart, SteeringError, format_path
from .places import ABSENT, Place, bad_key, cut, known_fields, resolve, tags, words

__all__ = ["duplicate_member", "explain"]


class _Duplicated(dict[str, Any]):
    """An object in which `member` was given twice."""

    member: str


def explain(raw: bytes, expected: Any, failure: Exception, prefix: str = "") -> SteeringError:
    """Explain why `raw` did not decode as `expected`.

    Args:
        raw: The JSON document.
        expected: The type that msgspec was asked for.
        failure: What msgspec raised: a DecodeError, a ValidationError or a RecursionError.
        prefix: Path of the document in the request as sent.
    """
    try:
        tree = _read(raw)
    except UnicodeDecodeError as error:
        return _malformed(f"byte {error.start} is not UTF-8. Send the body as UTF-8", prefix)
    except RecursionError:
        return _malformed("it is nested too deeply. Nothing that is accepted here nests deeper than about ten", prefix)
    except ValueError as error:
        return _malformed(f"{error}. Send one complete JSON document", prefix)
    special = _special(tree, prefix)
    if special is not None:
        return special
    if isinstance(failure, msgspec.ValidationError):
        return _invalid(str(failure), expected, tree, prefix)
    if isinstance(failure, RecursionError):
        return _malformed("it is nested too deeply. Nothing that is accepted here nests deeper than about ten", prefix)
    return _malformed(f"{failure}. Send one complete JSON document", prefix)


def duplicate_member(raw: bytes, prefix: str = "") -> SteeringError | None:
    """Return the refusal of a document in which an object has a member twice; None if there is none.

    JSON parsers silently keep one of the two: half of what the client asked for would be lost.

    Args:
        raw: A document that msgspec has decoded.
        prefix: Path of the document in the request as sent.
    """
    found: list[str] = []

    def hook(pairs: list[tuple[str, Any]]) -> None:
        if len(pairs) > 1 and len({name for name, _ in pairs}) < len(pairs):
            found.append("")

    try:
        json.loads(raw.decode(), object_pairs_hook=hook, parse_int=_keep, parse_float=_keep)
    except RecursionError:
        return _malformed("it is nested too deeply", prefix)
    return _special(_read(raw), prefix) if found else None


def _keep(literal: str) -> str:
    return literal


def _malformed(message: str, prefix: str) -> SteeringError:
    return SteeringError("invalid_json", f"This is not valid JSON: {message}.", prefix or None)


def _read(raw: bytes) -> Any:
    """Read a document leniently: numbers stay as written, and NaN, duplicates and lone surrogates are let in."""
    return json.loads(
        raw.decode(), parse_int=_number, parse_float=_number, parse_constant=_number, object_pairs_hook=_object
    )


def _number(literal: str) -> msgspec.Raw:
    # Raw: 1e400 and integers of any length survive, and encode again as they were.
    return msgspec.Raw(literal.encode())


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    twice = None
    for name, value in pairs:
        if twice is None and name in members:
            twice = name
        members[name] = value
    if twice is None:
        return members
    duplicated = _Duplicated(members)
    duplicated.member = twice
    return duplicated


# What JSON itself forbids, or should


def _special(tree: Any, prefix: str) -> SteeringError | None:
    """Find what Python's reader lets through and the wire does not."""
    for path, value in _walk(tree):
        if isinstance(value, msgspec.Raw) and bytes(value) in (b"NaN", b"Infinity", b"-Infinity"):
            text = bytes(value).decode()
            message = f"{text} was given; every number must be finite. Leave the member out or send a finite number."
            return SteeringError("not_finite", message, format_path(path, prefix) or None)
        if isinstance(value, _Duplicated):
            at = format_path((*path, cut(value.member)), prefix)
            message = f"{_show(value.member)} is given twice in one object. Send it once."
            return SteeringError("invalid_json", message, at)
        if isinstance(value, str) and _has_lone_surrogate(value):
            message = "A string holds half of a surrogate pair, which is no Unicode text. Send the whole character."
            return SteeringError("invalid_json", message, format_path(path, prefix) or None)
    return None


def _walk(tree: Any) -> Iterator[tuple[tuple[PathPart, ...], Any]]:
    """Yield every value with its path, in document order. Not recursive: the document's depth is the client's."""
    stack: list[tuple[tuple[PathPart, ...], Any]] = [((), tree)]
    while stack:
        path, value = stack.pop()
        yield path, value
        if isinstance(value, dict):
            for name in value:
                yield (*path, cut(name)), name
            stack.extend(((*path, cut(name)), item) for name, item in reversed(value.items()))
        elif isinstance(value, list):
            stack.extend(((*path, index), value[index]) for index in range(len(value) - 1, -1, -1))


def _has_lone_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


# What msgspec refuses


def _invalid(message: str, expected: Any, tree: Any, prefix: str) -> SteeringError:
    unknown = re.fullmatch(r"Object contains unknown field `(.*?)`(?: - at `(\$[^`]*)`)?", message, re.DOTALL)
    if unknown:
        place = _unknown_place(message, expected, tree)
        return _error(*_unknown_field(place), place, prefix)
    match = re.fullmatch(r"(.*?)(?: - at (`key` in )?`(\$[^`]*)`)?", message, re.DOTALL)
    assert match is not None
    text, at_key, path = match.groups()
    place = resolve(expected, tree, path or "$")
    if at_key:
        place = bad_key(place)
    for pattern, explainer in _EXPLAINERS:
        found = re.fullmatch(pattern, text, re.DOTALL)
        if found:
            return _error(*explainer(found, place), place, prefix)
    return _error("invalid_type", f"{text}.", (), place, prefix)


def _error(code: str, message: str, more: tuple[PathPart, ...], place: Place, prefix: str) -> SteeringError:
    path = (*place.path, *more)
    return SteeringError(code, message, format_path(path, prefix) or None)


_Explained = tuple[str, str, tuple[PathPart, ...]]


def _unknown_place(message: str, expected: Any, tree: Any) -> Place:
    # A field's name may itself look like msgspec's ` - at ` suffix: believe the object at the place, not the text.
    suffix = re.search(r"` - at `(\$[^`]*)`\Z", message)
    if suffix:
        place = resolve(expected, tree, suffix[1])
        if _unknown_names(place):
            return place
    return resolve(expected, tree, "$")


def _unknown_names(place: Place) -> list[str]:
    if not isinstance(place.value, dict):
        return []
    known = known_fields(place)
    return [name for name in place.value if name not in known]


def _unknown_field(place: Place) -> _Explained:
    names = _unknown_names(place)
    name = names[0] if names else ""
    known = known_fields(place)
    hint = _nearest(name, known)
    return "unknown_field", f"{_show(name)} is no field of this object.{hint} It takes {_listed(known)}.", (cut(name),)


def _missing_field(found: re.Match[str], place: Place) -> _Explained:
    name = found[1]
    kinds = tags(place.expected)
    is_tag = name in {struct.__struct_config__.tag_field for struct in kinds.values()}
    choice = f" It is one of {_listed(sorted(kinds))}." if is_tag else ""
    return "missing_field", f"`{name}` is missing; this object cannot do without it.{choice}", (name,)


def _unknown_word(_: re.Match[str], place: Place) -> _Explained:
    allowed = words(place.expected)
    given = place.value if isinstance(place.value, str) else ""
    return "unknown_kind", f"{_show(place.value)} is none of {_listed(allowed)}.{_nearest(given, allowed)}", ()


def _wrong_type(found: re.Match[str], place: Place) -> _Explained:
    expected = " or ".join(_TYPE_NAMES.get(name, name) for name in found[1].split(" | "))
    allowed = words(place.expected)
    which = f" ({_listed(allowed)})" if allowed else ""
    hint = ""
    if isinstance(place.value, str) and ("object" in found[1] or "array" in found[1]):
        hint = " Send the JSON itself, not a string that holds it."
    elif isinstance(place.value, msgspec.Raw) and found[1].split(" | ")[0] == "int":
        hint = " Write integers without a fraction or an exponent."
    return "invalid_type", f"Expected {expected}{which}, got {_show(place.value)}.{hint}", ()


def _wrong_pattern(found: re.Match[str], place: Place) -> _Explained:
    pattern = found[1].replace(r"\\", "\\").removesuffix(r"(?![\s\S])")
    return "invalid_name", f"{_show(place.value)} does not match the pattern {pattern}$.", ()


def _out_of_bounds(found: re.Match[str], place: Place) -> _Explained:
    relation, bound = found[2], found[3].removesuffix(".0")
    code = _BOUND_CODES.get(place.field or "", "out_of_range") if relation == ">=" else "out_of_range"
    return code, f"{_show(place.value)} was given; it must be {relation} {bound}.", ()


def _wrong_length(found: re.Match[str], place: Place) -> _Explained:
    relation, bound = found[2] or "==", found[3]
    field = place.field or ""
    code = _LENGTH_CODES.get(field, "out_of_range")
    if field == "vectors" and relation == "<=":
        code = "too_many_vectors"
    size = len(place.value) if isinstance(place.value, str | list | dict) else "an unknown number of"
    unit = {"array": "items", "object": "members", "str": "characters"}.get(found[1], "bytes")
    needs = {">=": "needs at least", "<=": "takes at most", "==": "needs exactly"}[relation]
    return code, f"This member {needs} {bound} {unit}; it has {size}.", ()


def _number_range(_: re.Match[str], place: Place) -> _Explained:
    return "out_of_range", f"{_show(place.value)} is too large for a number here. Send a finite float64.", ()


def _bad_base64(_: re.Match[str], __: Place) -> _Explained:
    message = "This is not strict base64. Use the standard alphabet with padding and without line breaks."
    return "invalid_base64", message, ()


_EXPLAINERS: tuple[tuple[str, Callable[[re.Match[str], Place], _Explained]], ...] = (
    (r"Object missing required field `(.*)`", _missing_field),
    (r"Invalid (?:enum )?value (?:.*)", _unknown_word),
    (r"Expected `str` matching regex '(.*)'", _wrong_pattern),
    (r"Expected `(\w+)` of length (?:(>=|<=) )?(\d+)", _wrong_length),
    (r"Expected `(\w+)` (>=|<=|>|<) (.*)", _out_of_bounds),
    (r"Expected `([^`]*)`(?:, got `.*`)?", _wrong_type),
    (r"(?:Number|Integer value) out of range", _number_range),
    (r"Invalid base64 encoded string", _bad_base64),
)

_TYPE_NAMES = {
    "array": "a list",
    "object": "an object",
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "null": "null",
    "bytes": "a base64 string",
}

_WINDOWS = ("prompt_window", "generation_window", "exclude_prompt_window", "exclude_generation_window")
_GENERATION_POSITIONS = ("generation_positions", "exclude_generation_positions")
_LISTS = ("prompt_tokens", "prompt_positions", "generation_tokens", "generation_positions")

_BOUND_CODES = dict.fromkeys(_GENERATION_POSITIONS, "invalid_position") | dict.fromkeys(_WINDOWS, "invalid_window")
"""Fields whose lower bound has a code of its own."""

_LENGTH_CODES = (
    dict.fromkeys(_WINDOWS, "invalid_window")
    | dict.fromkeys((*_LISTS, *(f"exclude_{name}" for name in _LISTS)), "empty_selection")
    | {"shape": "shape_mismatch"}
)
"""Fields whose length has a code of its own."""


# Words for people


def _show(value: Any) -> str:
    if value is ABSENT:
        return "nothing"
    if isinstance(value, msgspec.Raw):
        return cut(bytes(value).decode())
    if isinstance(value, str):
        return json.dumps(cut(value), ensure_ascii=False)
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return json.dumps(value)


def _listed(words: list[str]) -> str:
    # Sorted, so that the server's structs and a client's generated ones say the same.
    return ", ".join(f"`{word}`" for word in sorted(words))


def _nearest(given: str, known: list[str]) -> str:
    close = difflib.get_close_matches(cut(given), sorted(known), n=1)
    return f" Did you mean `{close[0]}`?" if close else ""
