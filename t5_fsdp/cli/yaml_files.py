"""YAML files of options: read with the place of every value, and written so that they read back.

Two rules differ from PyYAML's: 3e-4 is a number (YAML 1.2; PyYAML reads text), and a date is text.
Writing follows the same rules.
"""

from __future__ import annotations

import difflib
import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

import yaml

from t5_fsdp.errors import UserError

_FLOAT_TAG = "tag:yaml.org,2002:float"
_TIMESTAMP_TAG = "tag:yaml.org,2002:timestamp"
_FLOAT = re.compile(
    r"^(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)"
    r"|\.(?:nan|NaN|NAN))$"
)
_MOST_VALUES = 1_000_000  # of a file, with what its aliases repeat


class _Loader(yaml.SafeLoader):
    def get_single_node(self) -> yaml.Node | None:
        """Refuses aliases of aliases that stand for more values than anybody means."""
        node = super().get_single_node()
        if node is not None and (count := _num_values(node)) > _MOST_VALUES:
            problem = f"aliases (*) of aliases make {count:.3g} values, more than {_MOST_VALUES:,}"
            raise yaml.constructor.ConstructorError(problem=problem)
        return node


def _num_values(root: yaml.Node) -> int:
    """Values below a node, and itself; an alias counts as what it repeats."""
    counts: dict[int, int] = {}

    def count(node: yaml.Node) -> int:
        if id(node) not in counts:
            counts[id(node)] = 1  # an alias that leads back into itself ends here
            parts = node.value if isinstance(node, yaml.CollectionNode) else []
            below = itertools.chain(*parts) if isinstance(node, yaml.MappingNode) else parts
            counts[id(node)] = 1 + sum(map(count, below))
        return counts[id(node)]

    return count(root)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # PyYAML folds these line breaks away unless they stand escaped in double quotes.
    style = '"' if re.search("[\x85\u2028\u2029\ufeff]", text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)

for _side in (_Loader, _Dumper):
    _side.yaml_implicit_resolvers = {
        first: [(tag, rule) for tag, rule in rules if tag not in (_FLOAT_TAG, _TIMESTAMP_TAG)]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _side.add_implicit_resolver(_FLOAT_TAG, _FLOAT, list("-+0123456789."))


def to_yaml(values: dict[str, Any]) -> str:
    """The values as YAML, in the order given; `read_yaml` reads an equal mapping back."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def scalar(text: str) -> Any:
    """The value that a text of the command line stands for, or the text where it is no YAML."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


def read_yaml(path: str, option: str = "--config ") -> tuple[dict[str, Any], dict[str, str]]:
    """Read a YAML mapping.

    Args:
        path: of the file.
        option: how the user gave it, for messages; "" where nobody did.

    Returns:
        the values, and "file, line N" of its keys by dotted name, two levels deep.

    Raises:
        UserError: the file cannot be read, is no YAML mapping or gives a key twice.
    """
    text = _read_text(path, option)
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                raise UserError(f"{path} is empty; write options there, e.g. train: {{epochs: 3}}")
            if not isinstance(node, yaml.MappingNode):
                raise UserError(f"{path} is not a mapping; write options as `section:` and values")
            problems = _duplicate_keys(node, path)
            values = {} if problems else loader.construct_document(node)
            # A ValueError where an alias leads back into itself, which nothing later would survive.
            json.dumps(values, skipkeys=True, default=str)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise UserError(_syntax_problem(path, error)) from error
    except RecursionError as error:
        raise UserError(f"{path} is nested too deeply; two levels are enough") from error
    except ValueError as error:
        raise UserError(f"{path} has a value that cannot be read: {error}") from error
    if problems:
        raise UserError(*problems)
    return values, _origins(node, path)


def _read_text(path: str, option: str) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{option}{path}: no such file{_similar_file(path)}") from None
    except IsADirectoryError:
        raise UserError(f"{option}{path}: this is a folder; give a YAML file in it") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{option}{path}: not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{option}{path}: cannot be read: {reason}") from None


def _similar_file(path: str) -> str:
    folder, name = os.path.split(path)
    try:
        names = [other for other in os.listdir(folder or ".") if other.endswith((".yaml", ".yml"))]
    except OSError:
        return f"; folder {folder} does not exist either"
    close = difflib.get_close_matches(name, names, 1)
    return f"; did you mean {os.path.join(folder, close[0])}?" if close else "; check the path"


def _syntax_problem(path: str, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    place = f"{path}, line {mark.line + 1}" if mark else path
    reason = getattr(error, "problem", None) or getattr(error, "reason", None) or error
    advice = "; indent with spaces, not tabs" if "\\t" in str(reason) else ""
    return f"{place}: not valid YAML: {reason}{advice}"


def _duplicate_keys(root: yaml.Node, path: str) -> list[str]:
    problems = []
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            first_lines: dict[tuple[str, str], int] = {}
            for key, value in node.value:
                waiting.append(value)
                if isinstance(key, yaml.ScalarNode):
                    name, line = (key.tag, key.value), key.start_mark.line + 1
                    if name in first_lines:
                        problems.append((line, key.value, first_lines[name]))
                    first_lines.setdefault(name, line)
    return [
        f"{path}, line {line}: {key} is given twice (first on line {first}); keep one of them"
        for line, key, first in sorted(problems)
    ]


def _origins(root: yaml.MappingNode, path: str) -> dict[str, str]:
    origins = {}
    for key, value in root.value:
        origins[str(key.value)] = f"{path}, line {key.start_mark.line + 1}"
        if isinstance(value, yaml.MappingNode):
            for inner, _ in value.value:
                name = f"{key.value}.{inner.value}"
                origins[name] = f"{path}, line {inner.start_mark.line + 1}"
    return origins
