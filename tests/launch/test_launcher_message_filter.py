"""The launcher message filter removes a launcher's failure messages, and nothing else ever."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncddp.launch.launcher_message_filter import LauncherMessageFilter, WaitWarningAggregator
from asyncddp.launch.launchers import LAUNCHERS
from tests.launch import recorded

FAILURE_MESSAGES = [
    ("open_mpi_5", recorded.OPEN_MPI_5_KILLED),
    ("open_mpi_5", recorded.OPEN_MPI_5_EXIT),
    ("open_mpi_5", recorded.OPEN_MPI_5_ABORT),
    ("open_mpi_5", recorded.OPEN_MPI_5_HOST_LOST),
    ("open_mpi_5", recorded.OPEN_MPI_5_HOST_SILENT),
    ("open_mpi_4", recorded.OPEN_MPI_4_KILLED),
    ("open_mpi_4", recorded.OPEN_MPI_4_EXIT),
    ("mpich", recorded.MPICH_KILLED.lstrip("\n")),
    ("mpich", recorded.HYDRA_ABORT),
    ("intel_mpi", recorded.INTEL_KILLED_ALONE.lstrip("\n")),
    ("slurm", recorded.SRUN_KILLED),
]
USERS = [
    "loss 0.1\nloss 0.2\n",
    "no newline at the end",
    "10%\r20%\r30%",
    f"{'-' * 74}\nepoch 3\n{'-' * 74}\n",
    f"{'=' * 83}\n= results\n{'=' * 83}\n",
    f"{'-' * 74}\n{'-' * 74}\n{'-' * 74}",
    "-\n--\n[rank 0] started\n[1/10] batch\n",
    "\n\n\n",
    "Abort",
    "srun",
    "dashes in the middle " + "-" * 80 + "\n",
    "\xff\xfe not UTF-8\n",
]


def through(vendor, chunks):
    """What comes out, at once and at the end."""
    message_filter = LauncherMessageFilter(LAUNCHERS[vendor].output_patterns)
    out = b"".join([*(message_filter.feed(chunk) for chunk in chunks), message_filter.flush()])
    return out, message_filter.launcher_lines


@pytest.mark.parametrize(("vendor", "said"), FAILURE_MESSAGES)
def test_a_failure_message_is_removed(vendor, said):
    """A launcher's message about a failed rank is removed and recorded, the rest is kept."""
    out, recorded_lines = through(vendor, [b"before\n", said.encode(), b"after\n"])
    assert out == b"before\nafter\n"
    assert recorded_lines == said.splitlines()


@pytest.mark.parametrize("vendor", list(LAUNCHERS))
@pytest.mark.parametrize("text", USERS)
def test_what_a_user_writes_comes_through_unchanged(vendor, text):
    """Under each family a user's output passes unchanged, also dashes and unfinished lines."""
    data = text.encode("latin-1")
    assert through(vendor, [data]) == (data, [])


def test_a_launchers_message_that_is_no_ranks_failure_comes_through():
    """Too few slots, a missing program: the user must read that."""
    data = recorded.OPEN_MPI_5_NO_SLOTS.encode()
    assert through("open_mpi_5", [data]) == (data, [])


@st.composite
def streams(draw):
    """Failure messages and a user's output in any order, cut into chunks anywhere."""
    vendor = draw(st.sampled_from(list(LAUNCHERS)))
    pieces = st.one_of(
        st.sampled_from([said for of, said in FAILURE_MESSAGES if of == vendor]),
        st.sampled_from(USERS).map(lambda text: text.rstrip("\n") + "\n"),
        st.text("-=\nab[ ", max_size=90).map(lambda text: text + "\n"),
    )
    data = "".join(draw(st.lists(pieces, max_size=5))).encode("latin-1")
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12)))
    return vendor, data, [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@given(streams())
def test_where_the_stream_is_cut_makes_no_difference(stream):
    """What comes through and what is recorded do not depend on how the stream is cut."""
    vendor, data, chunks = stream
    assert through(vendor, chunks) == through(vendor, [data])


@given(streams())
def test_every_byte_either_comes_through_in_order_or_is_recorded(stream):
    """What comes through is a subsequence of the input, and the rest of its bytes is recorded."""
    vendor, data, chunks = stream
    out, recorded_lines = through(vendor, chunks)
    assert len(out) + sum(len(line.encode("latin-1")) + 1 for line in recorded_lines) == len(data)
    rest = iter(data)
    assert all(byte in rest for byte in out), "what came through is no subsequence of what went in"


@given(st.binary(max_size=300))
def test_without_patterns_everything_comes_through_at_once(data):
    """A filter without patterns returns each chunk at once."""
    assert LauncherMessageFilter().feed(data) == data


def test_an_unfinished_line_is_held_only_where_it_may_be_the_launchers():
    """The start of a line is held back only while it may begin a launcher's message."""
    message_filter = LauncherMessageFilter(LAUNCHERS["open_mpi_5"].output_patterns)
    assert message_filter.feed(b"Password: ") == b"Password: "
    assert message_filter.feed(b"\n10%") == b"\n10%"
    assert message_filter.feed(b"\n------") == b"\n"
    assert message_filter.has_pending
    assert message_filter.flush() == b"------"
    assert not message_filter.has_pending
    assert message_filter.feed(b"|##  | 50%--") == b"|##  | 50%"


def test_a_progress_bar_may_stand_before_a_failure_message():
    """It ends with no newline, so the delimiter of the message follows on the same line."""
    bar, said = b"\r 50%|#####     |", recorded.OPEN_MPI_5_KILLED
    for chunks in ([bar + said.encode()], [bar, said.encode()], [bar + b"-", said[1:].encode()]):
        assert through("open_mpi_5", chunks) == (bar, said.splitlines())


def test_messages_that_pass_through_are_recorded_all_the_same():
    """With ``pass_through`` the launcher's message comes through and is recorded as well."""
    data = b"before\n" + recorded.OPEN_MPI_5_KILLED.encode() + b"after\n"
    message_filter = LauncherMessageFilter(
        LAUNCHERS["open_mpi_5"].output_patterns, pass_through=True
    )
    assert message_filter.feed(data) == data
    assert message_filter.launcher_lines == recorded.OPEN_MPI_5_KILLED.splitlines()


def test_it_is_known_whether_a_line_is_unfinished():
    """``at_line_start`` tells whether the output so far ends with a newline or is empty."""
    message_filter = LauncherMessageFilter(LAUNCHERS["open_mpi_5"].output_patterns)
    assert message_filter.at_line_start
    message_filter.feed(b" 50%|##  |" + recorded.OPEN_MPI_5_KILLED.encode())
    assert not message_filter.at_line_start
    message_filter.feed(b"\n")
    assert message_filter.at_line_start


def test_a_block_without_an_end_is_given_back():
    """A launcher's message that opens and does not end comes through as it was."""
    opening = recorded.OPEN_MPI_5_KILLED.splitlines(keepends=True)[:2]
    data = "".join([*opening, *["more\n"] * 60]).encode()
    assert through("open_mpi_5", [data]) == (data, [])


def waits(rank, missing, seconds=60, more=""):
    call = f"neighbor_allreduce 'w' (use {rank})"
    return f"rank {rank}: {call} has been waiting for {seconds} s; missing: {missing}{more}\n"


def gathered(*lines):
    message_filter = LauncherMessageFilter(
        LAUNCHERS["open_mpi_5"].output_patterns, wait_warnings=WaitWarningAggregator()
    )
    through = message_filter.feed("".join(lines).encode())
    assert message_filter.due_warnings() == b"", "not yet"
    return (through + message_filter.due_warnings(at_end=True)).decode()


def test_ranks_that_wait_for_one_another_and_in_the_end_for_one_are_told_of_once():
    """Ranks' warnings become one line: who waits, for which ranks, in what, since when."""
    lines = [waits(0, "ranks 1, 2"), waits(1, "rank 3", 61), waits(2, "ranks 0, 1")]
    assert gathered(*lines) == (
        "3 ranks (0\u20132) wait for rank 3, in neighbor_allreduce 'w' (use 1), since 61 s\n"
    )
    many = [waits(rank, f"ranks {rank - 1}, {rank + 1}") for rank in range(1, 511) if rank != 64]
    assert gathered(*many).startswith(
        "509 ranks (1\u201363, 65\u2013510) wait for ranks 0, 64, 511"
    )
    long = [waits(0, "ranks 1, 3, 5, 7, 9, 11, 13, 15 and 2 more"), waits(1, "rank 2")]
    assert gathered(*long).startswith("2 ranks (0, 1) wait for ranks 2, 3, 5, 7, 9, 11, 13, 15, in")


@pytest.mark.parametrize(
    "lines",
    [
        [waits(0, "rank 1")],
        [waits(0, "rank 1"), waits(1, "rank 0")],
        [waits(0, "rank 1", more="; rank 1 has sent allreduce 'x' (use 0) instead")],
        ["rank 3: loss 0.1\n", "rank 0: my own has been waiting for 3 s; missing: everything\n"],
        ["rank 1 says", " hello\n", "ra"],
    ],
)
def test_what_has_no_common_cause_comes_through_as_it_was(lines):
    """One warning, a cycle, one with a hint, and other lines come through unchanged."""
    message_filter = LauncherMessageFilter(
        LAUNCHERS["open_mpi_5"].output_patterns, wait_warnings=WaitWarningAggregator()
    )
    out = b"".join(message_filter.feed(line.encode()) for line in lines) + message_filter.flush()
    assert (out + message_filter.due_warnings(at_end=True)).decode() == "".join(lines)


def test_a_warning_begins_a_line_of_its_own():
    """A warning after an unfinished line begins on a new line."""
    message_filter = LauncherMessageFilter(wait_warnings=WaitWarningAggregator())
    out = (
        message_filter.feed(waits(0, "rank 1").encode())
        + message_filter.feed(b"50%|#")
        + message_filter.due_warnings(at_end=True)
    )
    assert out.decode() == f"50%|#\n{waits(0, 'rank 1')}"
