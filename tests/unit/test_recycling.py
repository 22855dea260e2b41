"""Memory comes back when the last tensor that uses it is gone, and not before."""

import gc
import threading

import pytest
import torch

import asyncddp as bf
from asyncddp.memory.recycling import Shelf


def test_a_block_is_lent_to_one_tensor_at_a_time():
    shelf = Shelf(smallest=1, limit=1 << 20)
    one, two = shelf.empty((8,), torch.float32), shelf.empty((8,), torch.float32)
    assert one.data_ptr() != two.data_ptr()
    assert shelf.waiting == 0


@pytest.mark.parametrize(
    "derive", [lambda t: t[2:4], lambda t: t.view(torch.int32), torch.Tensor.numpy]
)
def test_a_view_keeps_the_block(derive):
    shelf = Shelf(smallest=1, limit=1 << 20)
    whole = shelf.empty((8,), torch.float32)
    view = derive(whole)
    del whole
    gc.collect()
    assert shelf.waiting == 0
    del view
    gc.collect()
    assert shelf.waiting == 32


def test_blocks_are_aligned_and_of_the_asked_shape():
    shelf = Shelf(smallest=1, limit=1 << 20)
    for dtype in (torch.bool, torch.bfloat16, torch.complex128):
        tensor = shelf.empty((3, 5), dtype)
        assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == ((3, 5), dtype, True)
        assert tensor.data_ptr() % 64 == 0


def test_small_tensors_are_plain_and_the_shelf_has_a_limit():
    shelf = Shelf(smallest=100, limit=1000)
    small = shelf.empty((10,), torch.uint8)
    del small
    gc.collect()
    assert shelf.waiting == 0
    held = [shelf.empty((400,), torch.uint8) for _ in range(4)]
    held.clear()
    gc.collect()
    assert shelf.waiting <= 1000
    del held
    too_large = shelf.empty((2000,), torch.uint8)
    del too_large
    gc.collect()
    assert shelf.waiting <= 1000


def test_threads_share_a_shelf_without_sharing_blocks():
    shelf = Shelf(smallest=1, limit=1 << 24)
    wrong = []

    def work(mark: int) -> None:
        for _ in range(300):
            tensor = shelf.empty((1024,), torch.int32).fill_(mark)
            if not bool((tensor == mark).all()):
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_results_that_the_user_keeps_are_never_overwritten():
    def case() -> list[float]:
        kept = []
        for step in range(6):
            x = torch.full((1 << 19,), float(bf.rank() + 10 * step))
            kept.append(bf.neighbor_allreduce(x))
        return [float(t.min()) for t in kept if t.min() == t.max()]

    with bf.local_world(2) as world:
        assert world.run(case) == [[0.5 + 10 * step for step in range(6)]] * 2


def test_results_that_the_user_drops_are_used_again_without_the_garbage_collector():
    def case() -> set[int]:
        x = torch.ones(1 << 19)
        return {bf.neighbor_allreduce(x).data_ptr() for _ in range(40)}

    gc.disable()
    try:
        with bf.local_world(2) as world:
            places = set().union(*world.run(case))
    finally:
        gc.enable()
    assert len(places) <= 8, f"40 results of 2 ranks lay in {len(places)} places"
