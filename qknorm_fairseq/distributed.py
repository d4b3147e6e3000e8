"""Data-parallel training: one process of it, as torchrun starts it on each GPU or CPU core.

    torchrun --nproc-per-node 2 -m qknorm_fairseq.distributed DATA --user-dir qknorm_fairseq ...
    torchrun --nproc-per-node 2 -m qknorm_fairseq.distributed --config-dir configs --config-name X

The first form takes what fairseq-train takes, the second what fairseq-hydra-train takes. fairseq
itself understands torchrun's environment on GPUs only; here it is told what that says, on CPUs too:
gloo without GPUs, NCCL with them. An update sees one batch of each process, so W processes do what
one does with `--update-freq W`, but for dropout (fairseq gives all the same seed, so that each
draws the masks of its batch from the start of one row of numbers; one process draws on).
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

from qknorm_fairseq.errors import QKNormError
from qknorm_fairseq.training import end_with_parent

USAGE = (
    "this is one process of several: start it with torchrun --nproc-per-node 2 -m "
    "qknorm_fairseq.distributed, and then what fairseq-train or fairseq-hydra-train is told"
)
# By default process 0 reads a checkpoint and sends it to the others, as an object that torch (2.6
# and later) refuses to load.
RESUME = {"checkpoint.load_checkpoint_on_all_dp_ranks": True}
HYDRA = ("--config-dir", "--config-name", "--config-path", "-cd", "-cn", "-cp")


def main() -> None:
    """Train. Of the processes that fail, the first says why, in one line; then torchrun ends all.

    With QKNORM_DEBUG set there are tracebacks.
    """
    if "RANK" not in os.environ:
        print(f"qknorm: {USAGE}", file=sys.stderr)
        sys.exit(2)
    end_with_parent()  # what torchrun starts would go on if torchrun were killed
    try:
        train(sys.argv[1:])
    except Exception as error:
        if os.environ.get("QKNORM_DEBUG"):
            raise
        if first_to_fail():
            reason = " ".join(str(error).split()) or type(error).__name__
            print(f"qknorm: process {os.environ['RANK']}: {reason}", file=sys.stderr)
        sys.exit(1)


def train(arguments: list[str]) -> None:
    """Call fairseq-train or fairseq-hydra-train as one of the processes.

    Raises:
        QKNormError: this machine has fewer GPUs than processes.
    """
    if {"--cpu", "common.cpu=true"} & set(arguments):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    # What you say yourself comes later, and wins.
    settings: dict[str, object] = {
        "distributed_training.distributed_world_size": os.environ["WORLD_SIZE"],
        "distributed_training.distributed_rank": os.environ["RANK"],
        "distributed_training.distributed_init_method": "env://",  # torchrun's address and port
        "distributed_training.distributed_no_spawn": True,
        "distributed_training.distributed_backend": "gloo",
        "distributed_training.ddp_backend": "legacy_ddp",  # fairseq's default is for GPUs only
        **RESUME,
    }
    if torch.cuda.is_available():
        local, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= there:
            raise QKNormError(f"this machine has {there} GPUs: at most --nproc-per-node {there}")
        settings["distributed_training.distributed_backend"] = "nccl"
        settings["distributed_training.device_id"] = local
    if {argument.partition("=")[0] for argument in arguments} & set(HYDRA):
        from fairseq_cli.hydra_train import cli_main

        os.environ["HYDRA_FULL_ERROR"] = "1"  # an error comes to us
        ours = [f"{name}={value}" for name, value in settings.items()]
        # Hydra takes one unbroken row of overrides.
        overrides = (n for n, part in enumerate(arguments) if "=" in part and part[0] != "-")
        place = next(overrides, len(arguments))
    else:
        from fairseq_cli.train import cli_main

        ours = [
            f"--{name.rpartition('.')[2].replace('_', '-')}"
            + ("" if value is True else f"={value}")
            for name, value in settings.items()
        ]
        place = 0
    sys.argv[1:] = [*arguments[:place], *ours, *arguments[place:]]
    cli_main()
    torch.distributed.destroy_process_group()


def first_to_fail() -> bool:
    """Where one process fails, the others do so for want of it: is it this one?

    They are counted where torchrun lets its processes meet.
    """
    from torch._C._distributed_c10d import TCPStore

    try:
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            timeout=timedelta(seconds=5),
            wait_for_workers=False,
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return bool(store.add(f"qknorm/failed/{attempt}", 1) == 1)
    except RuntimeError:  # it is gone
        return True


if __name__ == "__main__":
    main()
