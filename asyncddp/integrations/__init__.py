"""Integrations with other frameworks, each in a package of its name.

Here belong tables of their names over what the library does anyway, and the glue that a framework
asks for. Users import them; nothing in the library does. No integration is a second engine.
"""
