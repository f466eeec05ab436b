"""This program and its peers side by side on the same work; see --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from t5_fsdp.cli.benchmark import main
from t5_fsdp.distributed import leave

if __name__ == "__main__":
    leave(main(sys.argv[1:]))
