"""Bagua's ``bagua.torch_api.model_parallel``: only the stub of ``moe``."""
