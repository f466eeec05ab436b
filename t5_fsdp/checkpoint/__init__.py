"""Sharded checkpoints: write, find, read, export."""
