"""Runs as jobs, of a SLURM cluster or of this machine: `hydra/launcher=submitit_slurm`.

    python -m qknorm_fairseq.experiment gl_en hydra/launcher=submitit_slurm common.seed=1,2,3

The settings are those of Hydra's submitit launcher, in `configs/hydra/launcher/`. The launcher's
own loop ends at the first job that was killed (its time was up, a node failed) and leaves the
others unheard; here all are heard. A run that is done is not submitted, nor one that waits in
SLURM's queue already: that one is waited for.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import submitit
import torch
from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
from submitit.core.utils import FailedJobError, FailedSubmissionError

from qknorm_fairseq.errors import QKNormError, complaint
from qknorm_fairseq.experiment import check_data, execute, is_begun, is_done
from qknorm_fairseq.files import write_json
from qknorm_fairseq.progress import Steps
from qknorm_fairseq.reading import read_object
from qknorm_fairseq.runs import SCORE, Run
from qknorm_fairseq.training import console

JOB = "job.json"  # in a run's folder: what was submitted last for it, and how to find it in SLURM
RESULT_SECONDS = 10  # a network file system may show a result so much later than it was written


class Task:
    """What a job does: one run, in the folder where the command was called."""

    def __init__(self, run: Run, devices: str | None = None) -> None:
        self.run, self.devices, self.folder = run, devices, Path.cwd()
        self.terminated = False

    def __call__(self) -> str | None:
        """Bring the run to its score; says why that failed, or None."""
        os.chdir(self.folder)
        if self.devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.devices
        signal.signal(signal.SIGTERM, self._note)
        try:
            wanted, there = _gpus(self.run), torch.cuda.device_count()
            if wanted > there:
                raise QKNormError(f"the job has {there} GPUs of {wanted}: see hydra.launcher")
            execute(self.run, Steps(console))
        except QKNormError as error:
            if self.terminated and os.environ["SUBMITIT_EXECUTOR"] == "slurm":
                # SLURM takes the node back, and the training was told so first. That is no
                # failure to tell of: we are to be killed, and where SLURM says so, begun again.
                time.sleep(600)
            return str(error)
        return None

    def _note(self, signum: int, frame: object) -> None:
        self.terminated = True

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """For submitit, before the job's time is up: what to put into the queue again."""
        return submitit.helpers.DelayedSubmission(Task(self.run, self.devices))


@dataclass(frozen=True, eq=False)
class Submitted:
    """A run and the job that it has become."""

    run: Run
    job: submitit.Job[str | None]
    devices: str | None = None

    @property
    def log(self) -> str:
        return os.path.relpath(self.job.paths.stderr)

    @property
    def has_result(self) -> bool:
        _look_again(self.job.paths.folder)
        return bool(self.job.paths.result_pickle.exists())


class Machine:
    """This machine: as many jobs at a time as have the GPUs and cores they ask for."""

    cluster = "local"

    def __init__(self, runs: Sequence[Run]) -> None:
        self.executor = _executor(self.cluster, runs)
        settings = runs[0].launcher or {}
        cores = settings.get("cpus_per_task") or 1
        at_once = max(1, (os.cpu_count() or 1) // cores)
        os.environ.setdefault("OMP_NUM_THREADS", str(cores))
        self.free: list[str | None] = [None] * at_once
        if each := _gpus_per_job(runs):
            named = os.environ.get("CUDA_VISIBLE_DEVICES")
            there = named.split(",") if named else list(map(str, range(torch.cuda.device_count())))
            shares = [there[i : i + each] for i in range(0, len(there) - each + 1, each)]
            if not shares:
                raise QKNormError(f"each job asks for {each} GPUs; this machine has {len(there)}")
            self.free = [",".join(share) for share in shares[:at_once]]

    def in_queue(self, runs: Sequence[Run]) -> list[Submitted]:
        """Nothing: a job of another call holds the lock of its folder."""
        return []

    def submit(self, runs: Sequence[Run]) -> list[Submitted]:
        """Start the first of these, as many as there is room for."""
        started = []
        for run in runs[: len(self.free)]:
            devices = self.free.pop(0)
            job = self.executor.submit(Task(run, devices))
            started.append(Submitted(run, job, devices))
        return started

    def ended(self, jobs: Sequence[Submitted]) -> list[Submitted]:
        done = [one for one in jobs if one.job.done()]
        self.free += [one.devices for one in done]
        return done

    def state(self, jobs: Sequence[Submitted]) -> str:
        return f"{len(jobs)} running"

    def leave(self, jobs: Sequence[Submitted]) -> str:
        """After Ctrl-C: what becomes of the jobs."""
        for one in jobs:
            one.job.cancel()
        return "stopped, with the jobs that ran; the same command goes on"


class Queued(NamedTuple):
    """A job that SLURM has not ended."""

    state: str
    name: str


class Slurm:
    """A cluster with SLURM, called from a machine that has sbatch."""

    cluster = "slurm"

    def __init__(self, runs: Sequence[Run]) -> None:
        missing = [name for name in ("sbatch", "srun", "squeue") if not shutil.which(name)]
        if missing:
            raise QKNormError(
                f"no SLURM on this machine ({missing[0]} is not found): call this where sbatch "
                "works, or use hydra/launcher=submitit_local"
            )
        self.executor = _executor(self.cluster, runs)
        self.begin = self.asked = time.monotonic()
        self.queue: dict[str, Queued] = _queue()

    def in_queue(self, runs: Sequence[Run]) -> list[Submitted]:
        """The runs that an earlier call has submitted and that SLURM still has."""
        found = []
        for run in runs:
            try:
                known = read_object(run.folder / JOB)
            except QKNormError:  # damaged
                continue
            for number, queued in self.queue.items():
                # The jobs of one array: 100_0, 100_1; one alone: 100.
                if queued.name == known.get("name") and number.partition("_")[2] in (
                    *("", str(known.get("task"))),
                ):
                    folder = str(known.get("folder"))
                    found.append(Submitted(run, submitit.SlurmJob(folder=folder, job_id=number)))
                    break
        return found

    def submit(self, runs: Sequence[Run]) -> list[Submitted]:
        """Put all of these into the queue, as one array of jobs.

        Their name is of this call only, and is written down before SLURM has the jobs: whenever
        this process is killed, the next call finds them by it.

        Raises:
            QKNormError: SLURM does not take them; the message says what sbatch said.
        """
        name = f"{(runs[0].launcher or {})['name']}-{uuid.uuid4().hex[:12]}"
        self.executor.update_parameters(name=name)
        for task, run in enumerate(runs):
            run.folder.mkdir(parents=True, exist_ok=True)
            known = {"name": name, "task": task, "folder": str(self.executor.folder)}
            write_json(run.folder / JOB, known)
        try:
            jobs = self.executor.submit_array([Task(run) for run in runs])
        except (FailedJobError, FailedSubmissionError) as error:
            said = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise QKNormError(f"SLURM did not take the jobs: {said[-1] if said else '?'}") from None
        self.queue |= {job.job_id: Queued("PENDING", name) for job in jobs}
        self.begin = self.asked = time.monotonic()
        return [Submitted(run, job) for run, job in zip(runs, jobs, strict=True)]

    def ended(self, jobs: Sequence[Submitted]) -> list[Submitted]:
        now = time.monotonic()
        # squeue is work for the whole cluster's controller: less and less often.
        if now - self.asked > min(60, max(2, (now - self.begin) / 10)):
            self.queue, self.asked = _queue(self.queue), time.monotonic()
        return [one for one in jobs if one.has_result or one.job.job_id not in self.queue]

    def state(self, jobs: Sequence[Submitted]) -> str:
        ended = Queued("ended", "")
        counted = Counter(self.queue.get(one.job.job_id, ended).state.lower() for one in jobs)
        return ", ".join(f"{number} {state}" for state, number in sorted(counted.items()))

    def leave(self, jobs: Sequence[Submitted]) -> str:
        if not jobs:  # interrupted while they were submitted
            return "no longer waiting; the same command finds what SLURM has taken, and goes on"
        numbers = " ".join(dict.fromkeys(one.job.job_id.split("_")[0] for one in jobs))
        return (
            "no longer waiting; the jobs go on without this command, and the same command waits "
            f"for them again (to end them: scancel {numbers})"
        )


def cluster_of(runs: Sequence[Run]) -> Machine | Slurm:
    """Where these runs are to be jobs.

    Raises:
        QKNormError: this machine has no SLURM, or too few GPUs for one job.
    """
    return (Slurm if "Slurm" in (runs[0].launcher or {})["_target_"] else Machine)(runs)


def run_as_jobs(runs: Sequence[Run], steps: Steps) -> list[Run]:
    """Bring every run to its score, each as a job, and wait for all of them.

    Returns:
        The finished runs; why the others failed, and where their logs are, was said.
    """
    finished, open_runs, logs = [], [], []
    for run in runs:
        try:
            check_data(run)
            is_begun(run)
            done = is_done(run)
        except (QKNormError, OSError) as error:
            steps.failed(f"{run.title}: {complaint(error)}")
            continue
        if done:
            steps.done(f"{run.title}: done before")
            finished.append(run)
        else:
            open_runs.append(run)
    if not open_runs:
        return finished
    cluster = cluster_of(open_runs)
    active = cluster.in_queue(open_runs)
    for one in active:
        steps.done(f"{one.run.title}: job {one.job.job_id} of an earlier call, see {one.log}")
    known = {one.run.folder for one in active}
    waiting = [run for run in open_runs if run.folder not in known]
    state = ""
    try:
        while waiting or active:
            if waiting and (new := cluster.submit(waiting)):
                waiting = waiting[len(new) :]
                active += new
                for one in new:
                    steps.done(f"{one.run.title}: job {one.job.job_id}, see {one.log}")
            for one in cluster.ended(active):
                active.remove(one)
                if (reason := _failure(one)) is None:
                    steps.done(f"{one.run.title}: BLEU {one.run.score()['bleu']:.1f}")
                    finished.append(one.run)
                else:
                    steps.failed(f"{one.run.title}: {reason} (job {one.job.job_id})")
                    logs.append(f"  {one.run.title}: {one.log}")
            now = cluster.state(active) + (f", {len(waiting)} to come" if waiting else "")
            if active and now != state:
                steps.done(f"jobs: {now}")
                state = now
            time.sleep(0.5)
    except KeyboardInterrupt:
        steps.failed(cluster.leave(active))
        raise
    for line in ["Logs of the jobs that failed:", *logs] if logs else ():
        steps.console.print(line)
    order = [run.folder for run in runs]
    return sorted(finished, key=lambda run: order.index(run.folder))


def _failure(one: Submitted) -> str | None:
    """Why an ended job has no score, in one line; None if it has."""
    job = one.job
    slurm = isinstance(job, submitit.SlurmJob)
    patience = time.monotonic() + (RESULT_SECONDS if slurm else 0)
    while not one.has_result:
        if time.monotonic() > patience:
            state = job.watcher.get_state(job.job_id, mode="force") if slurm else job.state
            return f"the job ended without a result, state {state}"
        time.sleep(1)
    try:
        reason = job.result()
        while reason is None and not _has_score(one.run):
            if time.monotonic() > patience:
                return f"{one.run.folder / SCORE}: not to be seen here; call it again to look"
            time.sleep(1)
        return reason
    except QKNormError as error:  # the score is damaged
        return str(error)
    except FailedJobError as error:  # an exception: the last unindented line of its traceback
        lines = [line for line in str(error).partition("Traceback")[2].splitlines() if line.strip()]
        said = [line for line in lines if not line[0].isspace() and ": " in line]
        return said[-1] if said else "the job failed"


def _has_score(run: Run) -> bool:
    _look_again(run.folder)
    return is_done(run)


def _look_again(folder: Path) -> None:
    """A change to a folder makes a network file system look for what is new in it."""
    with suppress(OSError):
        folder.chmod(folder.stat().st_mode)


def _executor(cluster: str, runs: Sequence[Run]) -> submitit.AutoExecutor:
    settings: dict[str, Any] = dict(runs[0].launcher or {})
    del settings["_target_"]
    settings["gpus_per_node"] = _gpus_per_job(runs) or None
    folder = Path(settings.pop("submitit_folder")).absolute()
    timeouts = settings.pop("max_num_timeout", None)
    executor = submitit.AutoExecutor(
        folder, cluster=cluster, **({} if timeouts is None else {"slurm_max_num_timeout": timeouts})
    )
    shared = {field.name for field in fields(BaseQueueConf)}
    executor.update_parameters(
        **{key if key in shared else f"{cluster}_{key}": value for key, value in settings.items()}
    )
    return executor


def _gpus(run: Run) -> int:
    """How many a run trains on."""
    return (
        0 if run.config.common.cpu else int(run.config.distributed_training.distributed_world_size)
    )


def _gpus_per_job(runs: Sequence[Run]) -> int:
    needed = max(map(_gpus, runs))
    return max(needed, (runs[0].launcher or {}).get("gpus_per_node") or 0) if needed else 0


def _queue(before: dict[str, Queued] | None = None) -> dict[str, Queued]:
    """The user's jobs that SLURM has not ended; those of before if it is mute."""
    command = ["squeue", "--noheader", "--array", "--format=%i %T %j", "--user", getpass.getuser()]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    if said.returncode:
        if before is not None:  # a controller too busy to answer is no news of any job
            return before
        raise QKNormError(f"squeue failed: {said.stderr.strip() or said.returncode}")
    lines = [line.split(maxsplit=2) for line in said.stdout.splitlines()]
    return {line[0]: Queued(*line[1:]) for line in lines if len(line) == 3}
