r"""Operations on windows: tensors that neighbours write and read one-sided, without waiting.

Every rank of a window holds its own tensor x and, for each in-neighbour j, a *buffer* :math:`b_j`
of values that j has put there. ``win_put`` and ``win_accumulate`` write into the neighbours'
buffers, ``win_get`` reads a neighbour's tensor into this rank's own buffer, ``win_update`` averages
the buffers with this rank's own tensor. Only ``win_create`` and ``win_free`` are collective.
Buffers are in host memory.

A put completes even while its target computes or sleeps. A reader sees each neighbour's tensor
whole, of one version; a writer never waits for a reader. Accumulated values are collected exactly
once.
"""
