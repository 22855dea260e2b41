"""Bagua's ``bagua.torch_api.checkpoint``: saving and loading of checkpoints."""

from asyncddp.integrations.bagua.checkpointing import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
