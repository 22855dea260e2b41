"""Integrations with other frameworks, each in a package of its name."""
