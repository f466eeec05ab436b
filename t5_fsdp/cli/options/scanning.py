"""The command line, cut into options and values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from t5_fsdp.cli.options.messages import shown, type_in_words, unknown_option
from t5_fsdp.cli.options.table import CONFIG_EXAMPLE, Option, mapping_with, options_by_name


@dataclass
class Scan:
    """The command line, cut into options and values; values are still text.

    Attributes:
        entries: of options that take a mapping, those that were given one by one.
    """

    given: dict[str, str] = field(default_factory=dict)
    entries: dict[str, dict[str, str]] = field(default_factory=dict)
    own: dict[str, str] = field(default_factory=dict)
    config_files: list[str] = field(default_factory=list)
    config_without_value: bool = False
    positionals: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    help: bool = False
    print_config: bool = False


def scan_words(
    argv: Sequence[str], own_options: Mapping[str, Option], *, takes_files: bool
) -> Scan:
    """Cut the words of a command line; what is wrong with them is in `problems`."""
    scan = Scan()
    waiting = list(argv)
    while waiting:
        word = waiting.pop(0)
        if word in ("-h", "--help"):
            scan.help = True
        elif word == "--print_config":
            scan.print_config = True
        elif word == "--":
            _take_files(waiting, scan, takes_files)
            break
        elif word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            has_value = bool(equals) or (bool(waiting) and not _looks_like_option(waiting[0]))
            if has_value and not equals:
                value = waiting.pop(0)
            _take_option(name, value if has_value else None, scan, own_options)
        elif word.startswith("-") and word != "-" and not _is_number(word):
            scan.problems.append(f"unknown option {word}; options are written --section.option")
        else:
            _take_files([word], scan, takes_files)
    return scan


def _looks_like_option(word: str) -> bool:
    return word.startswith("--") or word == "-h"


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _take_files(words: Iterable[str], scan: Scan, takes_files: bool) -> None:
    for word in words:
        if takes_files:
            scan.positionals.append(word)
        else:
            scan.problems.append(
                f"{shown(word)} belongs to no option; options are written --section.option value"
            )


def _take_option(
    name: str, value: str | None, scan: Scan, own_options: Mapping[str, Option]
) -> None:
    known = {**options_by_name(), **own_options}
    if name == "config":
        if value:
            scan.config_files.append(value)
        else:
            scan.config_without_value = True
            scan.problems.append(f"--config needs a value: a YAML file, e.g. {CONFIG_EXAMPLE}")
    elif name == "print_config":
        scan.problems.append("--print_config takes no value")
    elif (parent := mapping_with(name, known)) is not None:
        if value is None:
            scan.problems.append(f"--{name} needs a value")
        else:
            scan.entries.setdefault(parent, {})[name[len(parent) + 1 :]] = value
    elif name not in known:
        scan.problems.append(unknown_option(name, known, written=f"--{name}"))
    elif value is None and known[name].type is not bool:
        scan.problems.append(f"--{name} needs a value: {type_in_words(known[name].type)}")
    else:
        (scan.own if name in own_options else scan.given)[name] = "true" if value is None else value
