"""The verifier service: a process that has model output judged in forked workers, under a deadline.

Owns the workers and their lives; `verifier_pool.py` owns this process and speaks to it over pipes,
one JSON array a line: `[id, kind, left, right]` comes in, `[id, outcome]` goes out. It runs on its
own (`python -m pipeline_rl_jax.rewards.verifier_worker`), never imports JAX and has one thread, so
that it may fork: a worker is there in milliseconds, with math-verify already imported.

    trainer process --pipe--> service --socket--> worker (one request at a time, killed when late)

* late: the worker is killed, its request answered "deadline", a new worker forked;
* dead worker (memory limit, fault in a library): the request is tried once more, then "crash";
* dead trainer: end of file on stdin, or a changed parent; the service kills its workers and ends;
* dead service: workers see end of file; one deep in a computation has an alarm of its own.
"""

from __future__ import annotations

import collections
import dataclasses
import gc
import json
import math
import os
import re
import resource
import selectors
import signal
import socket
import sys
import time
from typing import NoReturn

from pipeline_rl_jax.rewards import answer_equality

_MAX_WORKER_BYTES = 4 << 30  # address space; sympy can be made to ask for everything there is
_ALARM_MARGIN_SECONDS = 2.0  # after the deadline, when a worker without a service ends itself
_PARENT_CHECK_SECONDS = 2.0
_MAX_ATTEMPTS = 2


def main() -> None:
    """`verifier_worker <num_workers> <deadline_seconds> <parent pid> <kinds, comma-separated>`"""
    num_workers, deadline_seconds, parent_pid, kinds = sys.argv[1:]
    # Libraries print to stdout; replies must not be mixed with it.
    replies_fd = os.dup(1)
    os.dup2(2, 1)
    if "equal" in kinds.split(","):
        answer_equality.warm_up()
    gc.freeze()  # forked workers then share these pages instead of copying them
    service = _Service(deadline_seconds=float(deadline_seconds), replies_fd=replies_fd)
    try:
        service.run(num_workers=int(num_workers), parent_pid=int(parent_pid))
    except BrokenPipeError:
        pass  # nobody reads replies any more
    finally:
        service.kill_workers()


@dataclasses.dataclass
class _Request:
    request_id: int
    line: bytes
    num_attempts: int = 0


@dataclasses.dataclass
class _Worker:
    pid: int
    connection: socket.socket
    request: _Request | None = None
    kill_seconds: float = math.inf  # time.monotonic() at which its request is given up


class _Service:
    """Hands requests to idle workers, and replaces workers that are late or dead."""

    def __init__(self, *, deadline_seconds: float, replies_fd: int) -> None:
        self._deadline_seconds = deadline_seconds
        self._replies_fd = replies_fd
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        self._queue: collections.deque[_Request] = collections.deque()
        self._partial_line = b""

    def run(self, *, num_workers: int, parent_pid: int) -> None:
        for _ in range(num_workers):
            self._fork_worker()
        self._selector.register(0, selectors.EVENT_READ)
        self._send(["ready", ""])
        while os.getppid() == parent_pid:
            now = time.monotonic()
            next_kill = min(worker.kill_seconds for worker in self._workers)
            patience = min(_PARENT_CHECK_SECONDS, max(0.0, next_kill - now))
            for key, _ in self._selector.select(patience):
                if key.data is not None:
                    self._receive_reply(key.data)
                elif not self._receive_requests():
                    return
            self._kill_late_workers()
            self._assign()

    def kill_workers(self) -> None:
        for worker in self._workers:
            os.kill(worker.pid, signal.SIGKILL)

    def _receive_requests(self) -> bool:
        """Queues what stdin holds; False at its end."""
        data = os.read(0, 1 << 16)
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        self._queue.extend(_Request(json.loads(line)[0], line + b"\n") for line in lines)
        return bool(data)

    def _receive_reply(self, worker: _Worker) -> None:
        try:
            reply = worker.connection.recv(16)
        except ConnectionError:
            reply = b""
        if not reply:
            self._replace(worker, "crash")
        elif worker.request is not None:
            self._send([worker.request.request_id, "yes" if reply == b"1" else "no"])
            worker.request, worker.kill_seconds = None, math.inf

    def _kill_late_workers(self) -> None:
        now = time.monotonic()
        for worker in [worker for worker in self._workers if worker.kill_seconds <= now]:
            self._replace(worker, "deadline")

    def _assign(self) -> None:
        while self._queue:
            worker = next((worker for worker in self._workers if worker.request is None), None)
            if worker is None:
                return
            worker.request = self._queue.popleft()
            worker.request.num_attempts += 1
            worker.kill_seconds = time.monotonic() + self._deadline_seconds
            try:
                worker.connection.sendall(worker.request.line)
            except ConnectionError:
                self._replace(worker, "crash")

    def _replace(self, worker: _Worker, outcome: str) -> None:
        """Ends a worker, settles its request (a crash gets one more try) and forks a new one."""
        os.kill(worker.pid, signal.SIGKILL)
        os.waitpid(worker.pid, 0)
        self._selector.unregister(worker.connection)
        worker.connection.close()
        self._workers.remove(worker)
        self._fork_worker()
        request = worker.request
        if request is not None and outcome == "crash" and request.num_attempts < _MAX_ATTEMPTS:
            self._queue.appendleft(request)
        elif request is not None:
            self._send([request.request_id, outcome])

    def _fork_worker(self) -> None:
        connection, worker_connection = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                _work(worker_connection, self._deadline_seconds)
            finally:
                os._exit(1)  # never run the service's own clean-up in a worker
        worker_connection.close()
        worker = _Worker(pid, connection)
        self._workers.append(worker)
        self._selector.register(connection, selectors.EVENT_READ, worker)

    def _send(self, reply: list[object]) -> None:
        os.write(self._replies_fd, json.dumps(reply).encode() + b"\n")


def _work(connection: socket.socket, deadline_seconds: float) -> NoReturn:
    """Answers requests from the connection until it ends."""
    os.dup2(connection.fileno(), 0)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    # An inherited end of a sibling's socket would keep that sibling alive after the service.
    os.closerange(3, 1 << 16)
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_WORKER_BYTES, _MAX_WORKER_BYTES))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with open(0, "rb", closefd=False) as requests:
        for line in requests:
            _, kind, left, right = json.loads(line)
            # The default action of this signal ends the process inside C code too.
            signal.setitimer(signal.ITIMER_REAL, deadline_seconds + _ALARM_MARGIN_SECONDS)
            verdict = _judge(kind, left, right)
            signal.setitimer(signal.ITIMER_REAL, 0)
            os.write(0, b"1" if verdict else b"0")
    os._exit(0)


def _judge(kind: str, left: str, right: str) -> bool:
    if kind == "equal":
        return answer_equality.answers_equal(left, right)
    return re.search(left, right) is not None


if __name__ == "__main__":
    main()
