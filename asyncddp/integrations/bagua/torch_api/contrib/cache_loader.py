"""Bagua's ``bagua.torch_api.contrib.cache_loader``: its names say what to use in their place."""

from asyncddp.integrations.bagua.missing_names import refusing

__getattr__ = refusing(__name__)
