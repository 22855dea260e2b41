"""Communication operations (verbs) that users call: collectives, neighbour averages, windows.

Every verb comes as ``verb(...)``, which gives the result, and ``verb_nonblocking(...)``, which
gives a :class:`~asyncddp.engine.Handle`; where the result has the input's shape there is also
``verb_``, which writes it into the input. Here belong signatures and checks of arguments; users and
all rooms above call them. Results are outside autograd, on the input's device.
"""
