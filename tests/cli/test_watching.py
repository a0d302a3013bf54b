"""What a rank sets up around NCCL: what it sets is taken back, and what NCCL refuses is named."""

import os
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from gpubench.backends.mpi.group import AloneGroup
from gpubench.collectives.allreduce import ALLREDUCE
from gpubench.conditions.circumstances import Circumstances
from gpubench.errors import CouldNotMeasureError, GpubenchError
from gpubench.jobs.collective import opening_gpu as watching
from gpubench.jobs.collective.opening_gpu import PathWatch, naming_holders
from gpubench.machine.host import RunDelay
from gpubench.model.terms.ranks import RankIdentity
from gpubench.ports.copies import LinkBytes
from gpubench.simulated.machine import parse_machine, snapshots
from tests.fakes.library_log import FakeLog
from tests.fakes.ranks import ThreadGroup, run_ranks
from tests.measure.collective.test_sweep import request_for

H200S = snapshots(parse_machine("hgx-h200-4"), [])[0]


def of_nccl(settings: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    """Those that tests set: what MPI needs on this machine may be set too, and what /etc/nccl.conf says."""
    return {name: settings[name] for name in ("NCCL_ALGO", "NCCL_SHM_DISABLE") if name in settings}


class NcclError(Exception):
    pass


class Library:
    can_reset_log = True
    error = NcclError

    def __init__(self, warning: str = "") -> None:
        self.warning = warning
        self.resets = 0

    def reset_log(self) -> None:
        self.resets += 1

    def last_error(self) -> str:
        return self.warning


class Probe:
    ended = 0

    def __init__(self, _environment: object) -> None:
        pass

    def __enter__(self) -> "Probe":
        return self

    def __exit__(self, *_error: object) -> None:
        Probe.ended += 1

    def snapshot(self, timeout_s: float) -> Any:
        assert timeout_s > 0
        return H200S


@pytest.fixture(autouse=True)
def _no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(watching, "Probe", Probe)
    monkeypatch.setattr(
        watching, "NvmlCounters", lambda _bus_ids: SimpleNamespace(read=lambda _gpu: LinkBytes(), close=lambda: None)
    )
    monkeypatch.setattr(watching, "_SECONDS_BETWEEN_RANKS", 0.0)


def identity(rank: int) -> RankIdentity:
    return RankIdentity(
        rank=rank, host="n0", node=0, local_rank=rank, pid=1, gpu_index=rank, gpu_bus_id=H200S.gpus[rank].bus_id
    )


def test_memory_that_cuda_does_not_get_is_said_with_who_holds_it() -> None:
    full = RuntimeError("cudaErrorMemoryAllocation: out of memory")
    with pytest.raises(CouldNotMeasureError) as caught, naming_holders(lambda: "process 8342 (python): 120.0 GiB"):
        raise full
    assert caught.value.reason == "other processes use memory of this GPU: process 8342 (python): 120.0 GiB"
    with pytest.raises(RuntimeError, match="out of memory"), naming_holders(lambda: ""):
        raise full
    with pytest.raises(RuntimeError, match="else"), naming_holders(lambda: "process 8342"):
        raise RuntimeError("something else")


def test_what_was_set_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    before = dict(os.environ)
    library, group = Library(), AloneGroup()
    with PathWatch(group, identity(0)) as watch:
        assert dict(os.environ) == before
        with pytest.raises(ValueError, match="nothing is recorded"):
            watch.path_observer(request_for(ALLREDUCE))
        watch.begin(library, identity(0))
        assert os.environ["NCCL_DEBUG"] == "INFO"
        path_observer = watch.path_observer(request_for(ALLREDUCE))
        circumstances = path_observer.sources.read_circumstances()
        assert circumstances is not None
        assert of_nccl(circumstances.settings) == {"NCCL_ALGO": ("Ring",)}
        assert len(circumstances.wiring.nodes) == 1
    assert dict(os.environ) == before
    assert library.resets == 1
    assert Probe.ended > 0


def test_how_long_a_rank_waited_for_a_cpu_is_counted_from_its_first_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    delays = iter((RunDelay(ran_ns=10**9, waited_ns=0), RunDelay(ran_ns=2 * 10**9, waited_ns=3 * 10**9)))
    monkeypatch.setattr(watching, "run_delay", lambda: next(delays))
    with PathWatch(AloneGroup(), identity(0)) as watch:
        watch.begin(Library(), identity(0))
        circumstances = watch.path_observer(request_for(ALLREDUCE)).sources.read_circumstances()
    assert circumstances is not None
    assert circumstances.waited == {0: 0.75}


def test_plugins_that_nccl_loads_later_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "NcclLog", QuietLog)
    monkeypatch.setattr(watching, "read_plugins", lambda facts: replace(facts, libraries={"libnccl-net": "ofi.so"}))

    def body(group: ThreadGroup) -> Circumstances | None:
        with PathWatch(group, identity(group.rank)) as watch:
            watch.begin(Library(), identity(group.rank))
            return watch.path_observer(request_for(ALLREDUCE)).sources.read_circumstances()

    known = run_ranks(2, body)[0]
    assert known is not None
    assert [facts.libraries for facts in known.facts] == [{"libnccl-net": "ofi.so"}] * 2


class QuietLog(FakeLog):
    """In the place of one that changes the environment, which the threads of a test share."""

    def __init__(self, *_arguments: object) -> None:
        super().__init__()

    def __enter__(self) -> "QuietLog":
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def warnings(self) -> list[str]:
        return []


def refused(warning: str) -> GpubenchError:
    """The error of the last of two ranks that NCCL refuses."""

    def body(group: ThreadGroup) -> GpubenchError:
        library = Library(warning)
        with PathWatch(group, identity(group.rank)) as watch:
            watch.begin(library, identity(group.rank))
            with pytest.raises(GpubenchError) as caught, watch.naming_refusals(library):
                raise NcclError("unhandled system error")
            group.barrier()
        return caught.value

    return run_ranks(2, body)[1]


def test_a_refusal_names_pair_and_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setattr(watching, "NcclLog", QuietLog)
    warning = "No transport found for rank 0[60] -> rank 1[70]"
    error = refused(warning)
    assert isinstance(error, CouldNotMeasureError)
    assert error.exit_code == 3
    assert "rank 0 → rank 1" in error.seen
    assert error.reason == "NCCL_P2P_DISABLE=1 in the environment"
    assert error.next_step == "gpubench p2p && unset NCCL_P2P_DISABLE"


@pytest.mark.parametrize("warning", ["", "Cuda failure 'out of memory'", "No transport found"])
def test_other_errors_stay_what_they_are(warning: str) -> None:
    library = Library(warning)
    with PathWatch(AloneGroup(), identity(0)) as watch:
        watch.begin(library, identity(0))
        with pytest.raises(NcclError, match="unhandled"), watch.naming_refusals(library):
            raise NcclError("unhandled system error")
