"""Runs the tests of one program in confined processes; a program of its own, for Linux.

    trainer --stdin, stdout--> sandbox --first process of its namespaces--> one process per test

Owns what confines a test, and its end. The job comes as JSON on stdin, the verdicts go to stdout.

* Where the host allows namespaces: no network, no sight of other processes, all file systems read
  only but for a small one in memory, made anew for every test. Whatever a test has left running is
  killed before the next, and the kernel ends everything when the first process ends.
* Elsewhere `code_runner.py` has the interpreter refuse sockets, processes and files outside the
  directory of the test. That stops programs that try, not ones that attack the interpreter.
* Always: limits on processor time, wall time, memory, processes, files and output.

As root, tests run under a user id of their own. Never imports JAX or anything of the package.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import resource
import secrets
import select
import signal
import sys
import time
from typing import NoReturn

_RUNNER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "code_runner.py")
_NEW_USER, _NEW_OTHERS = 0x10000000, 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MOUNT_SETATTR, _AT_RECURSIVE, _ATTR_RDONLY_NOSUID = 442, 0x8000, 3
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_FIRST_USER_ID = 0x70000000  # plus our process id: shared with nobody, so limits count us alone
_NOBODY = 65534
_BOX = "/tmp"
_DIRECTORY_BYTES = 64 << 20
_MAX_OPEN_FILES = 64

_libc = ctypes.CDLL(None, use_errno=True)


@dataclasses.dataclass(frozen=True)
class _Job:
    """Times in seconds, wall time for all tests together, the other limits for each."""

    directory: str  # exists and is empty; of use without namespaces
    program: str
    tests: list[dict]  # {"call": source} or {"input": text, "output": text}
    stop_at_failure: bool
    namespaces: bool  # False: do not even try
    wall_seconds: float
    cpu_seconds: int
    memory_bytes: int
    output_bytes: int
    max_processes: int


@dataclasses.dataclass(frozen=True)
class _Box:
    """Where and as whom tests run."""

    python: str
    program: str
    work: str
    user_id: int  # −1: the one we have
    namespaces: bool
    library_path: str = ""


def main() -> None:
    """One job, one reply: {"passed": [...], "late": bool, "isolation": [...]}."""
    job = _Job(**json.load(sys.stdin))
    with open(_RUNNER) as file:
        runner = file.read()
    if not (job.namespaces and _enter_namespaces()):
        _reply(_run_tests(job, _make_plain_box(job), runner), [])
        return
    # Only a child is the first process of the new process namespace.
    user_id = _find_user_id()
    first = os.fork()
    if first == 0:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        box, isolation = _make_namespace_box(job, user_id)
        _reply(_run_tests(job, box, runner), isolation)
    else:
        os.waitpid(first, 0)


def _reply(result: dict, isolation: list[str]) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody waits any more
        os.write(1, json.dumps({**result, "isolation": isolation}).encode())


def _run_tests(job: _Job, box: _Box, runner: str) -> dict:
    deadline = time.monotonic() + job.wall_seconds
    passed: list[bool] = []
    for test in job.tests:
        passed.append(_run_test(job, box, runner=runner, test=test, deadline=deadline))
        if time.monotonic() >= deadline or (job.stop_at_failure and not passed[-1]):
            break
    late = time.monotonic() >= deadline and not passed[-1]
    return {"passed": passed, "late": late}


def _run_test(job: _Job, box: _Box, *, runner: str, test: dict, deadline: float) -> bool:
    """Whether one test passed; nothing of it is left running."""
    _renew_work_directory(box)
    word = secrets.token_hex(16)
    call = test.get("call")
    request = {"program": box.program, "call": call, "word": word, "refuse": not box.namespaces}
    job_file = _memory_file(json.dumps(request).encode())
    input_file = _memory_file(test.get("input", "").encode())
    output_file = _memory_file(b"")
    verdict, verdict_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            _place_descriptors([input_file, output_file, output_file, job_file, verdict_end])
            _confine(job, box)
            _start(box, runner)
        except OSError as error:
            os.write(4, f"{word} {error}".encode())
        finally:
            os._exit(1)
    ended_well = _wait(pid, deadline)
    _kill_the_rest(pid, box)
    said, printed = _read_verdict(verdict), os.pread(output_file, job.output_bytes, 0)
    for descriptor in (job_file, input_file, output_file, verdict, verdict_end):
        os.close(descriptor)
    if said.startswith(f"{word} ".encode()):  # a fault of ours is not one of the program
        raise RuntimeError(f"a test could not be started: {said.decode()[len(word) :]}")
    if call is not None:
        return ended_well and said == word.encode()
    return ended_well and _lines(printed.decode(errors="replace")) == _lines(test["output"])


def _wait(pid: int, deadline: float) -> bool:
    """True when the process ended by itself in time, with exit status 0; it is gone either way."""
    descriptor = os.pidfd_open(pid)
    ended, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
    os.close(descriptor)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return bool(ended) and os.waitstatus_to_exitcode(status) == 0


def _kill_the_rest(pid: int, box: _Box) -> None:
    """What the test started and left: in a namespace all but ourselves, else its group."""
    with contextlib.suppress(ProcessLookupError):
        if box.namespaces:
            os.kill(-1, signal.SIGKILL)
        else:
            os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _read_verdict(descriptor: int) -> bytes:
    with contextlib.suppress(BlockingIOError):  # nothing was said
        return os.read(descriptor, 256)
    return b""


def _lines(text: str) -> list[str]:
    """White space at the ends of lines and of the text is no difference."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _memory_file(content: bytes) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC)
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _place_descriptors(descriptors: list[int]) -> None:
    """In the child: these become 0, 1, 2, ..., every other one is closed."""
    os.setsid()
    # Out of the way first: a target must not be one that is still to be copied.
    spare = [os.dup2(descriptor, 100 + place) for place, descriptor in enumerate(descriptors)]
    for place, descriptor in enumerate(spare):
        os.dup2(descriptor, place)
    os.closerange(len(descriptors), 1 << 16)


def _confine(job: _Job, box: _Box) -> None:
    """In the child: user, limits. Nothing of this can be undone by the program."""
    os.chdir(box.work)
    limits = {
        resource.RLIMIT_CPU: job.cpu_seconds,
        resource.RLIMIT_AS: job.memory_bytes,
        resource.RLIMIT_FSIZE: job.output_bytes,
        resource.RLIMIT_NOFILE: _MAX_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    if box.namespaces:  # elsewhere it counts all processes of the user, and forks are refused
        limits[resource.RLIMIT_NPROC] = job.max_processes
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    if box.user_id >= 0:
        os.setgroups([])
        os.setresgid(box.user_id, box.user_id, box.user_id)
        os.setresuid(box.user_id, box.user_id, box.user_id)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user takes it back, so only now


def _start(box: _Box, runner: str) -> NoReturn:
    environment = {
        "HOME": box.work,
        "TMPDIR": box.work,
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "LD_LIBRARY_PATH": box.library_path,
        "PYTHONHASHSEED": "0",  # the order of a set must not decide a reward
    }
    os.execve(box.python, [box.python, "-S", "-s", "-P", "-B", "-c", runner], environment)


def _make_plain_box(job: _Job) -> _Box:
    """Without namespaces: a directory, and as root another user if that one can reach Python."""
    python = os.path.realpath(sys.executable)
    user_id = _find_user_id()
    if user_id >= 0:
        os.seteuid(user_id)
        if not os.access(python, os.X_OK, effective_ids=True):
            user_id = -1
        os.seteuid(0)
    work = os.path.join(job.directory, "work")
    os.chmod(job.directory, 0o755)
    program = _write_program(job, job.directory)
    return _Box(python=python, program=program, work=work, user_id=user_id, namespaces=False)


def _find_user_id() -> int:
    """As root: an id for the tests that no other process has, or nobody's; else −1."""
    if os.getuid() != 0:
        return -1
    wanted = _FIRST_USER_ID + os.getpid()
    with open("/proc/self/uid_map") as file:
        ranges = [[int(word) for word in line.split()] for line in file]
    is_mapped = any(first <= wanted < first + count for first, _, count in ranges)
    return wanted if is_mapped else _NOBODY


def _make_namespace_box(job: _Job, user_id: int) -> tuple[_Box, list[str]]:
    """The mounts of a box, and what it keeps from tests.

    Everything lies in a /tmp of our own, which every user can reach and which hides the real one;
    so does the interpreter, which may be where the tests' user cannot go, below /root say.
    """
    isolation = ["network", "processes"]
    _mount("none", "/", flags=_MS_REC | _MS_PRIVATE)
    python = os.path.relpath(os.path.realpath(sys.executable), os.path.realpath(sys.base_prefix))
    base = os.open(sys.base_prefix, os.O_PATH | os.O_DIRECTORY)  # it may lie in the real /tmp
    _mount_memory(_BOX, mode="755")
    home, work = os.path.join(_BOX, "python"), os.path.join(_BOX, "work")
    os.mkdir(home)
    os.mkdir(work)
    program = _write_program(job, _BOX)
    _mount(f"/proc/self/fd/{base}", home, flags=_MS_BIND | _MS_REC)
    os.close(base)
    with contextlib.suppress(OSError):  # before Linux 5.12
        _make_read_only("/")
        isolation.append("files")
    with contextlib.suppress(OSError):  # some containers do not allow it
        _mount("proc", "/proc", kind="proc")
    box = _Box(
        python=os.path.join(home, python), library_path=os.path.join(home, "lib"),
        program=program, work=work, user_id=user_id, namespaces=True,
    )  # fmt: skip
    return box, isolation


def _renew_work_directory(box: _Box) -> None:
    """Empty, writable for the test, and in a namespace of bounded size."""
    if box.namespaces:
        with contextlib.suppress(OSError):  # the first test finds nothing to take away
            _check(_libc.umount2(box.work.encode(), 2))
        _mount_memory(box.work, mode="777")
        return
    if os.path.isdir(box.work):
        os.rename(box.work, f"{box.work}-{secrets.token_hex(4)}")  # whoever started us removes it
    os.mkdir(box.work)
    if box.user_id >= 0:
        os.chown(box.work, box.user_id, box.user_id)


def _write_program(job: _Job, directory: str) -> str:
    path = os.path.join(directory, "solution.py")
    with open(path, "w", encoding="utf-8", errors="replace") as file:
        file.write(job.program)
    return path


def _enter_namespaces() -> bool:
    """True when this process and its children are in namespaces of their own."""
    user_id, group_id = os.getuid(), os.getgid()
    if user_id == 0:
        return _libc.unshare(_NEW_OTHERS) == 0
    if _libc.unshare(_NEW_USER | _NEW_OTHERS) != 0:
        return False
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user_id} {user_id} 1"),
        ("gid_map", f"{group_id} {group_id} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return True


def _mount(
    source: str, target: str, *, kind: str = "none", flags: int = 0, options: str = ""
) -> None:
    arguments = (source.encode(), target.encode(), kind.encode(), flags, options.encode())
    _check(_libc.mount(*arguments))


def _mount_memory(target: str, *, mode: str) -> None:
    options = f"size={_DIRECTORY_BYTES},nr_inodes=1024,mode={mode}"
    _mount("tmpfs", target, kind="tmpfs", flags=_MS_NOSUID | _MS_NODEV, options=options)


def _make_read_only(path: str) -> None:
    attributes = (ctypes.c_uint64 * 4)(_ATTR_RDONLY_NOSUID, 0, 0, 0)
    arguments = (_MOUNT_SETATTR, -100, path.encode(), _AT_RECURSIVE)
    _check(_libc.syscall(*arguments, ctypes.byref(attributes), ctypes.sizeof(attributes)))


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, value, 0, 0, 0))


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    main()
