"""The guard: a small process between a worker and its engine, so that neither leaves the other's processes behind.

It runs the engine in a session of its own and reads a pipe from the worker. When the pipe closes (the worker stopped, or
died in whatever way), on SIGTERM, and when the engine's first process ends, it ends every process of the engine: SIGTERM,
a bounded wait, SIGKILL. Where the kernel can (Linux) the guard is a child subreaper, so that processes whose parents
died, such as vLLM's EngineCore, become its children and are found by descent; elsewhere the engine's group is all that
can be found (invariant 15).

    python -I -S guard.py --record FILE --stop SECONDS [--remove FOLDER] -- COMMAND...

It imports the standard library's smallest modules only and nothing of ours: it starts in a few hundredths of a second,
and stays small for as long as the engine lives. Its exit code is the engine's; 128 + n after a signal n.
"""

import ctypes
import json
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

#: Seconds of the stop time that are kept for processes to vanish after SIGKILL, and for memory trackers to clean up.
AFTER_KILL_S = 1.0
#: Seconds between looks at the processes that are still there.
LOOK_S = 0.02
#: Seconds that what a dead engine left behind gets to end by itself.
LEFT_BEHIND_S = 0.5


class Process:
    """A line of the process table. `start` is comparable for equality between readings within one boot."""

    __slots__ = ("group", "parent", "pid", "session", "start", "zombie")

    def __init__(self, pid: int, parent: int, group: int, session: int, start: int, zombie: bool) -> None:
        self.pid, self.parent, self.group, self.session = pid, parent, group, session
        self.start, self.zombie = start, zombie


def parse_stat(text: str) -> Process:
    """A line of /proc/PID/stat; the name in parentheses may hold spaces and parentheses itself (proc(5))."""
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    return Process(
        pid=int(head.split(" ", 1)[0]),
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        start=int(fields[19]),
        zombie=fields[0] in "ZX",
    )


def read_process(pid: int) -> Process | None:
    """The process with that id now; None where there is none, or no /proc."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return parse_stat(file.read())
    except (OSError, ValueError, IndexError):
        return None


def read_processes() -> list[Process]:
    """Every process there is now; none where there is no /proc."""
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    found = (read_process(int(name)) for name in names if name.isdigit())
    return [process for process in found if process is not None]


def descendants(processes: list[Process], root: int) -> list[Process]:
    """The living processes below `root`, however deep. Pure."""
    children: dict[int, list[Process]] = {}
    for process in processes:
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    pending = [root]
    while pending:
        for child in children.pop(pending.pop(), ()):
            pending.append(child.pid)
            if not child.zombie:
                found.append(child)
    return found


def boot_id() -> str:
    """What distinguishes this boot of this machine from any other; empty where the system does not say."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def is_tracker(pid: int) -> bool:
    """Whether it is Python's resource tracker, which removes shared memory once all others are gone, and then ends."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"resource_tracker" in file.read()
    except OSError:
        return False


def send(pid: int, number: int) -> None:
    """Sends a signal to a process that may be gone."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


class Guard:
    """One engine, from its start to the end of its last process."""

    def __init__(self, *, command: list[str], record: str, folder: str, stop_s: float) -> None:
        """`record` is the file that tells a later worker what was started, `folder` the engine's own, which goes with it.

        `stop_s` bounds the end, in seconds.
        """
        self._command, self._record, self._folder, self._stop_s = command, record, folder, stop_s
        self._subreaper = prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._engine = 0
        self._status: int | None = None

    def run(self) -> int:
        """Starts the engine, waits for a reason to end it, ends it; returns its exit code."""
        wake, alarm = os.pipe()
        os.set_blocking(alarm, False)
        signal.set_wakeup_fd(alarm, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        self._engine = start_engine(self._command)
        try:
            self._write_record()
        except OSError as error:  # a full disk, say (invariant 13)
            # The record only serves a worker whose guard was killed.
            os.write(2, f"no record of the engine can be written: {error.strerror}\n".encode())
        while self._status is None and not asked_to_stop(wake):
            self._reap()
        self._end(self._stop_s if self._status is None else min(self._stop_s, LEFT_BEHIND_S + AFTER_KILL_S))
        if not self._left():  # one may be stuck in a driver: the next start is to know of it
            remove(self._record, self._folder)
        return os.waitstatus_to_exitcode(self._status or 0)

    def _end(self, within: float) -> None:
        """Ends whatever is left of the engine within so many seconds."""
        deadline = time.monotonic() + within
        for pid in self._left():
            send(pid, signal.SIGTERM)
        if self._gone_by(deadline - min(AFTER_KILL_S, within / 2)):
            return
        for pid in self._left():
            if not is_tracker(pid):
                send(pid, signal.SIGKILL)
        self._gone_by(deadline - min(AFTER_KILL_S, within / 2) / 2)
        while not self._gone_by(time.monotonic()):
            for pid in self._left():  # again and again: one may have forked while we looked
                send(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                return
            time.sleep(LOOK_S)

    def _left(self) -> list[int]:
        """Ids of the engine's living processes."""
        processes = read_processes()
        if processes:
            below = {p.pid for p in descendants(processes, os.getpid())}
            same = {p.pid for p in processes if p.session == self._engine and not p.zombie}
            return sorted(below | same)
        try:
            os.killpg(self._engine, 0)
        except (ProcessLookupError, PermissionError):
            return []
        return [-self._engine]  # no process table here: the group, as kill(2) writes it

    def _gone_by(self, deadline: float) -> bool:
        while True:
            self._reap()
            if not self._left():
                self._reap()  # the last may have ended after the first look
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOOK_S)

    def _reap(self) -> None:
        """Takes the exit statuses of the engine and of every stray that became our child."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._engine:
                self._status = status

    def _write_record(self) -> None:
        """Written whole or not at all."""
        engine, guard = read_process(self._engine), read_process(os.getpid())
        owner = read_process(os.getppid())
        facts = {
            "boot_id": boot_id(),
            "engine": self._engine,
            "engine_start": engine.start if engine else 0,
            "executable": executable(self._engine),
            "guard": os.getpid(),
            "guard_start": guard.start if guard else 0,
            "owner": os.getppid(),
            "owner_start": owner.start if owner else 0,
            "folder": self._folder,
        }
        draft = self._record + ".new"
        with open(draft, "w", encoding="utf-8") as file:
            json.dump(facts, file)
        os.replace(draft, self._record)


def executable(pid: int) -> str:
    """The file a process runs; empty where the system does not say."""
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""


def prctl(option: int, value: int) -> bool:
    """Sets an attribute of this process; False where the kernel has none such."""
    if not sys.platform.startswith("linux"):
        return False
    return bool(ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0)


def start_engine(command: list[str]) -> int:
    """Starts the engine in a session of its own, which dies with the guard; returns its process id once it runs."""
    guard = os.getpid()
    started, starting = os.pipe()  # the kernel closes the latter when the engine's program takes the place of ours
    pid = os.fork()
    if pid:
        os.close(starting)
        os.read(started, 1)
        os.close(started)
        return pid
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:  # the guard ended between fork and prctl
            os._exit(1)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execv(command[0], command)  # noqa: S606
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error.strerror}\n".encode())
    os._exit(127)


def asked_to_stop(wake: int) -> bool:
    """Waits for the worker's pipe or a signal; whether either asks for the end (SIGCHLD does not)."""
    ready, _, _ = select.select([0, wake], [], [])
    if wake in ready and set(os.read(wake, 4096)) - {signal.SIGCHLD}:
        return True
    return 0 in ready and not os.read(0, 4096)


def main(args: list[str]) -> int:
    """The command line; see the module's docstring."""
    options = dict(zip(args[: args.index("--") : 2], args[1 : args.index("--") : 2], strict=False))
    return Guard(
        command=args[args.index("--") + 1 :],
        record=options["--record"],
        folder=options.get("--remove", ""),
        stop_s=float(options["--stop"]),
    ).run()


def remove(record: str, folder: str) -> None:
    """Removes the record and the folder with the engine's sockets, which is flat."""
    names = [os.path.join(folder, name) for name in os.listdir(folder)] if os.path.isdir(folder) else []
    for name in [*names, record]:
        try:
            os.unlink(name)
        except OSError:
            continue
    if folder and os.path.isdir(folder):
        try:
            os.rmdir(folder)
        except OSError:
            return


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.exit(code if code >= 0 else 128 - code)
