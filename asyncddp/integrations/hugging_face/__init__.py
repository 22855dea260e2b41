"""Trainer for Hugging Face's transformers that trains by any of asyncddp's algorithms.

::

    from asyncddp.integrations.hugging_face import DecentralizedTrainer

    trainer = DecentralizedTrainer(model, args, train_dataset=samples, topology="ring")
    trainer.train()

Other Trainers take :class:`DecentralizedTrainerMixin`, named before them. For scripts that use
accelerate there is :mod:`asyncddp.integrations.accelerate`.
"""

from __future__ import annotations

from asyncddp.install_commands import needed_package
from asyncddp.integrations.hugging_face.trainer import DecentralizedTrainerMixin

with needed_package("asyncddp.integrations.hugging_face needs transformers", "huggingface"):
    from transformers import Trainer

__all__ = ["DecentralizedTrainer", "DecentralizedTrainerMixin"]


class DecentralizedTrainer(DecentralizedTrainerMixin, Trainer):  # noqa: D101
    __doc__ = DecentralizedTrainerMixin.__doc__
