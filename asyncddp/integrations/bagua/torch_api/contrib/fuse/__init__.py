"""Bagua's ``bagua.torch_api.contrib.fuse``: fused optimizers."""
