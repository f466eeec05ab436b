"""This program and others side by side on the same work: time, memory, padding."""
