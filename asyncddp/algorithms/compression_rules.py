"""Rules on which compressors an algorithm may use, based on known convergence guarantees."""

from __future__ import annotations

import logging
from collections.abc import Set

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.method_traits import CompressionUse
from asyncddp.compression import Compressor, ErrorFeedback, compressor_for
from asyncddp.errors import ArgumentError

logger = logging.getLogger("asyncddp")

_OPTIMIZERS = {"lr": "any optimizer", "momentum": "momentum", "betas": "Adam and its kin"}
"""Description of the optimizers that have an option, keyed by the option."""


def compressor_of(
    method: Algorithm,
    compression: str | Compressor | None,
    error_feedback: bool | None,
    *,
    plain_compression: bool,
) -> Compressor | None:
    """Choose the compressor for a method's buckets; None for no compression.

    Args:
        method: The method.
        compression: The compressor that the user asks for; None for the method's default.
        error_feedback: Whether to use error feedback; None to use it if the compressor needs it.
        plain_compression: Whether the user accepts that compressed parameters do not agree.

    Raises:
        UnknownNameError: No compressor has that name.
        ArgumentError: The method does not converge with it, or cannot use it.
    """
    if error_feedback not in (None, True, False):
        raise ArgumentError(
            f"argument error_feedback: expected True, False or None, got {error_feedback!r}"
        )
    wanted = method.default_compression if compression is None else compression
    if wanted is None:
        _refuse_alone(error_feedback, plain_compression=plain_compression)
        return None
    compressor = compressor_for(method.name, wanted)
    if all(pattern.one_sided for pattern in method.how):
        raise ArgumentError(
            f"argument compression: {method.name} averages in windows, which hold tensors as they "
            "are; expected None, or a method that sends messages, such as 'choco_sgd'"
        )
    if method.compression is CompressionUse.AVERAGES:
        return with_error_feedback(compressor, error_feedback)
    _check_without_feedback(method, compressor, error_feedback, plain_compression=plain_compression)
    return compressor


def _check_without_feedback(
    method: Algorithm,
    compressor: Compressor,
    error_feedback: bool | None,
    *,
    plain_compression: bool,
) -> None:
    """Raise an ArgumentError if compression without error feedback does not suit the method."""
    if error_feedback:
        sends = method.compression is CompressionUse.DIFFERENCES
        why = (
            "makes up for what is lost by itself; expected None"
            if sends
            else "averages parameters, which error feedback cannot repay; expected None, or "
            "'choco_sgd', which sends differences"
        )
        raise ArgumentError(f"argument error_feedback: {method.name} {why}")
    if method.compression is CompressionUse.PERTURBS and not plain_compression:
        raise ArgumentError(
            f"argument compression: {method.name} averages parameters, and what {compressor!r} "
            "loses of them keeps ranks apart, however long they train; expected algorithm="
            "'choco_sgd' or 'low_precision_decentralized', which send differences, or "
            "plain_compression=True to have it all the same"
        )
    if isinstance(compressor, ErrorFeedback):
        raise ArgumentError(
            f"argument compression: {method.name} expects a compressor without error feedback, got "
            f"{compressor!r}; give its inner one"
        )
    method.check_compressor(compressor)


def _refuse_alone(error_feedback: bool | None, *, plain_compression: bool) -> None:
    for argument, given in (
        ("error_feedback", bool(error_feedback)),
        ("plain_compression", plain_compression),
    ):
        if given:
            raise ArgumentError(
                f"argument {argument}: got True without compression; name a compressor as well"
            )


def warn_of_cost(who: str, compressor: Compressor | None, options: Set[str] | None) -> None:
    """Log a warning if gradient compression costs accuracy with the optimizer's options.

    Args:
        who: Name of the caller.
        compressor: The compressor, with error feedback if it is used.
        options: Names of the optimizer's options that are not zero; None where it is not known.
    """
    inner = compressor.inner if isinstance(compressor, ErrorFeedback) else None
    known = () if inner is None else inner.costly_with
    costs = [_OPTIMIZERS[one] for one in known if options is None or one in options]
    if costs:
        logger.warning(
            "%s: averages of gradients in %r, with error feedback, cost accuracy with %s at an "
            "unchanged step size, as the guide 'Choose a method' shows. Take 'bytegrad', or the "
            "compressor 'qsgd_int8', which do not, or a smaller step size",
            *(who, inner, " and ".join(costs)),
        )


def with_error_feedback(compressor: Compressor, error_feedback: bool | None) -> Compressor:
    """Wrap a compressor with error feedback if that is requested or needed.

    Raises:
        ArgumentError: It has error feedback, but ``error_feedback`` is False.
    """
    has = isinstance(compressor, ErrorFeedback)
    if has and error_feedback is False:
        raise ArgumentError(
            f"argument error_feedback: got False and {compressor!r}; give its inner compressor"
        )
    wants = compressor.wants_error_feedback if error_feedback is None else error_feedback
    return ErrorFeedback(compressor) if wants and not has else compressor
