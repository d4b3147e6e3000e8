"""Trainings by fairseq-train in real processes that start within a moment.

    python forks.py

imports torch and fairseq once, then forks a process for each request it reads: a line of JSON with
`log` (a file to append to), `before` (Python to run first) and `arguments` (of fairseq-train). The
process does all that fairseq-train does once it has read its command line; without arguments it
runs `before` alone. The answer is the process's id, and its exit status when it has ended.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class Training:
    """A forked training, and its process group: it and what it starts."""

    def __init__(self, server: subprocess.Popen[bytes], request: dict[str, Any]) -> None:
        assert server.stdin is not None and server.stdout is not None
        self.answers = server.stdout
        server.stdin.write(json.dumps(request).encode() + b"\n")
        self.pid = int(server.stdout.readline())

    def wait(self) -> int:
        """Its exit status; -9 if it was killed."""
        ready, _, _ = select.select([self.answers], [], [], 300)
        assert ready, f"process {self.pid} has not ended"
        return int(self.answers.readline())

    def ended(self) -> bool:
        return bool(select.select([self.answers], [], [], 0)[0])

    def kill_when(self, is_time: Callable[[], bool]) -> int:
        """SIGKILL at that time, unless it ends before; its exit status."""
        while not (ended := self.ended()) and not is_time():
            time.sleep(0.0005)
        if not ended:
            os.killpg(self.pid, signal.SIGKILL)
        return self.wait()


class Forks:
    """Forks trainings, one at a time."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # an answer that is read ahead could not be waited for
            env=environment,
        )

    def start(self, log: Path, *arguments: object, before: str = "") -> Training:
        request = {
            "log": str(log),
            "before": before,
            "arguments": [str(part) for part in arguments],
        }
        return Training(self.server, request)

    def run(self, log: Path, *arguments: object, before: str = "") -> str:
        """A training to its end; what it said."""
        status = self.start(log, *arguments, before=before).wait()
        said = log.read_text("utf-8")
        assert status == 0, said
        return said


@contextlib.contextmanager
def forking(environment: dict[str, str]) -> Iterator[Forks]:
    forks = Forks(environment)
    try:
        yield forks
    finally:
        forks.server.communicate()


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the imports log is no answer
    import fairseq_cli.train  # first: it sets the logging up
    from fairseq.distributed.utils import call_main

    for imported_when_training_begins in ("fairseq.data.data_utils_fast", "torch._dynamo"):
        importlib.import_module(imported_when_training_begins)

    configured: dict[tuple[str, ...], Any] = {}  # a training that is resumed is so many times
    for line in sys.stdin:
        request = json.loads(line)
        arguments = tuple(request["arguments"])
        if arguments and arguments not in configured:
            configured[arguments] = configuration(arguments)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.setpgid(0, 0)
                log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(log, 1)
                os.dup2(log, 2)
                exec(request["before"], {})
                if arguments:
                    call_main(configured[arguments], fairseq_cli.train.main)
                status = 0
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        with contextlib.suppress(OSError):  # the child was first
            os.setpgid(pid, pid)
        print(pid, file=answers)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers)


def configuration(arguments: tuple[str, ...]) -> Any:
    """What fairseq-train makes of its command line."""
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    parser = options.get_training_parser()
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, list(arguments)))


if __name__ == "__main__":
    serve()
