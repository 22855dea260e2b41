"""The record of the ranks that an elastic run has lost, without processes."""

from asyncddp.launch.rank_losses import RankLosses


def test_enough_counts_those_that_run_or_ended_well():
    """Each loss takes one away, until fewer than the least are left."""
    losses = RankLosses(3, 2, 0, None)
    assert losses.record(0, 10, -9, 2) == (
        "asyncddp: rank 0 (pid 10) was killed by SIGKILL; 2 ranks go on\n"
    )
    assert (losses.enough, losses.exit_code) == (True, 0)
    assert losses.record(2, 12, 4, 1).endswith(
        "1 rank is left, fewer than --min 2: the run is ended\n"
    )
    assert (losses.enough, losses.exit_code) == (False, 137)


def test_an_unknown_signal_is_named_by_its_number():
    """Real-time signals have no name."""
    assert "was killed by signal 40; the others" in RankLosses(2, 1, 0, None).record(0, 1, -40, 0)


def test_those_that_are_ended_get_no_notice():
    """What fails by itself meanwhile does."""
    losses = RankLosses(4, 1, 0, None)
    losses.ending = True
    assert [losses.record(rank, 1, code, 0) for rank, code in ((0, -15), (1, 143))] == ["", ""]
    assert losses.record(2, 1, 3, 0) == "asyncddp: rank 2 (pid 1) ended with exit code 3\n"
    assert losses.summary().endswith("; rank 2 ended with exit code 3, 2 more were ended\n")


def test_the_summary_names_few():
    """A run of many ranks that loses most of them ends with one line."""
    losses = RankLosses(64, 1, 0, None)
    for rank in range(20):
        losses.record(rank, 1, -9, 40)
    assert losses.summary().endswith("rank 7 was killed by SIGKILL, 12 more were lost\n")
    assert losses.summary().startswith("asyncddp: 44 of 64 ranks ended with exit code 0; ")


def test_a_replaced_rank_counts_as_one_that_runs():
    """As many are replaced as may be; the summary says whom, and how often one was lost at last."""
    losses = RankLosses(4, 4, 2, None)
    assert losses.record(3, 10, -9, 3) == (
        "asyncddp: rank 3 (pid 10) was killed by SIGKILL; 3 ranks go on, and another process "
        "takes its place (1 more may)\n"
    )
    assert losses.is_replaced(3)
    assert (losses.enough, losses.exit_code) == (True, 0)
    assert losses.summary() == (
        "asyncddp: 4 of 4 ranks ended with exit code 0; rank 3 was killed by SIGKILL, and was "
        "replaced\n"
    )
    losses.record(3, 11, 1, 3)
    assert losses.record(3, 12, 1, 3).endswith(
        "3 ranks are left, fewer than --min 4: the run is ended\n"
    )
    assert (losses.enough, losses.is_replaced(3)) == (False, False)
    assert losses.summary().endswith("fewer than --min 4; rank 3 ended with exit code 1\n")


def test_nobody_is_replaced_once_all_others_have_ended():
    """There is nobody left from whom a new process could take its state."""
    losses = RankLosses(2, 1, 5, None)
    assert losses.record(1, 10, -9, 0).endswith("; the others have ended\n")
    losses.record(0, 10, -9, 1)
    losses.give_up(0)
    assert losses.summary() == (
        "asyncddp: 0 of 2 ranks ended with exit code 0, fewer than --min 1; rank 1 was killed by "
        "SIGKILL, rank 0 was killed by SIGKILL, and was not replaced, since the others had ended\n"
    )


def test_nobody_is_replaced_once_the_run_is_ended():
    """The reason is the run's end, of which the summary tells otherwise."""
    losses = RankLosses(3, 1, 5, None)
    losses.record(1, 10, -9, 2)
    losses.ending = True
    losses.give_up(1)
    assert losses.summary().endswith("; rank 1 was killed by SIGKILL, and was not replaced\n")
