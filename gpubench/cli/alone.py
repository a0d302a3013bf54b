"""gpubench started by a person: launch itself as ranks on this host, and show what they measure."""

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpubench.cli.delivery import delivering
from gpubench.cli.options import CollectiveOptions
from gpubench.cli.presentation import Presentation, check_writable
from gpubench.cli.presenter import Presenter, terminal_style
from gpubench.errors import (
    JUDGED_AND_FAILED,
    GpubenchError,
    launcher_failed,
    more_ranks_than_gpus,
    no_gpu,
    ranks_ended_early,
)
from gpubench.hardware import channel, launcher
from gpubench.hardware.cuda import check_installed
from gpubench.hardware.mpi import host_name
from gpubench.hardware.nvml import Driver, read_driver
from gpubench.measure.collective import check_root
from gpubench.model.report import CollectiveRow, Metadata

if TYPE_CHECKING:
    from subprocess import Popen

HOST_RANKS = 2
_CHATTER_LINES = 20


def run(options: CollectiveOptions, arguments: Sequence[str]) -> int:
    """Relaunch `arguments` as ranks on this host and present what they measure; the exit code.

    Raises:
        GpubenchError: nothing can be measured, or the measurement broke; what was measured has been written.
    """
    driver = read_driver(os.environ)
    ranks = choose_ranks(options, driver)
    shown = options.presentation
    check_writable(shown.outputs)
    mpirun = launcher.find_launcher()
    shows_progress = shown.show_progress and sys.stderr.isatty()
    presenter = Presenter(shown, terminal_style(shown, sys.stdout), progress=shows_progress)
    if options.backend is None and driver.hidden_gpus():
        presenter.note(f"no GPU is measured: {driver.hidden_gpus()}")
    with channel.ChannelReceiver() as ranks_channel, delivering(presenter):
        environment = mpirun.environment(os.environ, ranks_channel.path)
        job = launcher.start(mpirun.command(ranks, arguments), environment)
        try:
            return _Audience(presenter, shown, job).listen(ranks_channel)
        finally:
            launcher.stop(job)


def choose_ranks(options: CollectiveOptions, driver: Driver) -> int:
    """How many ranks to launch: one a visible GPU, two where there is none; what cannot work is refused here.

    Raises:
        GpubenchError: no GPU or no CuPy for the nccl backend, more ranks than GPUs, a root that is no rank.
    """
    ranks = options.ranks or driver.visible or HOST_RANKS
    if options.backend == "nccl" or (options.backend is None and driver.visible):
        if not driver.visible:
            raise no_gpu(driver.hidden_gpus() or driver.absent or "the driver finds none on this host")
        check_installed(driver)
        if ranks > driver.visible:
            raise more_ranks_than_gpus(ranks, driver.visible, host_name())
    else:
        options.refuse_gpu_options("this host shows none")
    check_root(options.collective, options.root, ranks)
    return ranks


class _Audience:
    """What has been heard from a job so far."""

    def __init__(self, presenter: Presenter, shown: Presentation, job: "Popen[bytes]") -> None:
        self._presenter = presenter
        self._shown = shown
        self._job = job
        self._error: GpubenchError | None = None
        self._heard = False
        self._chatter: list[str] = []

    def listen(self, ranks: channel.ChannelReceiver) -> int:
        """Present messages until the job is over; its exit code."""
        for message in ranks.messages(self._job):
            if isinstance(message, channel.Chatter):
                self._overhear(message.text)
            else:
                self._take(message)
        if self._error is not None:
            self._presenter.cut_short(failed=self._error.exit_code == JUDGED_AND_FAILED)
            raise self._error
        if self._presenter.report is None:
            self._presenter.cut_short()
            raise self._died(launcher.stop(self._job))
        return self._shown.exit_code(self._presenter.report.verdict)

    def _take(self, message: channel.Message) -> None:
        if not self._heard:
            self._heard = True
            self._pass_on_chatter()
        kind = message["kind"]
        if kind == "begin":
            self._presenter.begin(Metadata.from_record(message["metadata"]))
        elif kind == "progress":
            self._presenter.progress(message["done"], message["total"], message["label"])
        elif kind == "row":
            self._presenter.row(CollectiveRow(**message["row"]))
        elif kind == "end":
            self._presenter.end(channel.report_in(message))
        elif kind == "error" and self._error is None:
            self._error = GpubenchError.from_record(message["error"])

    def _overhear(self, line: str) -> None:
        """Pass on what ranks print (NCCL_DEBUG, warnings), but not mpirun's lament once the outcome is known.

        Before the first rank has spoken it is kept back: if none ever does, its end is the only explanation there is.
        """
        if not line.strip(" -"):
            return
        if not self._heard:
            self._chatter.append(line)
        elif self._error is None and self._presenter.report is None:
            self._presenter.note(line)

    def _died(self, code: int) -> GpubenchError:
        if self._heard:
            return ranks_ended_early(code, self._presenter.rows)
        self._chatter = self._chatter[-_CHATTER_LINES:]
        self._pass_on_chatter()
        return launcher_failed(code)

    def _pass_on_chatter(self) -> None:
        for line in self._chatter:
            self._presenter.note(line)
        self._chatter.clear()
