"""Summarize text files or standard input with a checkpoint; see --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from t5_fsdp.cli.dispatch import script

if __name__ == "__main__":
    script("summarize")
