"""Real processes that start within a moment: forked from one that has imported torch and fairseq.

    python forks.py trainings

reads requests, lines of JSON with `log` (a file to append to), `before` (Python to run first) and
`arguments` (of fairseq-train). The process does all that fairseq-train does once it has read its
command line; without arguments it runs `before` alone.

    python forks.py commands

runs installed commands as the script in bin/ would, for requests with `words` (command and
arguments), `cwd`, and the files `input`, `output` and `error`; standard input is a pipe.

The answers are the process's id, and its exit status when it has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

MOST_INPUT = 60_000  # what a pipe holds


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
    """Forks trainings or commands, one at a time."""

    def __init__(self, kind: str, environment: dict[str, str]) -> None:
        self.server = subprocess.Popen(
            [sys.executable, __file__, kind],
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

    def command(
        self, words: Sequence[str], *, input: bytes, cwd: Path | None
    ) -> subprocess.CompletedProcess[bytes]:
        """An installed command to its end. At most `MOST_INPUT` bytes of input."""
        with tempfile.TemporaryDirectory() as folder:
            files = {name: Path(folder, name) for name in ("input", "output", "error")}
            files["input"].write_bytes(input)
            named = {name: str(file) for name, file in files.items()}
            request = {"words": words, "cwd": str(cwd or Path.cwd()), **named}
            status = Training(self.server, request).wait()
            output, error = files["output"].read_bytes(), files["error"].read_bytes()
        return subprocess.CompletedProcess(words, status, output, error)


@contextlib.contextmanager
def forking(kind: str, environment: dict[str, str]) -> Iterator[Forks]:
    forks = Forks(kind, environment)
    try:
        yield forks
    finally:
        forks.server.communicate()


def serve(start: Callable[[dict[str, Any]], Callable[[], object]]) -> None:
    """Fork a process for each request.

    Args:
        start: gives what a request's process is to do, and may keep things for later requests.
    """
    requests = os.fdopen(os.dup(0))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the imports log is no answer
    for line in requests:
        work = start(json.loads(line))
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.setpgid(0, 0)
                work()
                status = 0
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
                if isinstance(end.code, str):
                    print(end.code, file=sys.stderr)
            except BaseException:
                traceback.print_exc()
            finally:
                atexit._run_exitfuncs()
                sys.stdout.flush()
                os._exit(status)
        with contextlib.suppress(OSError):  # the child was first
            os.setpgid(pid, pid)
        print(pid, file=answers)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers)


def trainings() -> None:
    import fairseq_cli.train  # first: it sets the logging up
    from fairseq.distributed.utils import call_main

    for imported_when_training_begins in ("fairseq.data.data_utils_fast", "torch._dynamo"):
        importlib.import_module(imported_when_training_begins)
    configured: dict[tuple[str, ...], Any] = {}  # a training that is resumed is so many times

    def start(request: dict[str, Any]) -> Callable[[], object]:
        arguments = tuple(request["arguments"])
        if arguments and arguments not in configured:
            configured[arguments] = configuration(arguments)

        def work() -> None:
            log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            exec(request["before"], {})
            if arguments:
                call_main(configured[arguments], fairseq_cli.train.main)

        return work

    serve(start)


def commands() -> None:
    for slow_to_import in ("torch", "fairseq", "sacrebleu", "scipy.stats", "matplotlib.figure"):
        importlib.import_module(slow_to_import)
    logging.root.handlers.clear()  # each command sets its logging up itself
    logging.root.setLevel(logging.WARNING)

    def start(request: dict[str, Any]) -> Callable[[], object]:
        command, *arguments = request["words"]
        [entry] = entry_points(group="console_scripts", name=command)

        def work() -> None:
            reading, writing = os.pipe()
            os.write(writing, Path(request["input"]).read_bytes())
            os.close(writing)
            created = os.O_WRONLY | os.O_CREAT
            for number, file in enumerate(
                (reading, os.open(request["output"], created), os.open(request["error"], created))
            ):
                os.dup2(file, number)
                os.close(file)
            os.chdir(request["cwd"])
            sys.argv = [str(Path(sys.executable).with_name(command)), *arguments]
            del sys.path[0]  # this file's folder
            sys.exit(entry.load()())

        return work

    serve(start)


def configuration(arguments: tuple[str, ...]) -> Any:
    """What fairseq-train makes of its command line."""
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    parser = options.get_training_parser()
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, list(arguments)))


if __name__ == "__main__":
    {"trainings": trainings, "commands": commands}[sys.argv[1]]()
