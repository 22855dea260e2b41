"""Stub of Bagua's ``bagua.torch_api.contrib.cached_dataset``: its names raise MissingNameError."""

from asyncddp.integrations.bagua.missing_names import refusing

__getattr__ = refusing(__name__)
