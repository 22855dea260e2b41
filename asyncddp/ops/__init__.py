"""Communication operations that users call: collectives, neighbour averages, windows.

Every verb comes as ``verb(...)``, which returns the result, and ``verb_nonblocking(...)``, which
returns a :class:`~asyncddp.engine.Handle`; if the result has the input's shape there is also
``verb_``, which writes the result into the input. This package holds their signatures and argument
checks. Results are detached from autograd, on the input's device.
"""
