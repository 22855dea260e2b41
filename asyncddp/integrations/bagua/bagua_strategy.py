"""Mixin of ``BaguaStrategy``, shared by the packages ``lightning`` and ``pytorch_lightning``."""

from __future__ import annotations

from typing import Any

from asyncddp.errors import UnknownNameError
from asyncddp.integrations.bagua.torch_api.algorithms import Algorithm, GlobalAlgorithmRegistry
from asyncddp.registry import nearest


class BaguaStrategyMixin:
    """Strategy of Lightning's Trainer that takes Bagua's names of algorithms and their options.

    Args:
        algorithm: ``"gradient_allreduce"``, ``"bytegrad"``, ``"decentralized"``,
            ``"low_precision_decentralized"``, ``"qadam"`` (with one ``QAdamOptimizer``) or
            ``"async"``.
        flatten: Accepted for compatibility with Bagua: buckets are always flat.
        accelerator, parallel_devices, checkpoint_io, precision_plugin: As in Lightning's
        strategies.
        cluster_environment: Accepted for compatibility with Bagua: ranks are those of the world.
        **bagua_kwargs: Options of the algorithm, by Bagua's names.

    Raises:
        UnknownNameError: No algorithm has the name.
    """

    strategy_name = "bagua"

    def __init__(
        self,
        algorithm: str = "gradient_allreduce",
        flatten: bool = True,
        accelerator: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **bagua_kwargs: Any,
    ) -> None:
        if algorithm not in (known := GlobalAlgorithmRegistry.available_algorithms()):
            raise UnknownNameError(
                f"BaguaStrategy: argument algorithm: unknown algorithm {algorithm!r}; known are: "
                f"{', '.join(known)}.{nearest(algorithm, known)}"
            )
        name, arguments = algorithm, bagua_kwargs
        if algorithm != "qadam":  # whose declaration needs the optimizer, which comes later
            declared: Any = Algorithm.init(algorithm, **bagua_kwargs)
            method = declared.reify(None)
            name, arguments = method.name, dict(method.arguments)
        of_lightning: Any = super()
        of_lightning.__init__(
            name,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            **arguments,
        )

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the name ``bagua``, which Lightning before 2.3 uses for a package of its own."""
        strategy_registry.register("bagua", cls, "Bagua's algorithms by asyncddp", override=True)
