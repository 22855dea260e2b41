r"""Operations on windows: tensors that neighbours write and read one-sided, without waiting.

Every rank of a window holds its own tensor x and, for each in-neighbour j, a *buffer* :math:`b_j`:
what j has put there. ``win_put`` and ``win_accumulate`` write into the neighbours' buffers,
``win_get`` reads a neighbour's tensor into one's own buffer, ``win_update`` mixes the buffers into
one's own tensor. Only ``win_create`` and ``win_free`` are collective. Buffers lie on the host.

A put completes while its target computes, or sleeps. A reader sees each neighbour's tensor whole,
of one version; a writer never waits for a reader. What is accumulated is collected once.
"""
