"""The NVLinks of one GPU, in two calls for all links and two more for each of them."""

from dataclasses import dataclass, field

from gpubench.hardware.node.nvml.answers import INVALID_ARGUMENT, NOT_SUPPORTED, Answers, text
from gpubench.model.facts.snapshot import NvLink, NvlinkPeer, bus_id

_COMMON_SPEED = 90
_LINK_COUNT = 91
_SPEED = 164
_STATE = 165
_VERSION = 166
_ERRORS = {"replay": 161, "recovery": 162, "crc_flit": 163}
_ERROR_COUNTERS = {"replay": 0, "recovery": 1, "crc_flit": 2}
"""Field numbers (NVML_FI_DEV_NVLINK_*) and counters (nvmlNvLinkErrorCounter_t).

CRC_DATA and ECC_DATA, the counters 3 and 4, are left out: on H200 they count what the links corrected, by the hundreds
on every healthy link."""

_VERSIONS = {1: "1.0", 2: "2.0", 3: "2.2", 4: "3.0", 5: "3.1", 6: "4.0", 7: "5.0", 8: "6.0"}
_PEERS = {0: NvlinkPeer.GPU, 1: NvlinkPeer.CPU, 2: NvlinkPeer.SWITCH}
_HOPPER = (9, 0)


def read_nvlinks(answers: Answers, capability: tuple[int, int] | None) -> tuple[NvLink, ...] | None:
    """The links of a GPU, empty where it has none, None where NVML does not say.

    What is not known of a link is in `unknown` as `nvlinks.version` and so on, for the first link that lacks it.
    """
    common = answers.fields([(_LINK_COUNT, 0), (_COMMON_SPEED, 0)])
    count = common.get((_LINK_COUNT, 0))
    if count is None:
        count = _count_by_asking(answers)
    if not count:
        return None if count is None else ()
    wanted = (_STATE, _SPEED, _VERSION, *_ERRORS.values())
    fields = answers.fields((number, link) for link in range(count) for number in wanted)
    reader = _LinkReader(answers, fields, common.get((_COMMON_SPEED, 0)), capability or (0, 0))
    return tuple(reader.read(link) for link in range(count))


def _count_by_asking(answers: Answers) -> int | None:
    """The number of links that answer: an index past the last is invalid, any is not supported without NVLink."""
    most: int = answers.library.NVML_NVLINK_MAX_LINKS
    for link in range(most):
        reply = answers.call("nvmlDeviceGetNvLinkState", link)
        if reply.code == INVALID_ARGUMENT or (reply.code == NOT_SUPPORTED and link == 0):
            return link
        if reply.value is None and link == 0:
            answers.unknown["nvlinks"] = reply.reason
            return None
    return most


@dataclass(slots=True)
class _LinkReader:
    """Reads the links of one GPU from the fields that were had at once, and asks for what they lack."""

    answers: Answers
    fields: dict[tuple[int, int], int]
    common_speed_mb_s: int | None
    capability: tuple[int, int]
    counters: dict[str, int] = field(default_factory=_ERROR_COUNTERS.copy)

    def read(self, link: int) -> NvLink:
        """One link. What an inactive one does not answer stays unknown."""
        state = self._state(link)
        speed_mb_s = self.fields.get((_SPEED, link), self.common_speed_mb_s)
        version = self.fields.get((_VERSION, link))
        if version is None:
            version = self.answers.ask("nvlinks.version", "nvmlDeviceGetNvLinkVersion", link)
        peer = self.answers.ask("nvlinks.peer", "nvmlDeviceGetNvLinkRemoteDeviceType", link)
        return NvLink(
            number=link,
            active=None if state is None else bool(state),
            version=_VERSIONS.get(version) if version is not None else None,
            raw_gb_s=speed_mb_s / 1000 if speed_mb_s else None,
            peer=_PEERS.get(peer) if peer is not None else None,
            peer_bus_id=self._peer_bus_id(link),
            errors=self._errors(link),
        )

    def _state(self, link: int) -> int | None:
        by_field = self.fields.get((_STATE, link))
        # NCCL, too, asks the field first from Hopper on and the function first before.
        if self.capability >= _HOPPER and by_field is not None:
            return by_field
        reply = self.answers.call("nvmlDeviceGetNvLinkState", link)
        state: int | None = by_field if reply.value is None else reply.value
        if state is None:
            self.answers.unknown.setdefault("nvlinks.active", reply.reason)
        return state

    def _peer_bus_id(self, link: int) -> str | None:
        """The device at the other end; a virtual machine hides it behind an address of ones."""
        remote = self.answers.ask("nvlinks.peer_bus_id", "nvmlDeviceGetNvLinkRemotePciInfo", link)
        address = bus_id(text(remote.busId) or "") if remote is not None else ""
        if address.startswith("ffffffff:"):
            self.answers.unknown.setdefault("nvlinks.peer_bus_id", "this virtual machine hides it")
        return address if address and not address.startswith("ffffffff:") else None

    def _errors(self, link: int) -> dict[str, int]:
        """The counters that could be read; one that is not supported on a link is not asked for on the next."""
        counts = {}
        for name, number in _ERRORS.items():
            count = self.fields.get((number, link))
            if count is None and name in self.counters:
                reply = self.answers.call("nvmlDeviceGetNvLinkErrorCounter", link, self.counters[name])
                count = reply.value
                if count is None:
                    del self.counters[name]
                    self.answers.unknown.setdefault(f"nvlinks.errors.{name}", reply.reason)
            if count is not None:
                counts[name] = count
        return counts
