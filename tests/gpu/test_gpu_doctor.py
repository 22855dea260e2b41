"""``asyncddp doctor --check`` over each transport of GPUs, as users run it."""

from __future__ import annotations

import pytest

from asyncddp.cli import doctor_command
from asyncddp.cli.doctor import transport_self_test


@pytest.mark.mpi(4)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("transport", transport_self_test.DEVICE_TRANSPORTS)
def test_the_doctor_s_check_passes(ranks, transport):
    """Every check passes on 2 and on 4 ranks; where they cannot use the transport, says why."""
    where = (*doctor_command._RUN, "--num-proc", str(ranks))
    test = doctor_command._run_module, where, transport, "cuda", "ASYNCDDP_DEVICE_TRANSPORTS"
    result, words = transport_self_test._test_transport(*test)
    if result == "not run":
        pytest.skip(words)
    assert result == "passed", words
