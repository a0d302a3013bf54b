"""What NCCL can be told, and whether it did."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.model.terms.operation import AGAIN, HIERARCHICAL, Algorithm, NcclChoice, Protocol, settings_of, taken_name

SETTINGS = st.builds(NcclChoice, st.none() | st.sampled_from(Algorithm), st.none() | st.sampled_from(Protocol))


@given(SETTINGS)
def test_a_row_says_by_its_setting_what_was_asked_for(setting: NcclChoice) -> None:
    assert NcclChoice.of(setting.name) == setting
    assert not setting.differs(setting.algorithm, setting.protocol)
    assert not setting.differs(None, None)
    assert set(setting.variables) <= {"NCCL_ALGO", "NCCL_PROTO"}


@pytest.mark.parametrize("name", [None, AGAIN, HIERARCHICAL, "own choice"])
def test_other_rows_ask_for_nothing(name: str | None) -> None:
    assert NcclChoice.of(name) == NcclChoice()


def test_every_combination_once() -> None:
    names = [each.name for each in settings_of((Algorithm.RING, Algorithm.TREE), (Protocol.LL, Protocol.SIMPLE))]
    assert names == ["ring/ll", "ring/simple", "tree/ll", "tree/simple"]
    assert [each.name for each in settings_of((), (Protocol.LL128,))] == ["ll128"]
    assert [each.variables for each in settings_of((Algorithm.PAT,), ())] == [{"NCCL_ALGO": "pat"}]
    assert list(settings_of((), ())) == []


def test_names_of_the_log_are_those_of_the_options() -> None:
    assert taken_name("COLLNET_DIRECT", "LL128") == "collnetdirect/ll128"
    assert taken_name(None, None) is None
    assert not NcclChoice(Algorithm.NVLS_TREE, Protocol.SIMPLE).differs("NVLS_TREE", "SIMPLE")
    assert NcclChoice(Algorithm.TREE).differs("RING", "LL")
    assert NcclChoice(None, Protocol.LL).differs("RING", "LL128")
