"""Requests for which an NCCL has no call."""

import pytest

from gpubench.backends.nccl.communicator import check_requests
from gpubench.errors import UsageError
from gpubench.model.terms.settings import NcclSetting, combine_values


def settings(**asked: str) -> tuple[NcclSetting, ...]:
    return tuple(combine_values({name.replace("_", "-"): values.split(",") for name, values in asked.items()}))


@pytest.mark.parametrize(
    ("asked", "code", "said", "expected"),
    [
        ({"register": "user"}, 21800, "--register user, but NCCL 2.18.0 has no ncclCommRegister", "NCCL 2.19 or newer"),
        (
            {"register": "user,symmetric"},
            22609,
            "--register symmetric, but NCCL 2.26.9 has no ncclCommWindowRegister",
            "NCCL 2.27 or newer",
        ),
        ({"cta_policy": "zero"}, 22707, "--cta-policy zero, but NCCL 2.27.7 has no NCCL_CTA_POLICY_ZERO", "NCCL 2.28"),
        ({"cta_policy": "efficiency"}, 22605, "has no NCCL_CTA_POLICY_EFFICIENCY", "NCCL 2.27 or newer"),
        ({"max_ctas": "8"}, 21600, "--max-ctas 8, but NCCL 2.16.0 has no cap on CTAs", "NCCL 2.17 or newer"),
    ],
)
def test_an_nccl_that_lacks_a_call_is_told_with_the_one_that_has_it(
    asked: dict[str, str], code: int, said: str, expected: str
) -> None:
    with pytest.raises(UsageError) as refused:
        check_requests(settings(**asked), code)
    assert said in str(refused.value)
    assert str(refused.value.expected).startswith(expected)
    assert "--nccl-library" in str(refused.value.next_step)


def test_an_nccl_that_has_all_passes() -> None:
    check_requests(settings(register="none,user,symmetric", cta_policy="default,efficiency,zero", max_ctas="4"), 22800)
    check_requests(settings(NCCL_ALGO="ring"), 20000)
