"""The command line and the YAML files of a run, turned into a checked `Config`.

jsonargparse knows the types and writes `--help`. It stops at the first problem, though, and a
user wants all of them at once; so each option is given to it alone, and what it refuses is
collected. Nothing here imports torch: `--help` answers at once.

    layers = parse_layers(argv, command="train", description="...", config_required=True)
    config = resolve(layers)
"""

from t5_fsdp.cli.options.layers import Layers
from t5_fsdp.cli.options.parsing import Extra, parse_layers
from t5_fsdp.cli.options.program import check_own, layers_of_program
from t5_fsdp.cli.options.resolving import dump_yaml, look_over, resolve
from t5_fsdp.cli.options.table import Option, Section, described_sections, run_options

__all__ = [
    "Extra",
    "Layers",
    "Option",
    "Section",
    "check_own",
    "described_sections",
    "dump_yaml",
    "layers_of_program",
    "look_over",
    "parse_layers",
    "resolve",
    "run_options",
]
