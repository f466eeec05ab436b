"""This program and its peers side by side on the same work; see --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from t5_fsdp.cli.dispatch import script

if __name__ == "__main__":
    script("benchmark")
