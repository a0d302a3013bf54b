import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubench.cli.defaults import complete_words
from gpubench.errors import UsageError
from gpubench.model.profiles.fault import FAULT_KEYS, Fault, FaultKey, Subject, ValueKind, parse_fault, parse_faults


def values_of(key: FaultKey) -> st.SearchStrategy[str]:
    if key.kind is ValueKind.COUNT:
        return st.integers(0, 999_999_999).map(str)
    if key.kind is ValueKind.FACTOR:
        return st.floats(0.001, 1).map(lambda number: f"{number:.6f}")
    if key.kind is ValueKind.RATE:
        return st.integers(1, 1600).map(str)
    if key.kind is ValueKind.VERSION:
        return st.lists(st.integers(0, 999), min_size=1, max_size=4).map(lambda parts: ".".join(map(str, parts)))
    if key.kind is ValueKind.ROUND:
        return st.integers(1, 11).map(lambda number: f"round{number}")
    if key.kind is ValueKind.VARIABLE:
        return st.from_regex(r"NCCL_[A-Z0-9_]{1,12}=[A-Za-z0-9:_^;]{0,8}", fullmatch=True)
    return st.sampled_from(key.words)


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    subject = draw(st.sampled_from(list(Subject)))
    keys = [key for key in FAULT_KEYS if key.subject is subject]
    chosen = draw(st.lists(st.sampled_from(keys), min_size=1, unique_by=lambda key: key.key))
    settings = tuple((key.key, draw(values_of(key))) for key in chosen)
    node = draw(st.integers(0, 9999))
    if subject is Subject.NODE:
        return Fault(subject, settings, node)
    if subject in (Subject.LEAF, Subject.RAIL):
        return Fault(subject, settings, None, node, draw(st.integers(0, 99)) if subject is Subject.RAIL else None)
    first, second = draw(st.lists(st.integers(0, 99), min_size=2, max_size=2, unique=True))
    return Fault(
        subject, settings, draw(st.sampled_from([None, node])), first, second if subject is Subject.LINK else None
    )


@given(faults())
def test_a_fault_is_read_back_from_its_text(fault: Fault) -> None:
    assert parse_fault(str(fault)) == fault


@given(
    st.text(max_size=30)
    | st.from_regex(r"(node\d+\.)?(gpu|nic|link|node|leaf)\d*(-\d|[.]rail\d)?:[a-z0-9=,.]{0,12}", fullmatch=True)
)
def test_no_text_breaks_the_parser(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert parse_fault(text).settings


def test_faults_as_people_write_them() -> None:
    fault = parse_fault(" node3.gpu5: nvlink=12, width=8 ")
    assert fault == Fault(Subject.GPU, (("nvlink", "12"), ("width", "8")), 3, 5)
    assert (fault.node_number, fault.get("width"), fault.get("mig")) == (3, "8", None)
    assert parse_fault("gpu5:lost=yes").node_number == 0
    assert str(parse_fault("link0-3:staged=yes")) == "link0-3:staged=yes"
    assert str(parse_fault("node2:driver=550.54.15")) == "node2:driver=550.54.15"
    assert parse_fault("node1.nic0:rate=200").where == "node1.nic0"
    assert str(parse_fault("leaf4.rail2:bandwidth=0.6")) == "leaf4.rail2:bandwidth=0.6"
    assert str(parse_fault("leaf4:uplink=0.6")) == "leaf4:uplink=0.6"
    assert parse_fault("node17:dies=round3").command == "scan"
    assert parse_fault("node0:traffic=staged").command == "watch"
    assert not parse_fault("gpu5:speed=0.5").command


def test_a_key_without_a_subject_is_of_every_node() -> None:
    assert [str(each) for each in parse_faults("imex=down", 3)] == [f"node{node}:imex=down" for node in range(3)]
    assert parse_faults("gpu5:lost=yes", 3) == (parse_fault("gpu5:lost=yes"),)
    with pytest.raises(UsageError, match="a node has no key 'imx'") as caught:
        parse_faults("imx=down", 3)
    assert caught.value.next_step == "--fault imex=down"
    with pytest.raises(UsageError, match="names no part that can break"):
        parse_faults("gpu5", 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no part that can break"),
        ("gpu5", "names no part"),
        ("cpu5:lost=yes", "names no part"),
        ("gpu:lost=yes", "names no part"),
        ("gpu-1:lost=yes", "names no part"),
        ("link3:staged=yes", "names no part"),
        ("node1.node2:driver=1", "names no part"),
        ("gpu٣:lost=yes", "names no part"),
        ("gpu" + "9" * 5000 + ":lost=yes", "names no part"),
        ("link2-2:staged=yes", "two different GPUs"),
        ("gpu5:", "a gpu has no key ''"),
        ("gpu5:nvlnk=12", "a gpu has no key 'nvlnk'"),
        ("nic0:nvlink=12", "a nic has no key 'nvlink'"),
        ("gpu5:nvlink", "nvlink has no value"),
        ("gpu5:nvlink=-1", "nvlink cannot be '-1'"),
        ("gpu5:nvlink=" + "9" * 5000, "nvlink cannot be"),
        ("gpu5:width=3", "width cannot be '3'"),
        ("gpu5:p2p=OK", "p2p cannot be 'OK'"),
        ("gpu5:speed=0", "speed cannot be '0'"),
        ("gpu5:speed=1.1", r"speed cannot be '1\.1'"),
        ("gpu5:speed=nan", "speed cannot be 'nan'"),
        ("nic0:rate=0", "rate cannot be '0'"),
        ("node0:driver=new", "driver cannot be 'new'"),
        ("gpu5:mig=on,mig=on", "sets mig twice"),
    ],
)
def test_what_is_no_fault_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_fault(text)


def test_the_nearest_key_is_suggested_and_every_key_explained() -> None:
    with pytest.raises(UsageError) as caught:
        parse_fault("gpu5:nvlnk=12")
    assert caught.value.next_step == "--fault gpu5:nvlink=12"
    gpus_keys = [each.key for each in FAULT_KEYS if each.subject is Subject.GPU]
    assert caught.value.expected == f"one of the keys of a gpu: {', '.join(gpus_keys)}"
    with pytest.raises(UsageError) as caught:
        parse_fault("gpu5:zzzz=12")
    assert (caught.value.seen, caught.value.next_step) == ("--fault 'gpu5:zzzz=12': a gpu has no key 'zzzz'", "")
    with pytest.raises(UsageError) as caught:
        parse_fault("node1.nic0:bandwith")
    assert caught.value.next_step == "--fault node1.nic0:bandwidth=0.5"
    with pytest.raises(UsageError) as caught:
        parse_fault("gpu5:mig")
    assert (caught.value.expected, caught.value.next_step) == (
        "mig=on (MIG is on, so peer access is refused)",
        "--fault gpu5:mig=on",
    )
    assert all(key.effect and key.values for key in FAULT_KEYS)
    assert {key.key: key.values for key in FAULT_KEYS if key.subject is Subject.GPU}["rows"] == "pending|failure"
    assert len({(key.subject, key.key) for key in FAULT_KEYS}) == len(FAULT_KEYS)


@pytest.mark.parametrize(
    ("incomplete", "words"),
    [
        ("gp", ["gpu0:"]),
        ("gpu5:nv", ["gpu5:nvlink=9"]),
        ("gpu5:nvlink=12,wid", [f"gpu5:nvlink=12,width={width}" for width in (1, 2, 4, 8, 16)]),
        ("node3.gpu0:mi", ["node3.gpu0:missing=yes", "node3.gpu0:mig=on"]),
        ("nic2:st", ["nic2:state=down", "nic2:state=init"]),
        ("link0-3:st", ["link0-3:staged=yes"]),
        ("node3:env", ["node3:env=NCCL_P2P_DISABLE=1"]),
        ("leaf1.rail2:up", ["leaf1.rail2:uplink=0.5"]),
        ("cpu0:", []),
    ],
)
def test_a_shell_completes_parts_keys_and_values_of_a_fault(incomplete: str, words: list[str]) -> None:
    assert complete_words("fault", incomplete) == words
    for word in words:
        if not word.endswith(":"):
            assert str(parse_fault(word)) == word
