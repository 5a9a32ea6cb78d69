"""JSON Schema of the wire: what msgspec exports, brought into the published shape; and the view that codegen reads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

Json = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"

BASE64_PATTERN = r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?(?![\s\S])"
"""Strict base64. `(?![\\s\\S])` and not `$`: Python's `$` lets a trailing newline through."""


def published(roots: list[type], *, title: str, open_objects: bool = False) -> Json:
    """The published schema of some structs: a document with `$defs`, whose root is the first of them.

    open_objects: leave out `additionalProperties: false`, for answers, to which a newer server may add members.
    """
    references, definitions = msgspec.json.schema_components(roots, ref_template="#/$defs/{name}")
    document: Json = {
        "$schema": DIALECT,
        "title": title,
        **references[0],
        "$defs": {name: definitions[name] for name in sorted(definitions)},
    }
    if len(roots) > 1:
        del document["$ref"]
        document["anyOf"] = references
    structs = {struct.__name__: struct for struct in _structs(roots)}
    for name, definition in document["$defs"].items():
        _write_factory_defaults(definition, structs[name])
    for node in _nodes(document):
        for tweak in _TWEAKS:
            tweak(node)
        if open_objects:
            node.pop("additionalProperties", None) if node.get("additionalProperties") is False else None
    return document


def codegen_view(document: Json, *, open_words: bool = False) -> Json:
    """The private view that the code generator reads; never published.

    Members with a default are listed as required, so that the generator writes `x: T = default` rather than an unset
    marker; base64 strings are marked as bytes. open_words: words of closed sets become plain strings, for answers, in
    which a newer server may use a word that an older client does not know.
    """
    view = copy.deepcopy(document)
    for node in _nodes(view):
        properties = node.get("properties")
        if isinstance(properties, dict):
            defaulted = [name for name, member in properties.items() if "default" in member]
            required = node.get("required", [])
            node["required"] = [name for name in properties if name in required or name in defaulted]
        if node.get("contentEncoding") == "base64":
            for keyword in ("pattern", "minLength", "maxLength", "contentEncoding"):
                node.pop(keyword, None)
            node["format"] = "byte"
            for keyword, value in node.pop("x-bytes", {}).items():
                node[keyword] = value
        _flatten_nullable_union(node)
        if open_words:
            node.pop("enum", None)
    return view


def _flatten_nullable_union(node: Json) -> None:
    """A union inside of `... or null` hides its discriminator from the generator, which then leaves the tags out."""
    options = node.get("anyOf", [])
    inner = [option for option in options if "discriminator" in option]
    if len(inner) == 1 and len(options) > 1:
        node["anyOf"] = [*inner[0]["anyOf"], *(option for option in options if option is not inner[0])]
        node["discriminator"] = inner[0]["discriminator"]


def _structs(roots: list[type]) -> Iterator[type]:
    """Every struct that the roots lead to."""
    pending: list[Any] = [msgspec.inspect.type_info(root) for root in roots]
    seen: set[type] = set()
    while pending:
        info = pending.pop()
        if isinstance(info, msgspec.inspect.StructType):
            if info.cls in seen:
                continue
            seen.add(info.cls)
            yield info.cls
            pending += [field.type for field in info.fields]
        else:
            parts = ("type", "item_type", "key_type", "value_type")
            pending += [getattr(info, part) for part in parts if hasattr(info, part)]
            pending += [*getattr(info, "types", ()), *getattr(info, "item_types", ())]


def _write_factory_defaults(definition: Json, struct: Any) -> None:
    """msgspec leaves out defaults that a factory makes."""
    for field in msgspec.structs.fields(struct):
        if field.default_factory is not msgspec.NODEFAULT:
            default = msgspec.to_builtins(field.default_factory())
            definition["properties"][field.encode_name]["default"] = default


def _nodes(value: Any) -> Iterator[Json]:
    """Every schema object in a document; property maps and other maps of names are walked through, not yielded."""
    if isinstance(value, list):
        for item in value:
            yield from _nodes(item)
    elif isinstance(value, dict):
        yield value
        for keyword, inner in value.items():
            if keyword in ("properties", "$defs"):
                for member in inner.values():
                    yield from _nodes(member)
            elif keyword not in ("default", "enum", "const", "required", "discriminator", "x-bytes"):
                yield from _nodes(inner)


def _type_enums(node: Json) -> None:
    words = node.get("enum")
    if words and all(isinstance(word, str) for word in words):
        node["type"] = "string"


def _write_tags(node: Json) -> None:
    """Tags become constants, listed first."""
    kind = node.get("properties", {}).get("kind")
    if kind is not None and "kind" in node.get("required", ()):
        words = kind.get("enum", ())
        if len(words) == 1:
            rest = {name: member for name, member in node["properties"].items() if name != "kind"}
            node["properties"] = {"kind": {"const": words[0], "type": "string"}, **rest}


def _write_base64(node: Json) -> None:
    if node.get("contentEncoding") != "base64":
        return
    node["pattern"] = BASE64_PATTERN
    # The lengths of the text, four characters for three bytes, can't be turned back into lengths of bytes.
    lengths = {keyword: node[keyword] // 4 * 3 for keyword in ("minLength", "maxLength") if keyword in node}
    if lengths:
        node["x-bytes"] = lengths


_TWEAKS: tuple[Callable[[Json], None], ...] = (_write_tags, _type_enums, _write_base64)
