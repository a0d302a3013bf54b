"""Variables that bear on performance are told from those that do not."""

import pytest

from gpubench.model.facts.performance_settings import bearing_on_performance, bears_on_performance


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_MAX_NCHANNELS", "1"),
        ("NCCL_DEBUG", "trace"),
        ("CUDA_LAUNCH_BLOCKING", "1"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        ("UCX_TLS", "tcp"),
        ("OMPI_MCA_btl", "tcp"),
    ],
)
def test_settings_that_can_make_transfers_slower(name: str, value: str) -> None:
    assert bears_on_performance(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_DEBUG", "INFO"),
        ("NCCL_DEBUG_FILE", "/tmp/TRACE"),
        ("NCCL_RAS_ENABLE", "0"),
        ("CUDA_LAUNCH_BLOCKING", "0"),
        ("CUDA_VISIBLE_DEVICES", "0,1"),
        ("MPI4PY_RC_THREADS", "0"),
    ],
)
def test_settings_that_do_not(name: str, value: str) -> None:
    assert not bears_on_performance(name, value)


def test_the_bearing_ones_keep_their_order() -> None:
    environment = {"NCCL_PROTO": "LL", "CUDA_VISIBLE_DEVICES": "0", "NCCL_ALGO": "Ring"}
    assert list(bearing_on_performance(environment).items()) == [("NCCL_PROTO", "LL"), ("NCCL_ALGO", "Ring")]
