#!/usr/bin/env python3
"""A very small SLURM for the tests: what it is called by says which of its commands it is.

`install(folder)` puts sbatch, srun, squeue, sacct and scontrol into `folder/bin`. A job is a
session of processes on this machine, `folder/queue/ID` holds its leader's number while it runs,
`folder/ended/ID` the state that it ended in, and `folder/scripts` what sbatch was given. Where
`folder/kill` stands, sbatch kills who called it, once the jobs are in the queue; as long as
`folder/hold` stands, jobs wait in it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = ("sbatch", "srun", "squeue", "sacct", "scontrol")


def install(folder: Path) -> dict[str, str]:
    """The commands; what to add to the environment for them to be found."""
    for name in ("bin", "queue", "ended", "scripts", "requeued"):
        (folder / name).mkdir(parents=True)
    for name in COMMANDS:
        command = folder / "bin" / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {name} "$@"\n')
        command.chmod(0o755)
    return {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "FAKE_SLURM": str(folder),
    }


def sbatch(home: Path, script: str) -> None:
    text = Path(script).read_text()
    number = 100 + len(list((home / "scripts").iterdir()))
    (home / "scripts" / str(number)).write_text(text)
    array = re.search(r"^#SBATCH --array=0-(\d+)", text, re.MULTILINE)
    tasks = [f"{number}_{task}" for task in range(int(array[1]) + 1)] if array else [str(number)]
    for job in tasks:
        # It is in the queue when sbatch ends, and lives on without it.
        (home / "queue" / job).write_text("")
        subprocess.Popen(
            [sys.executable, __file__, "node", job, str(home / "scripts" / str(number))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    if (home / "kill").exists():
        (home / "kill").unlink()
        os.kill(os.getppid(), signal.SIGKILL)
    print(f"Submitted batch job {number}")


def node(home: Path, job: str, script: str) -> None:
    """Run a job's script, again if it was requeued, then take it out of the queue."""
    array, _, task = job.partition("_")
    while (home / "hold").exists():
        if not (home / "queue" / job).exists():  # cancelled
            return
        time.sleep(0.05)
    ids = {"SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": task} if task else {}
    while True:
        process = subprocess.Popen(
            ["bash", script],
            env=os.environ | {"SLURM_JOB_ID": job, "SLURM_CPUS_PER_TASK": "1"} | ids,
            start_new_session=True,
        )
        (home / "queue" / job).write_text(str(process.pid))
        code = process.wait()
        if not (home / "requeued" / job).exists():
            break
        (home / "requeued" / job).rename(home / "requeued" / f"{job}.done")
    (home / "ended" / job).write_text("COMPLETED" if code == 0 else "OUT_OF_MEMORY")
    (home / "queue" / job).unlink()


def srun(home: Path, *arguments: str) -> None:
    files = {"--output": os.devnull, "--error": os.devnull}
    rest = list(arguments)
    while rest[0].startswith("--"):
        option = rest.pop(0)
        if option in files:
            name = rest.pop(0).replace("%j", os.environ["SLURM_JOB_ID"]).replace("%t", "0")
            for letter, what in (("%A", "ARRAY_JOB_ID"), ("%a", "ARRAY_TASK_ID")):
                name = name.replace(letter, os.environ.get(f"SLURM_{what}", letter))
            files[option] = name
            # submitit makes the folder when sbatch has ended; a cluster takes longer to start jobs.
            deadline = time.monotonic() + 30
            while not Path(name).parent.is_dir() and time.monotonic() < deadline:
                time.sleep(0.05)
    with Path(files["--output"]).open("a") as output, Path(files["--error"]).open("a") as error:
        sys.exit(subprocess.run(rest, stdout=output, stderr=error, check=False).returncode)


def squeue(home: Path, *arguments: str) -> None:
    assert "--format=%i %T %j" in arguments
    for job in (home / "queue").iterdir():
        script = (home / "scripts" / job.name.partition("_")[0]).read_text()
        (name,) = re.findall(r"^#SBATCH --job-name=(.*)", script, re.MULTILINE)
        print(job.name, "RUNNING", name)


def sacct(home: Path, *arguments: str) -> None:
    print("JobID|State|NodeList")
    for job in (home / "ended").iterdir():
        print(f"{job.name}|{job.read_text()}|here")


def scontrol(home: Path, command: str, job: str) -> None:
    assert command == "requeue"
    (home / "requeued" / job).touch()


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(os.environ["FAKE_SLURM"]), *sys.argv[2:])
