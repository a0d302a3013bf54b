"""The supervisor of a rank, which starts, watches and ends its scan workers. It uses neither CUDA nor MPI."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from msgspec import Struct

from gpubench.machine.children import module_command, package_environment
from gpubench.machine.host import is_mps_running, leave_core, process_state
from gpubench.model.facts.environment import strip_launcher
from gpubench.model.results.scan import LocalFigure, LocalQuantity
from gpubench.ranks.scan import messages

SECONDS_TO_BE_KILLED = 2.0  # A killed process that exists for longer hangs in the kernel, and its GPU is unusable
_FAILURES = {
    messages.REFUSED: messages.Outcome.BROKEN,
    "deadline": messages.Outcome.DEADLINE,
    "broken": messages.Outcome.BROKEN,
    "failed": messages.Outcome.OWN_WORKER_FAILED,
    "wrong": messages.Outcome.WRONG_DATA,
}


class WorkerProcess:
    """The worker process for one rail, which is replaced if it dies.

    Start all workers from one thread, because the kernel kills them when the thread that started them ends.
    """

    def __init__(self, backend: str, device: int, secret: bytes) -> None:
        self.listener = socket.create_server(("", 0), backlog=16)
        self._stuck: subprocess.Popen[bytes] | None = None
        self._words = backend, device
        self._secret = secret
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._received = b""
        self._ended_with: int | None = None
        self._task: messages.WorkerTask | None = None
        self._under_mps = backend == "nccl" and is_mps_running(os.environ)

    @property
    def is_lost(self) -> bool:
        """True if the worker was killed but its process still exists."""
        return self._stuck is not None and self._stuck.poll() is None

    @property
    def loss(self) -> messages.Outcome:
        """The outcome to report for a lost worker: its GPU hangs, but under MPS the worker may only wait for the
        server.
        """
        return messages.Outcome.BROKEN if self._under_mps else messages.Outcome.OWN_WORKER_BLOCKED

    @property
    def port(self) -> int:
        """The TCP port on which partners connect. The supervisor owns the socket, so that a new worker has the same
        port.
        """
        return int(self.listener.getsockname()[1])

    @property
    def control(self) -> socket.socket | None:
        return self._control

    def begin(self, task: messages.WorkerTask) -> None:
        """Send a task to the worker. Start the worker first if it is not running."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        self._received, self._task = b"", task
        with contextlib.suppress(OSError):
            if self._control is not None:
                self._control.sendall(msgspec.json.encode(task) + b"\n")

    def answer(self, number: int) -> dict[str, object] | None:
        """Return the worker's answer to task `number`, or None if it has not arrived. Raise EOFError if the worker
        has died.
        """
        if self._control is None:
            raise EOFError
        with contextlib.suppress(BlockingIOError):
            data = self._control.recv(2**16)
            if not data:
                raise EOFError
            self._received += data
        line, found, rest = self._received.partition(b"\n")
        if not found:
            return None
        self._received = rest
        answer: dict[str, object] = json.loads(line)
        return answer if answer.get("number") == number else None

    def retry_refused(self, answer: dict[str, object]) -> bool:
        """If an MPS server rejected this worker, start a new one with the same task and return True."""
        if answer.get("failure") != messages.REFUSED or self._task is None:
            return False
        self._end()
        self.begin(self._task)
        return True

    def outcome(self, answer: dict[str, object]) -> tuple[float, messages.Outcome, str]:
        """Return the GB/s, outcome and remark from a worker's answer.

        Under MPS, also end a worker that failed. If an MPS client dies during work, the server disconnects all other
        clients, and accepts no new one until they have ended.
        """
        gb_s = answer.get("gb_s")
        if isinstance(gb_s, float):
            return gb_s, messages.Outcome.DONE, ""
        if self._under_mps:
            self._end()
        return (
            0.0,
            _FAILURES.get(str(answer.get("failure")), messages.Outcome.OWN_WORKER_FAILED),
            str(answer.get("remark", "")),
        )

    def state(self) -> messages.Outcome:
        """Return why the worker does not respond, judged by its process state in the kernel."""
        if self._process is None or self._process.poll() is not None:
            return messages.Outcome.OWN_WORKER_DIED
        letter = process_state(self._process.pid)
        if letter in "Tt":
            return messages.Outcome.OWN_WORKER_STOPPED
        return self.loss if letter == "D" else messages.Outcome.DEADLINE

    def has_died(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def describe_end(self) -> str:
        """Return how the worker process ended, for example 'signal 9' or 'exit code 1'."""
        code = self._ended_with
        if code is None:
            return "no exit code"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        """Kill the worker. If its process still exists afterwards, the worker counts as lost."""
        if self._process is not None:
            self._process.poll()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            try:
                self._ended_with = self._process.wait(SECONDS_TO_BE_KILLED)
            except subprocess.TimeoutExpired:
                self._stuck = self._process
            self._process = None
        if self._control is not None:
            self._control.close()
            self._control = None

    def _end(self) -> None:
        """Let the worker exit by itself, as an MPS client should. Kill it if it does not."""
        if self._process is not None and self._control is not None:
            self._control.close()
            self._control = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(SECONDS_TO_BE_KILLED)
        self.kill()

    def close(self) -> None:
        """Kill the worker and close its TCP port."""
        self.kill()
        self.listener.close()

    def _start(self) -> None:
        self.kill()
        own, its = socket.socketpair()
        backend, device = self._words
        numbers = str(its.fileno()), str(self.listener.fileno()), str(device)
        self._process = subprocess.Popen(
            module_command("gpubench.backends.scan_worker", backend, *numbers),
            pass_fds=(its.fileno(), self.listener.fileno()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=package_environment(strip_launcher(os.environ)),
            start_new_session=True,
        )
        its.close()
        with contextlib.suppress(OSError):  # the worker has died already, and `answer` raises EOFError
            own.sendall(self._secret.hex().encode() + b"\n")
        own.setblocking(False)  # noqa: FBT003 - the socket's own signature
        self._control = own


def seconds_left(deadline: float) -> float:
    """Return the seconds until `deadline`, a time of the monotonic clock. 0 if it has passed."""
    return max(0.0, deadline - time.monotonic())


SECONDS_AFTER_DEADLINE = 1.0  # A worker that has not finished its round this long after the deadline is late
SECONDS_TO_ABORT = 5.0  # Time for a late worker to abort its communicator before it is killed
# Longest time from the deadline to the supervisor's reply.
SECONDS_OF_SUPERVISOR = SECONDS_AFTER_DEADLINE + SECONDS_TO_ABORT + SECONDS_TO_BE_KILLED

SECONDS_OF_PHASE_0 = 20.0  # Time to start a worker, initialize its GPU, and measure its copies
SECONDS_WITHOUT_ORDER = 60.0  # A supervisor ends if it gets no order for the duration of three rounds and this time
_TRIES, _SECONDS_TO_CONNECT = 20, 3.0
_SECONDS_TO_BE_GREETED = 60.0  # Rank 0 authenticates supervisors one by one, and strangers may connect first


class RankCard(Struct, frozen=True):
    """The IP addresses of a rank's host, and the TCP port of each of its rails."""

    rank: int
    host: str
    addresses: tuple[str, ...]
    ports: Mapping[int, int]
    control_port: int = 0

    def places(self, port: int, own_host: str) -> tuple[tuple[str, int], ...]:
        """Return all addresses at which `own_host` may reach a port on this rank's host."""
        local = ("127.0.0.1",) if self.host == own_host else ()
        return tuple((address, port) for address in (*local, *self.addresses))


class Supervisor:
    """Execute the orders of rank 0 with one rank's workers. `devices` are the GPUs by rail."""

    def __init__(self, backend: str, rank: int, devices: Mapping[int, int], secret: bytes) -> None:
        self._rank = rank
        self._first_quantity = LocalQuantity.MEMORY if backend == "host" else LocalQuantity.FROM_HOST
        self._secret = secret
        self._faults: dict[int, tuple[float, messages.Outcome, str]] = {}
        self.workers = {rail: WorkerProcess(backend, device, secret) for rail, device in devices.items()}

    def serve(self, cards: Sequence[RankCard], deadline_s: float) -> bool:
        """Execute orders until the scan ends. Return True if no node is gone. Raise OSError if rank 0 is lost."""
        own_host = cards[self._rank].host
        if len(self.workers) > 1:
            leave_core()
        with contextlib.closing(_connected(cards[0].places(cards[0].control_port, own_host))) as control:
            messages.greet(control, self._secret, str(self._rank).encode())
            messages.keep_alive(control)
            patience = SECONDS_WITHOUT_ORDER + 3 * (deadline_s + SECONDS_OF_SUPERVISOR)
            with messages.wrap_socket(control, patience) as connection:
                while not isinstance(order := messages.receive(connection), messages.EndOrder):
                    messages.send(connection, self._reply(order, cards, own_host))
                return order.is_whole

    def close(self) -> None:
        """End all workers."""
        for worker in self.workers.values():
            worker.close()

    def _reply(self, order: messages.Message, cards: Sequence[RankCard], own_host: str) -> messages.Message:
        match order:
            case messages.ClockOrder():
                return messages.ClockReply(time.time())
            case messages.LocalOrder():
                figures = list(self._local())
                remark = next((figure.failure for figure in figures if figure.failure), "")
                return messages.LocalReply(
                    tuple((figure.gpu, figure.quantity.value, figure.gb_s) for figure in figures), remark
                )
            case messages.FailedOrder():
                return self._failed()
            case messages.RingOrder():
                return self._run_in_rings(order, cards, own_host)
            case messages.RoundOrder():
                return self.round(order.number, dict(self._tasks(order, cards, own_host)), order.deadline_s)
            case _:
                raise ConnectionError(f"not an order: {order}")

    def _failed(self) -> messages.RoundReply:
        """Report the rails whose worker died or hung in phase 0. The next round reports these failures again."""
        for rail, worker in self.workers.items():
            if rail not in self._faults and worker.has_died():
                worker.kill()
                self._faults[rail] = 0.0, messages.Outcome.OWN_WORKER_DIED, f"{worker.describe_end()}, in phase 0"
        remark = next((words for _, _, words in self._faults.values()), "")
        return messages.RoundReply(
            0, tuple((rail, gb_s, int(out)) for rail, (gb_s, out, _) in self._faults.items()), remark
        )

    def _tasks(
        self, order: messages.RoundOrder, cards: Sequence[RankCard], own_host: str
    ) -> Iterator[tuple[int, messages.WorkerTask]]:
        partner = cards[order.partner]
        for rail in self.workers:
            if rail in partner.ports and rail not in order.retired:
                places = () if order.listens else partner.places(partner.ports[rail], own_host)
                yield rail, messages.WorkerTask(order.number, rail, order.partner, self._rank, order.deadline_s, places)

    def _run_in_rings(self, order: messages.RingOrder, cards: Sequence[RankCard], own_host: str) -> messages.RoundReply:
        tasks = {
            seat.rail: messages.WorkerTask(
                order.number,
                seat.rail,
                seat.previous,
                self._rank,
                order.deadline_s,
                cards[seat.next].places(cards[seat.next].ports[seat.next_rail], own_host),
                seat.size,
                seat.place,
                seat.previous_rail,
                order.all_reduce,
            )
            for seat in order.seats
            if seat.rail in self.workers
        }
        reply = self.round(order.number, tasks, order.deadline_s)
        if order.repeats_failures:
            own = [
                (rail, messages.Outcome(outcome)) for rail, _, outcome in reply.figures if outcome in messages.OWN_FAULT
            ]
            remark = ", ".join(filter(None, (reply.remark, "in phase 0")))
            self._faults |= {rail: (0.0, outcome, remark) for rail, outcome in own}
        return reply

    def round(self, number: int, tasks: Mapping[int, messages.WorkerTask], deadline_s: float) -> messages.RoundReply:
        """Measure all rails at once. Return by the deadline, plus the time to abort and kill workers that hang."""
        found = {rail: self._faults.pop(rail) for rail in tasks if rail in self._faults}
        for rail in [rail for rail in tasks if rail not in found]:
            worker = self.workers[rail]
            if worker.is_lost:
                found[rail] = 0.0, worker.loss, "it still hangs, killed in an earlier round"
            elif worker.has_died():
                worker.kill()
                found[rail] = 0.0, messages.Outcome.OWN_WORKER_DIED, worker.describe_end()
        waiting = [rail for rail in tasks if rail not in found]
        for rail in waiting:
            self.workers[rail].begin(tasks[rail])
        answers = self._answers(number, waiting, time.monotonic() + deadline_s + SECONDS_AFTER_DEADLINE, found)
        late = [rail for rail in waiting if rail not in answers and rail not in found]
        states = {rail: self.workers[rail].state() for rail in late}
        patient = [rail for rail in late if states[rail] is messages.Outcome.DEADLINE]
        answers |= self._answers(number, patient, time.monotonic() + SECONDS_TO_ABORT, found)
        for rail in late:
            if rail in answers or rail in found:
                continue
            self.workers[rail].kill()
            # A late worker may hang itself, or wait for its partner to abort.
            state = self.workers[rail].loss if self.workers[rail].is_lost else states[rail]
            found[rail] = 0.0, state, "killed after the deadline"
        found |= {rail: self.workers[rail].outcome(answer) for rail, answer in answers.items()}
        remark = next((words for _, outcome, words in found.values() if outcome and words), "")
        return messages.RoundReply(
            number, tuple((rail, gb_s, int(out)) for rail, (gb_s, out, _) in found.items()), remark
        )

    def _answers(
        self, number: int, rails: Sequence[int], deadline: float, found: dict[int, tuple[float, messages.Outcome, str]]
    ) -> dict[int, dict[str, object]]:
        answers: dict[int, dict[str, object]] = {}
        while waiting := [rail for rail in rails if rail not in answers and rail not in found]:
            if not seconds_left(deadline):
                break
            controls = ((self.workers[rail].control, rail) for rail in waiting)
            sockets = {control: rail for control, rail in controls if control is not None}
            ready, _, _ = select.select(list(sockets), [], [], seconds_left(deadline))
            for control in ready:
                rail = sockets[control]
                worker = self.workers[rail]
                try:
                    answer = worker.answer(number)
                except (EOFError, OSError):
                    worker.kill()
                    found[rail] = 0.0, messages.Outcome.OWN_WORKER_DIED, worker.describe_end()
                else:
                    if answer is not None and not worker.retry_refused(answer):
                        answers[rail] = answer
        return answers

    def _local(self) -> list[LocalFigure]:
        """Measure phase 0 for all rails of this rank at once. The next round reports workers that died or hung.

        If a copy fails but its worker survives, only that value is missing.
        """
        tasks = {rail: messages.WorkerTask(0, rail, 0, self._rank, SECONDS_OF_PHASE_0) for rail in self.workers}
        for rail, task in tasks.items():
            self.workers[rail].begin(task)
        faults = self._faults
        answers = self._answers(0, list(tasks), time.monotonic() + SECONDS_OF_PHASE_0, faults)
        for rail in [rail for rail in tasks if rail not in answers and rail not in faults]:
            state = self.workers[rail].state()
            self.workers[rail].kill()
            faults[rail] = 0.0, state, "killed in phase 0"
        figures = []
        for rail, answer in answers.items():
            local = answer.get("local")
            if not isinstance(local, list):
                failed = messages.WORDS[messages.Outcome.OWN_WORKER_FAILED]
                seen = f"{failed}: {answer.get('remark') or 'it gave no figures'}"
                figures.append(LocalFigure(0, rail, self._first_quantity, 0.0, failure=seen))
                continue
            for name, gb_s in local:
                figures.append(LocalFigure(0, rail, LocalQuantity(name), float(gb_s)))
        return figures


def _connected(places: Sequence[tuple[str, int]]) -> socket.socket:
    error: OSError = ConnectionRefusedError("rank 0 sent no address")
    for _ in range(_TRIES):
        for place in places:
            try:
                connection = socket.create_connection(place, _SECONDS_TO_CONNECT)
            except OSError as raised:
                error = raised
            else:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(_SECONDS_TO_BE_GREETED)
                return connection
        time.sleep(0.1)
    raise error
