"""What a run needs and how long it takes, before anyone pays for it."""
