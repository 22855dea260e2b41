"""Bagua's ``bagua.torch_api.model_parallel``."""
