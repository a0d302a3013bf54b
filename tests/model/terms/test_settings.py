"""What NCCL can be told, what rows are called after it, and whether it did."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.errors import UsageError
from gpubench.model.terms.settings import (
    AGAIN,
    HIERARCHICAL,
    Algorithm,
    NcclSetting,
    Protocol,
    combine_values,
    format_choice,
    original_name,
    parse_set_options,
    repeated_name,
)

ALGORITHMS, PROTOCOLS = [each.value for each in Algorithm], [each.value for each in Protocol]
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "NCCL_ALGO": st.sampled_from([*ALGORITHMS, "^tree"]),
        "NCCL_PROTO": st.sampled_from(PROTOCOLS),
        "NCCL_MAX_NCHANNELS": st.integers(1, 64).map(str),
        "NCCL_NET": st.sampled_from(["IB", "Socket"]),
    },
).map(lambda values: NcclSetting(tuple(values.items())))


@given(SETTINGS)
def test_a_row_says_by_its_setting_what_was_asked_for(setting: NcclSetting) -> None:
    assert NcclSetting.parse(setting.name).variables == setting.variables
    assert not setting.differs(setting.algorithm, setting.protocol)
    assert not setting.differs(None, None)
    assert {*setting.communicator_part.values, *setting.process_part.values} == {*setting.values}
    assert set(setting.communicator_part.variables) <= {"NCCL_ALGO", "NCCL_PROTO"}


@pytest.mark.parametrize("name", [None, AGAIN, HIERARCHICAL, "own choice", "torch:nccl"])
def test_other_rows_ask_for_nothing(name: str | None) -> None:
    assert NcclSetting.parse(name) == NcclSetting()


@given(st.none() | SETTINGS.filter(lambda each: bool(each.values)).map(lambda each: each.name))
def test_the_second_time_of_a_way_is_told_from_the_first(name: str | None) -> None:
    assert original_name(repeated_name(name)) == name == original_name(name)
    assert repeated_name(name) != name


def test_every_combination_once() -> None:
    both = combine_values({"NCCL_ALGO": ("ring", "tree"), "NCCL_PROTO": ("ll", "simple")})
    assert [each.name for each in both] == ["ring/ll", "ring/simple", "tree/ll", "tree/simple"]
    mixed = combine_values({"NCCL_MAX_NCHANNELS": ("4", "8"), "NCCL_ALGO": ("ring",), "NCCL_PXN_DISABLE": ("1",)})
    assert [each.name for each in mixed] == [
        "ring NCCL_MAX_NCHANNELS=4 NCCL_PXN_DISABLE=1",
        "ring NCCL_MAX_NCHANNELS=8 NCCL_PXN_DISABLE=1",
    ]
    assert list(combine_values({})) == []


def test_names_of_the_log_are_those_of_the_options() -> None:
    assert format_choice("COLLNET_DIRECT", "LL128") == "collnetdirect/ll128"
    assert format_choice(None, None) is None
    assert not NcclSetting.parse("nvlstree/simple").differs("NVLS_TREE", "SIMPLE")
    assert NcclSetting.parse("tree").differs("RING", "LL")
    assert NcclSetting.parse("ll NCCL_MAX_CTAS=4").differs("RING", "LL128")
    assert not NcclSetting.parse("NCCL_ALGO=^tree").differs("RING", "LL")


def test_values_are_between_commas_and_those_with_commas_in_quotes() -> None:
    found = parse_set_options(["NCCL_MAX_NCHANNELS=4,8,4", 'NCCL_IB_HCA="mlx5_0,mlx5_1",mlx5_0', "NCCL_ALGO=^tree"])
    assert found == {
        "NCCL_MAX_NCHANNELS": ("4", "8"),
        "NCCL_IB_HCA": ("mlx5_0,mlx5_1", "mlx5_0"),
        "NCCL_ALGO": ("^tree",),
    }


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["NCCL_MAX_NCHANNELS"], "--set NCCL_MAX_NCHANNELS"),
        (["NCCL_MAX_NCHANNELS="], "--set NCCL_MAX_NCHANNELS="),
        (["NCCL_MAX_NCHANNELS=4,,8"], "--set NCCL_MAX_NCHANNELS=4,,8"),
        (["nccl_algo=ring"], "--set nccl_algo=ring"),
        (["=4"], "--set =4"),
        (["NCCL_NET=a b"], "--set NCCL_NET=a b"),
        (["NCCL_NET=IB", "NCCL_NET=Socket"], "--set NCCL_NET is set twice"),
        (["NCCL_DEBUG_FILE=/tmp/log"], "--set NCCL_DEBUG_FILE"),
        (["GPUBENCH_FORMAT=json"], "--set GPUBENCH_FORMAT"),
    ],
)
def test_what_is_no_variable_with_values_is_refused(texts: list[str], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_set_options(texts)
    assert str(refused.value).splitlines()[0] == said
    assert refused.value.expected


def test_a_variable_given_twice_is_advised_as_one() -> None:
    with pytest.raises(UsageError) as refused:
        parse_set_options(["NCCL_NET=IB", "NCCL_NET=Socket"])
    assert refused.value.next_step == "--set NCCL_NET=IB,Socket"


def test_what_changes_more_than_a_choice_says_so() -> None:
    said = {
        name: NcclSetting(((name, "1"),)).remarks for name in ("NCCL_DEBUG", "NCCL_P2P_DISABLE", "NCCL_PXN_DISABLE")
    }
    assert said == {
        "NCCL_DEBUG": ("NCCL_DEBUG=1 makes NCCL log or check during the measurement",),
        "NCCL_P2P_DISABLE": ("NCCL_P2P_DISABLE=1 changes the path that data takes",),
        "NCCL_PXN_DISABLE": ("NCCL_PXN_DISABLE=1 switches a part of NCCL off or on",),
    }
    assert NcclSetting.parse("ring/ll NCCL_MAX_NCHANNELS=4").remarks == ()
