"""What files and command line say, before defaults; and how one layer is laid over another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from t5_fsdp.cli.options.table import section_types
from t5_fsdp.cli.yaml_files import read_yaml
from t5_fsdp.errors import UserError


@dataclass
class Layers:
    """What files and command line say, before defaults and a checkpoint's configuration.

    Attributes:
        files: the YAML files of `--config`, merged; later files win.
        flags: the overrides of the command line, nested as in a file.
        own: values of the command's own options, defaults included.
        positionals: the FILE arguments.
        origins: "file, line N" of the options and sections in `files`, by dotted name.
        print_config: `--print_config` was given; `resolve` prints and ends the process.
        dashes: before the names of options in messages; none where a program gave them.
    """

    files: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    positionals: list[str] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)
    print_config: bool = False
    dashes: str = "--"

    @property
    def config_argument(self) -> str:
        """What to give a configuration by, for messages."""
        return "--config FILE.yaml" if self.dashes else "config"


class Entries(dict[str, Any]):
    """Some of a mapping's entries, which go into what the layers below say; see `merge`."""


def names_in(values: Mapping[str, Any]) -> list[str]:
    """Dotted names of what a layer gives, the sections themselves included."""
    names = []
    for key, value in values.items():
        names.append(str(key))
        if key in section_types() and isinstance(value, dict):
            names += [f"{key}.{option}" for option in value]
    return names


def merge(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """One layer over another: sections option by option; see `Entries`."""
    merged = dict(lower)
    for key, value in upper.items():
        below = merged.get(key)
        if key in section_types() and isinstance(value, dict) and isinstance(below, dict):
            merged[key] = {
                **below,
                **{name: merged_value(below.get(name), inner) for name, inner in value.items()},
            }
        elif key in section_types() and key in merged and not isinstance(below, dict):
            continue  # it is no section: reported when the values are checked
        else:
            merged[key] = value
    return merged


def merged_value(below: Any, above: Any) -> Any:
    """An option of the upper layer over what the lower one says of it."""
    if below is None or not isinstance(above, Entries):
        return above
    if not isinstance(below, dict):
        return below  # reported when the values are checked
    merged = {**below, **above}
    return Entries(merged) if isinstance(below, Entries) else merged


def read_files(paths: Iterable[str], layers: Layers) -> list[str]:
    """Read YAML files into `layers`; what is wrong with them, a line each."""
    problems: list[str] = []
    for path in paths:
        try:
            values, origins = read_yaml(path, "--config " if layers.dashes else "")
        except UserError as error:
            problems += error.problems
            continue
        layers.files = merge(layers.files, values)
        layers.origins |= origins
    return problems
