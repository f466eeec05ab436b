"""Summaries and their ROUGE."""
