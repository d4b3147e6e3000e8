"""Runs as jobs: processes of this machine for real, and a SLURM that the tests bring along.

tests/slurm.py takes the sbatch scripts that submitit writes and runs them; a cluster's own
SLURM is not here to be tried.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm
from conftest import PROJECT, Run, clean_environment
from faults import Fault
from test_configs import PAPER, TINY_SWEEP
from test_experiment import command, score
from test_iwslt15 import published
from test_iwslt15 import registry as iwslt15_registry
from test_reproduction import MODELS, SMALL, reproduce, written

from qknorm_fairseq import runs
from qknorm_fairseq.reproduction import plan_shared

pytest.importorskip("submitit")  # not for the Python of the official fairseq

SLURM = ("hydra/launcher=submitit_slurm", "model=transformer_qknorm_tiny")
FOLDER = Path("runs/demo/xx-yy/transformer_qknorm_tiny")


def steps(stderr: str) -> list[str]:
    return [line.partition("] ")[2] for line in stderr.splitlines() if line[:1] == "["]


def test_jobs_of_this_machine_one_of_which_fails_at_first(
    run: Run, tmp_path: Path, fault: Fault
) -> None:
    """From published files; the other jobs end, and later that one alone is run again."""
    local = tmp_path / "published"
    local.mkdir()
    for name, content in published().items():
        (local / name).write_bytes(content)
    arguments = (
        *("--tiny", "--cpu", "--corpus", "iwslt15", "--from", local),
        *("--registry", iwslt15_registry(tmp_path), "--launcher", "submitit_local"),
        *("en-vi", *SMALL, "hydra.launcher.cpus_per_task=1"),
    )
    whole, broken = (tmp_path / "runs/iwslt15/en-vi" / model / "seed1" for model in MODELS)
    broken.mkdir(parents=True)
    (broken / "checkpoint_last.pt").write_bytes(b"no checkpoint")

    done = reproduce(run, tmp_path, *arguments)
    assert done.returncode == 1
    said = steps(done.stderr)
    jobs = [line.partition(": job ")[0] for line in said if ": job " in line]
    assert jobs == [f"en-vi {model} seed 1" for model in MODELS]
    (failure,) = (line for line in said if "checkpoint" in line)
    assert failure.startswith(f"en-vi {MODELS[1]} seed 1: ")
    assert done.stderr.endswith("1 of 2 runs failed; the same command retries them\n")
    listed = done.stderr.splitlines()
    log = tmp_path / listed[listed.index("Logs of the jobs that failed:") + 1].split(": ")[1]
    assert "Starting with JobEnvironment" in log.with_suffix(".out").read_text()
    assert [line.split()[0] for line in done.stdout.splitlines() if " transformer_" in line] == [
        MODELS[0]
    ]
    fault("cluster", "a damaged checkpoint in one of two jobs", failure)

    (broken / "checkpoint_last.pt").unlink()
    before = written(whole)
    again = reproduce(run, tmp_path, *arguments)
    assert again.returncode == 0, again.stderr
    jobs = [line.partition(": job ")[0] for line in steps(again.stderr) if ": job " in line]
    assert jobs == [f"en-vi {MODELS[1]} seed 1"]
    assert written(whole) == before
    assert score(broken)["updates"] == 6
    known = json.loads((broken / "environment.json").read_text())["command"]
    assert "launcher" not in known


def test_fairseq_sweeps_through_the_launcher(prepared: Path, run: Run, tmp_path: Path) -> None:
    """The README's command, by fairseq's own program and Hydra's own launcher."""
    done = run(
        "fairseq-hydra-train",
        *("-m", "--config-dir", PROJECT / "configs", "--config-name", "gl_en"),
        *("hydra/launcher=submitit_local", "ablation=none,fixed_g", *TINY_SWEEP),
        *(f"task.data={prepared}", f"common.user_dir={PROJECT / 'qknorm_fairseq'}"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for name in ("transformer_qknorm", "transformer_qknorm+fixed_g"):
        assert (tmp_path / "runs/ted/xx-yy" / name / "seed1/checkpoint_last.pt").is_file()
    assert len(list((tmp_path / "runs/jobs").glob("*/*_result.pkl"))) == 2


class Cluster:
    """A SLURM of this test's own, and the command that is called on its login node."""

    def __init__(self, data: Path, folder: Path) -> None:
        self.data, self.cwd, self.home = data, folder, folder / "slurm"
        self.environment = clean_environment() | slurm.install(self.home)

    def start(self, *settings: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *command(self.data, *SLURM, *settings)],
            cwd=self.cwd,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def scripts(self) -> list[str]:
        return [file.read_text() for file in sorted((self.home / "scripts").iterdir())]

    def signal(self, job: str, number: signal.Signals) -> None:
        """To every process of a job, as SLURM does."""
        file = self.home / "queue" / job
        if (self.home / "hold").exists():  # it has no processes yet
            file.unlink()
            return
        leader = int(file.read_text())
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                pid = int(stat.parent.name)
                session = int(stat.read_text().rpartition(")")[2].split()[3])
                of_slurm = b"slurm.py" in (stat.parent / "cmdline").read_bytes()
                # The batch script itself is only told when it is to die.
                told = pid != leader or number == signal.SIGKILL
                if session == leader and told and not of_slurm:
                    os.kill(pid, number)

    def clear(self) -> None:
        for job in (self.home / "queue").iterdir():
            self.signal(job.name, signal.SIGKILL)


@pytest.fixture
def cluster(prepared: Path, tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(prepared, tmp_path)
    yield made
    made.clear()


def wait_for(file: Path, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not file.exists():
        assert time.monotonic() < deadline, f"no {file}"
        time.sleep(0.05)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def heard(process: subprocess.Popen[str], words: str) -> str:
    """What the command says, up to the line with these words."""
    assert process.stderr is not None
    said = ""
    while words not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    return said


def interrupted(process: subprocess.Popen[str]) -> str:
    """What the command says to Ctrl-C while it waits for its jobs."""
    said = heard(process, "] jobs: ")
    process.send_signal(signal.SIGINT)
    code, _, rest = ended(process)
    assert code == 130, said + rest
    return said + rest


def test_a_cluster_s_jobs_go_on_without_the_command(cluster: Cluster, fault: Fault) -> None:
    """Ctrl-C while it waits; the same command then waits for the same jobs."""
    settings = ("common.seed=1,2", "optimization.max_update=3", "hydra.launcher.partition=gpu")
    (cluster.home / "hold").touch()
    said = interrupted(cluster.start(*settings))
    assert "the jobs go on without this command" in said
    assert "scancel 100)" in said
    fault("cluster", "Ctrl-C while jobs are in SLURM's queue", steps(said)[-1])

    second = cluster.start(*settings)
    said = heard(second, "] jobs: ")
    (cluster.home / "hold").unlink()
    code, out, rest = ended(second)
    assert code == 0, said + rest
    for seed in (1, 2):
        title = f"xx-yy transformer_qknorm_tiny seed {seed}"
        assert f"{title}: job 100_{seed - 1} of an earlier call" in said
        assert score(cluster.cwd / FOLDER / f"seed{seed}")["updates"] == 3
    assert "xx-yy, 30 test sentences" in out
    (script,) = cluster.scripts()
    for option in ("partition=gpu", "time=720", "mem=16GB", "cpus-per-task=4", "array=0-1%2"):
        assert f"#SBATCH --{option}\n" in script
    assert "#SBATCH --requeue\n" in script
    assert "gpus" not in script  # the demo is for a CPU


def test_killed_while_sbatch_answers(cluster: Cluster, fault: Fault) -> None:
    """Nobody heard the jobs' number: the same command knows them by their name, and waits."""
    settings = ("common.seed=1,2", "optimization.max_update=3")
    for file in ("hold", "kill"):
        (cluster.home / file).touch()
    code, _, said = ended(cluster.start(*settings))
    assert code == -signal.SIGKILL, said
    assert len(list((cluster.home / "queue").iterdir())) == 2

    said = interrupted(cluster.start(*settings))
    titles = [line for line in steps(said) if "of an earlier call" in line]
    for seed, title in zip((1, 2), titles, strict=True):
        assert title.startswith(f"xx-yy transformer_qknorm_tiny seed {seed}: job 100_{seed - 1} of")
    assert len(cluster.scripts()) == 1  # nothing was submitted twice
    fault("cluster", "killed while sbatch answers, and called again", titles[0])


def test_a_job_that_slurm_ends(cluster: Cluster, fault: Fault) -> None:
    """Preempted: into the queue again, and on from the checkpoint. Killed: told, and run again."""
    settings = ("++dataset.num_workers=0", "optimization.max_update=50")
    folder = cluster.cwd / FOLDER / "seed1"
    first = cluster.start(*settings)
    wait_for(folder / "checkpoint_last.pt")
    cluster.signal("100", signal.SIGUSR2)
    wait_for(cluster.home / "requeued/100.done")
    log = cluster.cwd / "runs/jobs/100/100_0_log.err"
    deadline = time.monotonic() + 240
    while "going on from update" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    cluster.signal("100", signal.SIGKILL)
    code, _, said = ended(first)
    assert code == 1
    failure = "the job ended without a result, state OUT_OF_MEMORY (job 100)"
    assert f"xx-yy transformer_qknorm_tiny seed 1: {failure}" in said
    assert "seed 1: runs/jobs/100/100_0_log.err" in said
    fault("cluster", "a job killed by SLURM", failure)

    code, _, said = ended(cluster.start(*settings))
    assert code == 0, said
    assert "seed 1: job 101, see" in said
    assert score(folder)["updates"] == 50


@pytest.mark.parametrize("gpus", [1, 4])
def test_a_job_asks_for_the_gpus_that_its_run_trains_on(
    gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the script that submitit would hand to sbatch."""
    from qknorm_fairseq.jobs import Slurm

    for name, value in slurm.install(tmp_path).items():
        monkeypatch.setenv(name, value)
    planned = plan_shared("gl-en", ["hydra/launcher=submitit_slurm"], gpus)
    script = Slurm(planned).executor._executor._make_submission_file_text("true", "1")
    assert f"#SBATCH --gpus-per-node={gpus}\n" in script
    assert "#SBATCH --signal=USR2@120\n" in script


def test_the_reckoned_hours_of_the_readme() -> None:
    """From the configurations: 6 FLOP for each parameter and token, and validation."""
    readme = (PROJECT / "README.md").read_text(encoding="utf-8")
    totals = {5: 0.0, 15: 0.0}
    for pair, (_, layers, *_, epochs, _, (_, dev, _)) in PAPER.items():
        (planned,) = runs.plan(PROJECT / "configs", pair.replace("-", "_"), [])
        config = planned.config
        d, ffn, vocabulary = (
            config.model.encoder_embed_dim,
            config.model.encoder_ffn_embed_dim,
            8000,
        )
        attention, feed_forward, norm = 4 * (d * d + d), 2 * d * ffn + d + ffn, 2 * d
        parameters = layers * (3 * attention + 2 * feed_forward + 5 * norm) + vocabulary * d
        updates = config.task.epoch_batches * config.optimization.max_epoch
        flop = 6 * parameters * config.dataset.max_tokens * updates
        validation = epochs * dev / 200 / 3600
        hours = {speed: flop / (speed * 1e12) / 3600 + validation for speed in totals}
        row = (
            f"| {pair} | {parameters / 1e6:.1f} M | {updates:,} | {flop / 1e15:.0f} "
            f"| {validation:.1f} | {hours[5]:.1f} | {hours[15]:.1f} |"
        )
        assert row in readme
        for speed in totals:  # two models; on gl-en fairseq's own too
            totals[speed] += hours[speed] * 3 * (3 if pair == "gl-en" else 2)
    assert f"would be {totals[5]:.0f} or {totals[15]:.0f} GPU hours" in readme


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--launcher", "submitit_slurm"), "no SLURM on this machine (sbatch is not found)"),
        (("--cpu", "--launcher", "submitit_moon"), "Could not find 'hydra/launcher/submitit_moon'"),
        (
            ("--launcher", "submitit_slurm", "hydra.launcher.partitio=gpu"),
            "Could not override 'hydra.launcher.partitio'",
        ),
    ],
)
def test_a_launcher_that_can_t_be_is_told_before_anything_is_done(
    arguments: tuple[str, ...], message: str, run: Run, tmp_path: Path, fault: Fault
) -> None:
    done = reproduce(run, tmp_path, "gl-en", *arguments, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
    fault("cluster", " ".join(arguments), done.stderr)


def test_without_the_package_the_launcher_says_what_to_install(
    run: Run, tmp_path: Path, fault: Fault
) -> None:
    """With imports that don't find it: as where it isn't installed."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "class Without(PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('submitit', 'hydra_plugins'):\n"
        "            return None\n"
        "        return PathFinder.find_spec(name, path, target)\n"
        "sys.meta_path[:] = [Without if f is PathFinder else f for f in sys.meta_path]\n"
    )
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    arguments = ("gl-en", "--cpu", "--tiny", "--launcher", "submitit_local")
    done = reproduce(run, tmp_path, *arguments, env={"PYTHONPATH": path})
    assert done.returncode == 1
    assert "pip install 'qknorm-fairseq[cluster]'" in done.stderr.splitlines()[-1]
    fault("cluster", "--launcher without the package for it", done.stderr)
