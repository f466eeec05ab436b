"""`python -m t5_fsdp COMMAND`, for torchrun's -m."""

from t5_fsdp.cli.dispatch import entry

if __name__ == "__main__":
    entry()
