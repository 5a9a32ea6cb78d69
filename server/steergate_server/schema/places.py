"""Follows a path through a JSON document and the type it should have had, side by side."""

import re
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import msgspec

from .errors import PathPart

__all__ = ["ABSENT", "Place", "bad_key", "cut", "known_fields", "resolve", "tag_fields", "tags", "words"]

ABSENT = object()
"""Stands for a value that the document does not have."""

_SHOWN = 60


class Place(NamedTuple):
    """A place in a document."""

    path: tuple[PathPart, ...]
    expected: Any
    """The type expected there; `Any` where it is not known."""
    value: Any
    field: str | None
    """The struct field that the path last went through, if it ends in one or in an item of one."""


def resolve(expected: Any, tree: Any, path: str) -> Place:
    """Follow msgspec's path, finding the real key wherever it writes `[...]`."""
    place = Place((), expected, tree, None)
    for name, index, _ in re.findall(r"\.(\w+)|\[(\d+)\]|(\[\.\.\.\])", path):
        if name:
            place = _into_member(place, name)
        elif index:
            place = _into_item(place, int(index))
        else:
            key = _failing_key(place)
            if key is None:
                return place
            place = _into_member(place, key)
    return place


def _into_member(place: Place, name: str) -> Place:
    value = place.value.get(name, ABSENT) if isinstance(place.value, dict) else ABSENT
    path = (*place.path, cut(name))
    struct = _struct_for(place.expected, place.value)
    if struct is not None:
        if name == struct.__struct_config__.tag_field or (
            len(tags(place.expected)) > 1 and name in tag_fields(place.expected)
        ):
            names = sorted(tags(place.expected)) or [struct.__struct_config__.tag]
            return Place(path, Literal[tuple(names)], value, name)
        types = {field.encode_name: field.type for field in msgspec.structs.fields(struct)}
        return Place(path, types.get(name, Any), value, name)
    return Place(path, _dict_types(place.expected)[1], value, None)


def _into_item(place: Place, index: int) -> Place:
    value = place.value[index] if isinstance(place.value, list) and index < len(place.value) else ABSENT
    item: Any = Any
    for option in _options(place.expected):
        if get_origin(option) is list:
            item = get_args(option)[0]
        elif get_origin(option) is tuple:
            item = get_args(option)[index]
    return Place((*place.path, index), item, value, place.field)


def _failing_key(place: Place) -> str | None:
    """Find the first member whose value alone does not decode: msgspec stops at the first one, too."""
    members: dict[str, Any] = place.value if isinstance(place.value, dict) else {}
    decoder = msgspec.json.Decoder(_dict_types(place.expected)[1])
    for key, value in members.items():
        try:
            decoder.decode(msgspec.json.encode(value))
        except msgspec.ValidationError:
            return key
    return None


def bad_key(place: Place) -> Place:
    key_type = _dict_types(place.expected)[0]
    for key in place.value if isinstance(place.value, dict) else ():
        try:
            msgspec.convert(key, key_type)
        except msgspec.ValidationError:
            return Place((*place.path, cut(key)), key_type, key, None)
    return place


def _options(expected: Any) -> tuple[Any, ...]:
    """Take a type apart into the members of its union, without annotations."""
    while get_origin(expected) is Annotated:
        expected = get_args(expected)[0]
    if get_origin(expected) in (Union, UnionType):
        return tuple(leaf for option in get_args(expected) for leaf in _options(option))
    return (expected,)


def _structs(expected: Any) -> list[Any]:
    return [option for option in _options(expected) if hasattr(option, "__struct_config__")]


def tags(expected: Any) -> dict[str, Any]:
    return {s.__struct_config__.tag: s for s in _structs(expected) if s.__struct_config__.tag_field}


def tag_fields(expected: Any) -> set[str]:
    return {struct.__struct_config__.tag_field for struct in _structs(expected)}


def _struct_for(expected: Any, value: Any) -> Any:
    structs = _structs(expected)
    if len(structs) > 1 and isinstance(value, dict):
        for struct in structs:
            if value.get(struct.__struct_config__.tag_field) == struct.__struct_config__.tag:
                return struct
    return structs[0] if structs else None


def _dict_types(expected: Any) -> tuple[Any, Any]:
    for option in _options(expected):
        if get_origin(option) is dict:
            key, value = get_args(option)
            return key, value
    return Any, Any


def words(expected: Any) -> list[str]:
    return [word for option in _options(expected) if get_origin(option) is Literal for word in get_args(option)]


def known_fields(place: Place) -> list[str]:
    struct = _struct_for(place.expected, place.value)
    if struct is None:
        return []
    config = struct.__struct_config__
    names = [field.encode_name for field in msgspec.structs.fields(struct)]
    return [config.tag_field, *names] if config.tag_field else names


def cut(text: str) -> str:
    """Shorten a name for a message or a path: its length is the client's."""
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
