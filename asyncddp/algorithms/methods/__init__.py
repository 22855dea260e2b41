"""Training algorithms by name: one subclass of ``Algorithm`` per file, listed in the registry."""
