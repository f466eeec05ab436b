"""Values from text and YAML, by the types of config.py; jsonargparse knows them."""

from __future__ import annotations

import functools
from typing import Any

import jsonargparse

from t5_fsdp.cli.options.table import Option


@functools.cache
def _parser(name: str, kind: Any) -> jsonargparse.ArgumentParser:
    parser = jsonargparse.ArgumentParser(exit_on_error=False, add_help=False, default_env=False)
    parser.add_argument(f"--{name}", type=kind)
    return parser


def from_text(option: Option, text: str) -> Any:
    """The value that a text of the command line stands for.

    Raises:
        jsonargparse.ArgumentError: it has another type.
    """
    if option.takes_mapping and not text.strip():
        raise jsonargparse.ArgumentError(None, "no mapping")
    parsed = _parser(option.name, option.type).parse_args([f"--{option.name}={text}"])
    return from_object(option, _pick(parsed, option.name))


def from_object(option: Option, value: Any) -> Any:
    """A value from YAML, checked; a whole number becomes a float where one is wanted.

    Raises:
        jsonargparse.ArgumentError: it has another type.
    """
    if isinstance(value, str) and option.takes_text:
        return value  # jsonargparse would read "null" or "[a]" once more
    keys_are_text = not isinstance(value, dict) or all(isinstance(key, str) for key in value)
    if (value is None and not option.takes_null) or not keys_are_text:
        raise jsonargparse.ArgumentError(None, "wrong type")
    if option.takes_mapping:
        if not isinstance(value, dict):
            raise jsonargparse.ArgumentError(None, "no mapping")
        return value  # likewise for the texts in it
    nested: Any = value
    for part in reversed(option.name.split(".")):
        nested = {part: nested}
    return _pick(_parser(option.name, option.type).parse_object(nested), option.name)


def _pick(parsed: jsonargparse.Namespace, name: str) -> Any:
    value = parsed[name]
    return value.as_dict() if isinstance(value, jsonargparse.Namespace) else value
