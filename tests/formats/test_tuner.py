"""The file for NCCL's example tuner plugin: one line for every size from 0 on, by the winners beyond the noise."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpubench.formats.registry import TUNER, Presentation, Target
from gpubench.model.results.backends import WinnerRow, winners
from gpubench.model.results.report import CollectiveRow, Report, Table
from gpubench.model.terms.settings import AGAIN, repeated_name
from gpubench.model.terms.verdict import Verdict
from tests.formats.sample import METADATA, ROW

SIZES = tuple(2**power for power in range(10, 22))
MIDDLE = SIZES[6]
CHANNELS = "NCCL_MAX_NCHANNELS=4"
BUFFERS = "NCCL_BUFFSIZE=8388608"


def row(size: int, setting: str | None, time_us: float, algorithm: str, channels: int | None) -> CollectiveRow:
    return replace(
        ROW,
        size_bytes=size,
        setting=setting,
        time_us=time_us,
        algorithm=algorithm,
        protocol="LL" if size < MIDDLE else "SIMPLE",
        channels=channels,
        ranks=8,
        nodes=2,
    )


def swept(setting: str, *, algorithm: str = "TREE", channels: int | None = 4) -> list[CollectiveRow]:
    """The setting is twice as fast from the middle size on, as its two jobs say."""
    rows = []
    for size in SIZES:
        rows += [row(size, None, 10.0, "RING", 24), row(size, AGAIN, 10.1, "RING", 24)]
        time_us = 20.0 if size < MIDDLE else 5.0
        rows += [row(size, name, time_us, algorithm, channels) for name in (setting, repeated_name(setting))]
    return rows


def written(
    tmp_path: Path, rows: Sequence[CollectiveRow], collective: str = "allreduce", *, ends: bool = True
) -> list[str]:
    """The lines of the file, none of which the plugin takes for two."""
    path = tmp_path / "nccl_tuner.conf"
    writer = TUNER.writer(Target(path=path), Presentation())
    command = ["gpubench", "allreduce", "--set", "NCCL_MAX_NCHANNELS=" + ",".join(map(str, range(1, 200)))]
    writer.begin(replace(METADATA, collective=collective, command=command), ())
    for each in rows:
        writer.row(each)
    best = winners(rows)
    sections = {WinnerRow.section: Table(WinnerRow.columns(), lambda: best)}
    writer.end(Report(verdict=Verdict.PASS, complete=ends, sections=sections))
    lines = path.read_text().splitlines()
    assert max(map(len, lines)) < 255
    return lines


def settings_in(lines: Sequence[str]) -> list[list[str]]:
    """The fields of each line, as the plugin splits them."""
    return [line.split(",") for line in lines if line and not line.startswith("#")]


def test_what_has_no_column_stands_above_the_line(tmp_path: Path) -> None:
    text = "\n".join(written(tmp_path, swept(BUFFERS)))
    assert f"# measured with {BUFFERS}, which has to be set too\nallreduce," in text
    assert "# faster" not in text
    assert f"# 64K to {SIZES[-1] // 2**20}M: faster than NCCL's own choice at 64K, 128K, 256K, 512K, 1M, 2M" in text
    assert "has to be set too" not in "\n".join(written(tmp_path, swept(CHANNELS)))


def test_what_nccl_did_not_name_is_left_out_and_said(tmp_path: Path) -> None:
    lines = written(tmp_path, swept(CHANNELS, channels=None))
    assert len(settings_in(lines)) == 1
    assert any("named no algorithm, protocol and channels" in line for line in lines)


@pytest.mark.parametrize("ends", [False, True])
def test_a_sweep_without_an_end_or_a_winner_sets_nothing(tmp_path: Path, ends: bool) -> None:
    rows = [row(size, None, 10.0, "RING", 24) for size in SIZES] if ends else swept(CHANNELS)
    lines = written(tmp_path, rows, ends=ends)
    assert settings_in(lines) == []
    assert any(line.startswith("# nothing: ") for line in lines)


def test_a_collective_without_algorithms_sets_nothing(tmp_path: Path) -> None:
    assert settings_in(written(tmp_path, swept(CHANNELS), "alltoall")) == []
