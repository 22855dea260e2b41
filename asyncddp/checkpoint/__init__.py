"""Checkpoints of all ranks' training: ``save_checkpoint`` and ``load_checkpoint``.

A folder holds the checkpoints of one run, each a folder of its own that is named by its step::

    checkpoints/
        step_0000000020/
            manifest.json      world size, algorithm, round, …, and the files' sizes and digests
            average.pt         the average of the ranks' models: replicas="average" and "all"
            rank0.pt           rank 0's model:                   replicas="rank0"
            rank_00000.pt …    every rank's own:                 replicas="all"

            average/           where replicas are sharded: their tensors, in torch's DCP format, of
            rank0/             the average, or of replica 0,
            replica_00000/ …   or of each replica

``torch.load(file)`` reads each file with ``weights_only=True``: ``"model"``, ``"optimizer"`` and
``"scheduler"`` are state dicts, ``"extra"`` is the caller's, ``"rng"`` has the state of the random
generators by rank, and ``"manifest"`` what ``manifest.json`` says of the run.

**Whole or not there.** Files are written under other names, brought to the disk, and renamed; the
manifest is written last, when all ranks have said that theirs are there. So a process that is
killed at any moment leaves the former checkpoints, and a folder without a manifest, which loading
skips with a warning and the next save removes. A step that is saved again replaces the former one
when its manifest is written, and not before. What fails on one rank, such as a full disk, raises
the same error on all, once what was written of the new checkpoint is removed.

**Damage is found first.** The manifest has the digest of each file, and its own. Digests, manifest
and random states are checked on all ranks before anything is changed: where one of them is damaged
all ranks take the next older checkpoint, or raise the same error if one was asked for by its step.
Checkpoints from before there were digests are read without them.

**Shared and local disks.** The folder may be one that all machines share, or each machine's own of
the same name. Loading looks at what all ranks have: of every rank's own files the last checkpoint
counts of which each rank can read its file; one file for all is read by the first rank that has
it, which sends it to the others. The last checkpoint is the one that was saved last.

**Replicas that are sharded.** Each rank writes its parts of tensors of parameters, and reads its
parts, which may be of other sizes. The files beside the folders hold the rest, and shapes and
dtypes of those tensors on torch's ``meta`` device.

**Another number of ranks** takes the average, or rank 0's where only that was saved. There each
optimizer has the averages of floating-point tensors, such as moments, and rank 0's numbers; the
counters go on, so that schedules and learning rates do. What a method remembers of single ranks,
such as public copies and residuals, begins anew; random generators stay as they are.
"""

from asyncddp.checkpoint.elastic_state import ElasticState
from asyncddp.checkpoint.load import Checkpoint, load_checkpoint
from asyncddp.checkpoint.save import save_checkpoint

__all__ = ["Checkpoint", "ElasticState", "load_checkpoint", "save_checkpoint"]
