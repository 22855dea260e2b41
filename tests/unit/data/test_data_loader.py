"""``prepare_data_loader``: a rank's share of a ``DataLoader``, and of one that resumes."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)

import asyncddp as bf
from asyncddp.data import partition
from tests.support.processes import REPO, run_to_end

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # few processors
]


class Stream(IterableDataset):
    """Numbers; divides itself among workers, as torch's documentation shows it."""

    def __init__(self, samples):
        self.samples, self.epoch = samples, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = get_worker_info()
        start, step = (info.id, info.num_workers) if info else (0, 1)
        for index in range(start, self.samples, step):
            yield 1000 * self.epoch + index


class SizedStream(Stream):
    def __len__(self):
        return self.samples


class StatefulStream(Stream):
    """Numbers, with a state of its own; counts what it had to read."""

    def __init__(self, samples):
        super().__init__(samples)
        self.read, self.first = 0, 0

    def __iter__(self):
        first, self.first = self.first, 0
        for index in range(first, self.samples):
            self.read, self.index = self.read + 1, index
            yield 1000 * self.epoch + index

    def state_dict(self):
        return {"next": self.index + 1}

    def load_state_dict(self, state):
        self.first = state["next"]


def shards(dataset, ranks, shuffle=None, **options):
    """Make the loaders of all ranks."""
    prepared = {key: options.pop(key) for key in ("seed", "partition") if key in options}
    return [
        bf.prepare_data_loader(
            DataLoader(dataset, shuffle=shuffle, **options),
            num_replicas=ranks,
            rank=rank,
            **prepared,
        )
        for rank in range(ranks)
    ]


def take(loader, count):
    """Take the first batches, and break off."""
    return [batch.tolist() for _, batch in zip(range(count), loader, strict=False)]


def dealt(every):
    """Return the samples of all ranks that go on to the epoch's end; all have as many batches."""
    batches = [[batch.tolist() for batch in loader] for loader in every]
    assert len({tuple(map(len, one)) for one in batches}) == 1
    return [sample for one in batches for batch in one for sample in batch]


@settings(deadline=None, max_examples=60)
@given(
    samples=st.integers(1, 50),
    kind=st.sampled_from([range, Stream, StatefulStream]),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    size=st.integers(1, 4),
    other_size=st.integers(1, 4),
    batches=st.integers(1, 5),
)
def test_every_sample_once_over_an_interrupt(
    samples, kind, before, after, size, other_size, batches
):
    """Map-style or a stream, n ranks with b samples a batch, then m with others."""
    shuffle = True if kind is range else None
    every = shards(kind(samples), before, shuffle, batch_size=size)
    batches = min(batches, -(-samples // (before * size)))
    seen = [x for loader in every for batch in take(loader, batches) for x in batch]
    state = every[-1].state_dict()
    assert all(loader.state_dict() == state for loader in every)
    later = shards(kind(samples), after, shuffle, batch_size=other_size)
    for loader in later:
        loader.load_state_dict(state)
    seen += dealt(later)
    assert set(seen) == set(range(samples))
    assert len(seen) - samples < before + after
    assert {loader.epoch for loader in later} == {1}


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("kind", [range, Stream])
def test_workers_draw_ahead_and_the_state_does_not(kind, workers):
    """It counts the batches that the loop has received; workers of a stream read the whole one."""
    options = {"batch_size": 2, "num_workers": workers, "shuffle": True if kind is range else None}
    whole = [take(loader, 99) for loader in shards(kind(23), 2, **options)]
    assert sorted({x for one in whole for batch in one for x in batch}) == list(range(23))
    for loader, batches, later in zip(
        shards(kind(23), 2, **options), whole, shards(kind(23), 2, **options), strict=True
    ):
        assert take(loader, 3) == batches[:3]
        assert loader.state_dict()["consumed"] == 12
        later.load_state_dict(loader.state_dict())
        assert take(later, 99) == batches[3:]
        assert take(loader, 99) == batches, "a loader that was broken off begins anew"


@pytest.mark.parametrize("kind", [range, Stream])
def test_workers_that_persist_see_each_epoch(kind):
    """Epoch and place reach processes that were started before."""
    shuffle = True if kind is range else None
    options = {"batch_size": 3, "num_workers": 2, "persistent_workers": True, "shuffle": shuffle}
    (loader,) = shards(kind(10), 1, **options)
    (fresh,) = shards(kind(10), 1, batch_size=3, shuffle=shuffle)
    for _ in range(2):
        assert take(loader, 99) == take(fresh, 99)
    assert take(loader, 2) == take(fresh, 2)
    loader.load_state_dict(loader.state_dict())
    fresh.load_state_dict(fresh.state_dict())
    assert take(loader, 99) == take(fresh, 99)
    assert loader.epoch == 3


SPAWNING = """
from tests.unit.data.test_data_loader import SizedStream, shards, take

options = {"batch_size": 2, "num_workers": 1, "multiprocessing_context": "spawn"}
one, other = shards(SizedStream(7), 2, **options)
print(len(one), take(one, 9), take(other, 9))
"""


@pytest.mark.exhaustive
def test_workers_that_are_spawned():
    """A stream's share can be pickled, and finds its place there."""
    python = [sys.executable, "-c", SPAWNING]
    done = run_to_end(python, cwd=REPO, timeout=120, environ={"PYTHONPATH": str(REPO)})
    assert done.stdout == "2 [[0, 2], [4, 6]] [[1, 3], [5, 6]]\n", done


def test_a_stream_with_a_state_is_not_read_twice():
    """Without workers its own state is taken, and what was consumed is not read again."""
    (loader,) = shards(StatefulStream(20), 1, batch_size=4)
    take(loader, 3)
    state = loader.state_dict()
    assert state == {"epoch": 0, "consumed": 12, "dataset": {"next": 12}}
    later, skipping = StatefulStream(20), StatefulStream(20)
    one, other = shards(later, 2, batch_size=4)
    for loader in (one, other):
        loader.load_state_dict(state)
        assert loader.state_dict() == state, "before anything is read"
    assert [take(one, 9), later.read] == [[[12, 14, 16, 18]], 8]
    assert take(other, 9) == [[13, 15, 17, 19]]
    assert take(other, 1) == [[1001, 1003, 1005, 1007]], "the next epoch begins at its begin"
    (loader,) = shards(skipping, 1, batch_size=4)
    loader.load_state_dict({**state, "dataset": None})
    assert [take(loader, 9), skipping.read] == [[[12, 13, 14, 15], [16, 17, 18, 19]], 20]


@pytest.mark.parametrize("kind", [range, SizedStream])
@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_make_as_many_steps(kind, drop_last):
    """Samples that do not come out even come twice, or with drop_last nobody has them."""
    for samples in range(8, 20):
        every = shards(kind(samples), 3, batch_size=2, drop_last=drop_last)
        counts = {len(loader) for loader in every}
        rows = samples // 3 if drop_last else -(-samples // 3)
        assert counts == {rows // 2 if drop_last else -(-rows // 2)}
        got = dealt(every)
        assert len(got) == 3 * (2 * (rows // 2) if drop_last else rows)
        assert drop_last or set(got) == set(range(samples))


def test_options_are_kept():
    """Batch size, collation, memory and the data set are those of the loader."""

    def collate(samples):
        return {"sum": sum(samples)}

    data = list(range(8))
    plain = DataLoader(data, batch_size=4, collate_fn=collate, timeout=3, num_workers=1)
    (loader,) = [bf.prepare_data_loader(plain)]
    assert isinstance(loader, DataLoader)
    assert isinstance(loader, bf.DataLoaderShard)
    assert loader.dataset is data
    assert (loader.batch_size, loader.timeout, loader.num_workers) == (4, 3, 1)
    assert list(loader) == [{"sum": 6}, {"sum": 22}]
    unbatched = bf.prepare_data_loader(DataLoader(data, batch_size=None))
    assert list(unbatched) == data
    assert len(unbatched) == 8


def test_whether_to_shuffle():
    """As the loader does, unless it is said."""
    data = range(50)
    assert take(bf.prepare_data_loader(DataLoader(data, 50)), 1) == [list(data)]
    shuffled = bf.prepare_data_loader(DataLoader(data, 50, shuffle=True))
    one, other = take(shuffled, 2), take(shuffled, 2)
    assert one != other
    assert sorted(one[0]) == sorted(other[0]) == list(data)
    assert take(bf.prepare_data_loader(DataLoader(data, 50), shuffle=True), 1) == one
    kept = bf.prepare_data_loader(DataLoader(data, 50, shuffle=True), shuffle=False)
    assert take(kept, 1) == [list(data)]


def test_ranks_with_data_of_their_own():
    """``partition=`` says which samples are whose."""
    parts = partition.uniform(12, 3)
    for loader, part in zip(
        shards(range(12), 3, partition=parts, batch_size=2), parts, strict=True
    ):
        assert sorted(x for batch in take(loader, 9) for x in batch) == part.tolist()


def test_a_checkpoint_keeps_it(tmp_path):
    """``extra=`` takes the state and gives it back, on more ranks, too."""

    def train(batches):
        model = torch.nn.Linear(1, 1)
        loader = bf.prepare_data_loader(DataLoader(range(12), batch_size=1, shuffle=True))
        found = bf.load_checkpoint(tmp_path, model)
        if found is not None:
            loader.load_state_dict(found.extra["loader"])
        seen = take(loader, batches)
        bf.save_checkpoint(tmp_path, model, step=batches, extra={"loader": loader.state_dict()})
        return seen

    with bf.local_world(2) as world:
        seen = world.run(train, 3)
    with bf.local_world(3) as world:
        seen += world.run(train, 99)
    assert sorted(x for one in seen for (x,) in one) == list(range(12))


def loader_of(**options):
    return DataLoader(range(6), **options)


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (range(6), "a torch DataLoader.*got range; for a plain index take Stateful"),
        (bf.prepare_data_loader(loader_of()), "that no rank has a share of yet, got DataLoaderSh"),
        (loader_of(sampler=DistributedSampler(range(6), 2, 0)), "got DistributedSampler; let a sa"),
        (loader_of(sampler=WeightedRandomSampler([1.0] * 6, 6)), "got WeightedRandomSampler"),
        (loader_of(sampler=RandomSampler(range(6), True)), "through its data set.*RandomSampler"),
        (loader_of(sampler=SequentialSampler(range(5))), "torch.utils.data.Subset"),
        (
            loader_of(batch_sampler=BatchSampler(range(6), 2, False)),
            "got BatchSampler; let a sampl",
        ),
    ],
)
def test_loaders_that_are_refused(loader, words):
    """What does not go once through its data set, or is shared out already."""
    with pytest.raises(
        bf.ArgumentError, match=f"^prepare_data_loader: argument loader: expected .*{words}"
    ):
        bf.prepare_data_loader(loader)


def test_a_stream_has_its_own_order():
    """Neither ``shuffle`` nor ``partition`` can be said of it."""
    for options, name in (({"shuffle": True}, "shuffle"), ({"partition": [[0]]}, "partition")):
        with pytest.raises(bf.ArgumentError, match=f"argument {name}: expected None with an Itera"):
            bf.prepare_data_loader(DataLoader(Stream(6)), **options)
    with pytest.raises(bf.ArgumentError, match="argument rank: expected one of 1 ranks"):
        bf.prepare_data_loader(DataLoader(Stream(6)), rank=1, num_replicas=1)


def test_a_state_of_another_order_is_refused():
    """The message has the loader's name."""
    state = bf.prepare_data_loader(loader_of()).state_dict()
    other = bf.prepare_data_loader(loader_of(), seed=4)
    with pytest.raises(
        bf.ArgumentError, match=r"DataLoaderShard\.load_state_dict: expected seed=4"
    ):
        other.load_state_dict(state)
