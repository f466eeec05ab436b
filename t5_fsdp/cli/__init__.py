"""One short module a command; only here the rooms meet."""
