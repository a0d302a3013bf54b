"""Requests to NCCL that had no effect, with the reason; and those that had one, of which nothing is said."""

import pytest
from msgspec.structs import replace

from gpubench.model.results.backends import find_ignored_requests
from gpubench.model.results.report import CollectiveRow
from gpubench.model.terms.settings import AGAIN
from tests.formats.sample import ROW

SIZES = (2**10, 2**20)


def rows(
    setting: str | None,
    algorithm: str | None,
    collective: str = "allreduce",
    registered: str | None = None,
    channels: int | None = 16,
    transport: str | None = "P2P/CUMEM",
) -> list[CollectiveRow]:
    return [
        replace(
            ROW,
            collective=collective,
            size_bytes=size,
            setting=setting,
            algorithm=algorithm,
            protocol=None if algorithm is None else "SIMPLE",
            channels=channels,
            registered=registered,
            transport=transport,
        )
        for size in SIZES
    ]


SYMMETRIC, ZERO = "register=symmetric", "register=symmetric cta-policy=zero"


@pytest.mark.parametrize(
    ("collective", "setting", "took", "registered", "said"),
    [
        ("allreduce", SYMMETRIC, "RING", None, "NCCL created no window"),
        ("allreduce", SYMMETRIC, "RING", "symmetric", "expects it to be slower"),
        ("broadcast", SYMMETRIC, "RING", "symmetric", "symmetric kernels only for allreduce, allgather, reducescatter"),
        ("allgather", "register=user", "RING", None, "NCCL_LOCAL_REGISTER is 0"),
        ("allgather", "cta-policy=zero", "RING", None, "add --register symmetric"),
        ("allreduce", "cta-policy=zero", "RING", None, "they cannot reduce"),
        ("allgather", "cta-policy=efficiency", "RING", None, "add --register user"),
        ("allreduce", "cta-policy=efficiency", "NVLS", None, "only in allgather and reducescatter"),
        ("allgather", "register=user cta-policy=efficiency", "RING", "user", "it needs NVLS"),
        ("allreduce", "max-ctas=32", "RING", None, "at most 16 channels without the request"),
    ],
)
def test_a_request_without_effect_is_a_warning_with_the_reason(
    collective: str, setting: str, took: str, registered: str | None, said: str
) -> None:
    measured = [*rows(None, "RING", collective), *rows(setting, took, collective, registered), *rows(AGAIN, "RING")]
    (found,) = find_ignored_requests(measured)
    assert (found.id, found.severity) == ("request-without-effect", "WARN")
    assert said in found.cause
    assert found.seen.startswith(f"{setting}: NCCL used {took.lower()}/simple, and without the request ring/simple")
    assert found.next_command.startswith("leave --")


@pytest.mark.parametrize(
    ("collective", "setting", "took", "registered"),
    [
        ("allreduce", SYMMETRIC, "SYMMETRIC", "symmetric"),
        ("allgather", ZERO, "COPY_ENGINE", "symmetric"),
        ("alltoall", ZERO, "HIERARCHICAL_CE", "symmetric"),
        ("allgather", "register=user", "RING", "user"),
        ("allgather", "register=user cta-policy=efficiency", "NVLS", "user"),
        ("allreduce", "max-ctas=4", "RING", None),
        ("allreduce", "register=none", "RING", None),
        ("allreduce", "cta-policy=default", "RING", None),
        ("allreduce", "ring/ll", "RING", None),
    ],
)
def test_of_one_that_had_an_effect_nothing_is_said(
    collective: str, setting: str, took: str, registered: str | None
) -> None:
    measured = [*rows(None, "RING", collective), *rows(setting, took, collective, registered), *rows(AGAIN, "RING")]
    assert find_ignored_requests(measured) == ()


@pytest.mark.parametrize(("share", "found"), [(0.51, 0), (0.97, 1)])
def test_sends_between_windows_that_are_faster_had_an_effect(share: float, found: int) -> None:
    """Figures of an alltoall of 16 MiB between two ranks that shared an H100."""
    own, again = rows(None, None, "alltoall"), rows(AGAIN, None, "alltoall")
    way = [replace(row, time_us=share * row.time_us) for row in rows(SYMMETRIC, None, "alltoall", "symmetric")]
    assert len(find_ignored_requests([*own, *way, *again])) == found


def test_both_requests_of_a_setting_are_judged() -> None:
    found = find_ignored_requests([*rows(None, "RING", "allgather"), *rows(ZERO, "RING", "allgather")])
    assert [each.subject for each in found] == ["--register symmetric in allgather", "--cta-policy zero in allgather"]
    assert all("NCCL created no window" in each.cause for each in found)


def test_where_the_log_was_not_heard_nothing_is_claimed() -> None:
    silent = {"algorithm": None, "channels": None, "transport": None}
    assert find_ignored_requests([*rows(None, **silent), *rows(SYMMETRIC, **silent)]) == ()  # type: ignore[arg-type]
    # A collective of sends and receives has no algorithm, and its paths were heard.
    assert len(find_ignored_requests([*rows(None, None, "alltoall"), *rows("cta-policy=zero", None, "alltoall")])) == 1


def test_both_jobs_of_a_setting_are_one_way() -> None:
    twice = [*rows("max-ctas=32 NCCL_NET=IB", "RING"), *rows("max-ctas=32 NCCL_NET=IB again", "RING")]
    assert len(find_ignored_requests([*rows(None, "RING"), *twice])) == 1
