"""What a sandboxed child runs: one program of the model, and one test of it.

Owns the last step only: everything that confines this process was set up by `code_sandbox.py`
before it was started, but for the refusals of `_refuse_dangerous_calls` where the host allows no
namespaces. Started as `python -c <this source>`; the job is a JSON object on descriptor 3, and a
passed call test writes the word it was given to descriptor 4. The word is gone from the reach of a
program that merely ends early, closes its output or prints: it is no secret from one that searches
the memory of its own process.
"""

import importlib.machinery
import json
import os
import runpy
import sys
import types

# Of Python's audit events: leaving the process, the network, other processes, raw memory.
_REFUSED_PREFIXES = (
    "socket.", "subprocess.", "ctypes.", "os.exec", "os.fork", "os.posix_spawn", "os.spawn",
    "os.system", "os.kill", "os.chmod", "os.chown", "os.link", "os.symlink", "os.rename",
    "os.remove", "os.rmdir", "os.truncate", "pty.spawn", "signal.pthread_kill", "syslog.",
    "resource.setrlimit",
)  # fmt: skip
_REFUSED_MODULES = {"_posixsubprocess", "_ctypes", "ctypes"}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def main() -> None:
    """Exit status 0 when the program, and the test where it is one of calls, ran to the end."""
    with open(3, "rb") as file:
        job = json.load(file)
    if job["refuse"]:
        _refuse_dangerous_calls(os.getcwd())
    if job["call"] is None:
        runpy.run_path(job["program"], run_name="__main__")
        return
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    importlib.machinery.SourceFileLoader("solution", job["program"]).exec_module(module)
    # The test is ours, and sees the program's names as if it stood below it.
    exec(compile(job["call"], "test", "exec"), module.__dict__)
    os.write(4, job["word"].encode())


def _refuse_dangerous_calls(directory: str) -> None:
    """Has the interpreter refuse them; a hook of this kind cannot be taken out again."""
    inside = os.path.join(os.path.realpath(directory), "")

    def refuse(event: str, arguments: tuple) -> None:
        if event == "open":
            path, _, flags = arguments
            if not flags & _WRITING or isinstance(path, int):
                return
            if os.path.realpath(os.fsdecode(path)).startswith(inside):
                return
        elif event == "import":
            if arguments[0] not in _REFUSED_MODULES:
                return
        elif not event.startswith(_REFUSED_PREFIXES):
            return
        raise PermissionError(f"{event} is not allowed here")

    sys.addaudithook(refuse)


if __name__ == "__main__":
    main()
