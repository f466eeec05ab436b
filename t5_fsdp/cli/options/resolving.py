"""Layers, laid over defaults and a checkpoint's configuration, and checked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from t5_fsdp.cli.options.checking import Found, check_layers
from t5_fsdp.cli.options.layers import Layers, merge, names_in
from t5_fsdp.cli.yaml_files import to_yaml
from t5_fsdp.config import BEST_METRICS, Config, DataConfig, to_dict
from t5_fsdp.distributed import print_once
from t5_fsdp.errors import EXIT_DONE, UserError


def resolve(
    layers: Layers,
    base: dict[str, Any] | None = None,
    check_data: Callable[[DataConfig], Sequence[str]] | None = None,
    own_metrics: Collection[str] | None = (),
) -> Config:
    """The configuration of a run: defaults <- base <- files <- command line, checked.

    Sections are merged option by option; an option whose value is a mapping (model.config) is
    replaced as a whole, but for single entries of the command line (--model.config.d_model 64).

    Args:
        layers: from `parse_layers`.
        base: a configuration to start from, as nested dicts, e.g. that of a checkpoint.
        check_data: what can be said against the data section, e.g. `source_problems`.
        own_metrics: as of `value_problems`.

    Raises:
        UserError: lists every unknown option, wrong type, impossible value and missing file.
        SystemExit: code 0, after `--print_config` has printed the configuration.
    """
    found = look_over(layers, base, check_data, own_metrics)
    if found.problems:
        raise UserError(*found.problems)
    if layers.print_config:
        print_once(dump_yaml(found.config))
        raise SystemExit(EXIT_DONE)
    return found.config


def look_over(
    layers: Layers,
    base: dict[str, Any] | None = None,
    check_data: Callable[[DataConfig], Sequence[str]] | None = None,
    own_metrics: Collection[str] | None = (),
) -> Found:
    """As `resolve`, for who can go on with what there is: the problems are returned."""
    base = base or {}
    origins = dict.fromkeys(names_in(base), "the checkpoint's configuration")
    for name in names_in(layers.files):
        origins.pop(name, None)
    origins |= layers.origins
    for name in names_in(layers.flags):
        if not isinstance(layers.flags.get(name), dict):
            origins.pop(name, None)
    merged = merge(merge(base, layers.files), layers.flags)
    if own_metrics is not None:  # the checkpoint was trained by a program that has it
        own_metrics = {*own_metrics, *_own_metric_of(base)}
    # What is printed may be meant for a machine that has the data.
    check_data = None if layers.print_config else check_data
    return check_layers(
        merged, origins, check_values=True, check_data=check_data, own_metrics=own_metrics
    )


def _own_metric_of(base: Mapping[str, Any]) -> set[str]:
    name = (base.get("evaluation") or {}).get("best_metric")
    return {name} - set(BEST_METRICS) if name else set()


def dump_yaml(config: Config) -> str:
    """The configuration as YAML that `--config` reads back to an equal one."""
    return to_yaml(to_dict(config))
