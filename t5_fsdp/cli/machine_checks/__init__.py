"""What `doctor` looks at, a subject a module; a check never raises, it returns findings."""
