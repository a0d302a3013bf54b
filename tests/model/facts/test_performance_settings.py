"""Variables that bear on performance are told from those that do not."""

import pytest

from gpubench.model.facts.environment import performance_variables


@pytest.mark.parametrize(
    "environment",
    [
        {"NCCL_MAX_NCHANNELS": "1"},
        {"NCCL_DEBUG": "trace"},
        {"NCCL_DEBUG": "TRACE", "NCCL_DEBUG_SUBSYS": "INIT"},
        {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,COLL"},
        {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "^INIT"},
        {"CUDA_LAUNCH_BLOCKING": "1"},
        {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        {"UCX_TLS": "tcp"},
        {"OMPI_MCA_btl": "tcp"},
    ],
)
def test_settings_that_can_make_transfers_slower(environment: dict[str, str]) -> None:
    assert performance_variables(environment) == environment


@pytest.mark.parametrize(
    "environment",
    [
        {"NCCL_DEBUG": "INFO"},
        {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"},
        {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "^COLL,CALL,TUNING,ALL"},
        {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_SUBSYS": "ALL"},
        {"NCCL_DEBUG_SUBSYS": "ALL"},
        {"NCCL_DEBUG_FILE": "/tmp/TRACE"},
        {"NCCL_RAS_ENABLE": "0"},
        {"CUDA_LAUNCH_BLOCKING": "0"},
        {"CUDA_DEVICE_MAX_CONNECTIONS": "8"},
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"MPI4PY_RC_THREADS": "0"},
    ],
)
def test_settings_that_do_not(environment: dict[str, str]) -> None:
    assert performance_variables(environment) == {}


def test_the_bearing_ones_keep_their_order() -> None:
    environment = {"NCCL_PROTO": "LL", "CUDA_VISIBLE_DEVICES": "0", "NCCL_ALGO": "Ring"}
    assert list(performance_variables(environment).items()) == [("NCCL_PROTO", "LL"), ("NCCL_ALGO", "Ring")]
