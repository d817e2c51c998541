"""Python programs in processes of their own that do not import TensorFlow: they are forked from one
that has done so.

The import takes seconds, which most tests of a fresh process would pay again and again. `run`,
`start` and `command` take what follows `python` on a command line. A program finds nothing of
gradlab imported, and neither devices nor threads of TensorFlow started: the server imports
TensorFlow and Keras, and runs no operation.

These tests start a real process: those of the start itself (its messages, what it imports,
variables that TensorFlow or glibc reads then), of a process's memory, and of hashes or addresses,
which all forked processes share.
"""

import array
import atexit
import functools
import json
import os
import pathlib
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types

# What a forked process inherits of TensorFlow is only known to work on Linux.
FORKS = sys.platform == "linux"


def run(*arguments, cwd=None, env=None):
    """Runs `python *arguments` to its end.

    Args:
        *arguments: "-c" and a program, or the path of one; then its arguments.
        cwd: its folder.
        env: its environment.

    Returns:
        A subprocess.CompletedProcess with its output as text.
    """
    job = start(*arguments, cwd=cwd, env=env)
    status = job.wait()
    return subprocess.CompletedProcess(arguments, status, job.stdout(), job.stderr())


def start(*arguments, cwd=None, env=None):
    """Starts `python *arguments`, and returns the `Job`. The arguments are those of `run`."""
    return Job(arguments, cwd, env)


def command(*arguments):
    """A command that does what `python *arguments` does, for what starts processes by itself.

    It is a small process that ends with the status of the forked one, which is killed if that small
    one ends first.
    """
    if not FORKS:
        return [sys.executable, *arguments]
    return [sys.executable, "-I", "-S", __file__, "client", _server(), *arguments]


class Job:
    """A process that was started, whose output goes to files."""

    def __init__(self, arguments, cwd, env):
        self._files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115  open as long as the job
        self._process = subprocess.Popen(
            command(*map(str, arguments)),
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=self._files[0],
            stderr=self._files[1],
        )

    def wait(self):
        """Waits for the end, and returns the status."""
        return self._process.wait()

    def stdout(self):
        """What the process has printed, once it has ended."""
        return self._read(self._files[0])

    def stderr(self):
        """What it has written to its standard error, once it has ended."""
        return self._read(self._files[1])

    def _read(self, file):
        file.seek(0)
        return file.read().decode()


@functools.cache
def _server():
    """The address of this process's server, which ends with this process."""
    folder = tempfile.TemporaryDirectory(prefix="forked-")
    atexit.register(folder.cleanup)
    address = os.path.join(folder.name, "socket")
    log = pathlib.Path(folder.name, "log")
    # The server ends when its standard input does: no other process holds the other end of that
    # pipe.
    with log.open("w") as errors:
        server = subprocess.Popen(
            [sys.executable, __file__, "server", address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    atexit.register(server.communicate)
    assert server.stdout.readline() == b"ready\n", log.read_text()
    return address


# What follows runs in the other processes.


def _client(address, *arguments):
    """Asks the server for a process with this one's files, folder and environment, and ends as that
    one does."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(address)
        request = json.dumps(
            {"arguments": arguments, "cwd": os.getcwd(), "env": dict(os.environ)}
        ).encode()
        line.sendmsg(
            [b"files"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
        )
        line.sendall(request + b"\n")
        answers = line.makefile("r")
        pid = int(answers.readline())
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os.kill(pid, number))
        status = int(answers.readline())
    os._exit(status if status >= 0 else 128 - status)


def _serve(address):
    """Forks a process for each client, until the standard input ends.

    Returns:
        In a forked process: the arguments of its program. The server itself never returns.
    """
    import keras  # noqa: F401  what the programs do not have to import again
    import tensorflow  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks for the status of the guards
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        while True:
            readable, _, _ = select.select([listener, 0], [], [])
            if 0 in readable:
                os._exit(0)
            line, _ = listener.accept()
            if os.fork() == 0:
                break
            line.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return _guard(line)


def _guard(line):
    """Forks the process that a client asks for, and tells its number and its status; kills it if
    the client ends."""
    _, files, _, _ = socket.recv_fds(line, len(b"files"), 3)
    request = json.loads(line.makefile().readline())
    alive, held = os.pipe()  # which ends with the process that holds it
    pid = os.fork()
    if pid == 0:
        line.close()
        os.close(alive)
        return _become(request, files)
    os.close(held)
    for file in files:
        os.close(file)
    line.sendall(b"%d\n" % pid)
    readable, _, _ = select.select([line, alive], [], [])
    if alive not in readable:
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if alive in readable:
        line.sendall(b"%d\n" % status)
    os._exit(0)


def _become(request, files):
    """Takes over the client's files, folder and environment; returns the arguments of the
    program."""
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    return request["arguments"]


def _execute(program, *arguments):
    """Runs a program as Python does: "-c" and its text, or its path."""
    if program == "-c":
        text, *arguments = arguments
        sys.argv, sys.path[0] = ["-c", *arguments], ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(text, "<string>", "exec"), vars(main))
    else:
        sys.argv, sys.path[0] = [program, *arguments], str(pathlib.Path(program).parent)
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    role, *rest = sys.argv[1:]
    if role == "client":
        _client(*rest)
    _execute(*_serve(*rest))
