"""Training algorithms: one subclass of ``Algorithm`` per file, registered by name."""
