"""NCCL's log as in src/debug.cc of NCCL 2.21, 2.24 and 2.28: levels, subsystems, file, and reset."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

LEVELS = {"VERSION": 1, "WARN": 2, "INFO": 3, "ABORT": 4, "TRACE": 5}
DEFAULT_SUBSYSTEMS = "INIT,BOOTSTRAP,ENV"
HEAD = "vm:4310:4310 [0]"


@dataclass
class FakeNcclLog:
    """The log of one process. `environment` is that of getenv(3), `conf` that of a configuration file."""

    environment: dict[str, str]
    stdout: int
    version: int = 22809
    conf: Mapping[str, str] = field(default_factory=dict)
    pid: int = field(default_factory=os.getpid)
    host: str = "vm"
    opens_files: bool = True
    resets: int = 0
    _level: int = -1
    _subsystems: str = ""
    _file: IO[bytes] | None = None
    _from_conf: dict[str, str] | None = None

    @property
    def can_reset_log(self) -> bool:
        return self.version >= 22403

    def reset_log(self) -> None:
        assert self.can_reset_log
        self.resets += 1
        self._level = -2
        if self.version < 22800:
            self._begin()

    def info(self, subsystem: str, text: str) -> None:
        """`INFO(NCCL_<subsystem>, text)`. Several subsystems are joined by a bar."""
        self._write(3, subsystem, f"{HEAD} NCCL INFO {text}\n")

    def warn(self, text: str) -> None:
        self._write(2, "ALL", f"\n[2026-11-20 13:44:06] {HEAD} transport.cc:40 NCCL WARN {text}\n")

    def show_version(self) -> None:
        if self._level == -1:
            self._begin()
        if self._level in (1, 2):
            self._write(1, "ALL", "NCCL version 2.28.9+cuda13.0\n")
        else:
            self.info("ALL", "NCCL version 2.28.9+cuda13.0")

    def end(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, level: int, subsystem: str, text: str) -> None:
        if self._level < 0:
            self._begin()
        if self._level < level or not self._shows(subsystem):
            return
        if self._file is None:
            os.write(self.stdout, text.encode())
        else:
            self._file.write(text.encode())

    def _shows(self, subsystem: str) -> bool:
        if subsystem == "ALL":
            return True
        asked = self._subsystems or DEFAULT_SUBSYSTEMS
        words = asked.upper().removeprefix("^").split(",")
        named = "ALL" in words or bool({*subsystem.split("|")} & {*words})
        return named != asked.startswith("^")

    def _get(self, name: str) -> str | None:
        if self._from_conf is None:
            self._from_conf = {each: value for each, value in self.conf.items() if each not in self.environment}
        return self.environment.get(name, self._from_conf.get(name))

    def _begin(self) -> None:
        if self._level == -2 and self._file is not None:
            self._file.close()
            self._file = None
        self._level = LEVELS.get((self._get("NCCL_DEBUG") or "").upper(), 0)
        self._subsystems = self._get("NCCL_DEBUG_SUBSYS") or ""
        name = (self._get("NCCL_DEBUG_FILE") or "").replace("%h", self.host).replace("%p", str(self.pid))
        if self._level > 1 and name and self.opens_files:
            self._file = Path(name).open("wb", buffering=0)  # noqa: SIM115 - as NCCL, until the next reset
