"""The schedule "warm up, stay flat, decay on dev BLEU, stop", driven by hand-made BLEU values.

`drive` calls a schedule as fairseq's trainer does: `step_update(n)` after update n, which sets the
rate of update n + 1, and `step(epoch, bleu)` after each epoch. The expected rates are written out.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny
import torch
from conftest import Run
from fairseq.optim.adam import FairseqAdam, FairseqAdamConfig
from fairseq.optim.lr_scheduler import build_lr_scheduler
from omegaconf import OmegaConf

import qknorm_fairseq
from qknorm_fairseq.lr_schedule import DecayOnBleu

PEAK = 4.941058844013093e-4  # (512 * 8000)^-0.5


class Made(NamedTuple):
    scheduler: DecayOnBleu
    optimizer: Any


def make(lr: float | list[float] = PEAK, **settings: float | str) -> Made:
    """The schedule as fairseq builds it from its configuration, with one parameter."""
    given = {"stop_min_lr": 0.0, "best_checkpoint_metric": "bleu", **settings}
    rates = lr if isinstance(lr, list) else [lr]
    cfg = OmegaConf.create({"_name": "decay_on_bleu", "lr": rates, **given})
    adam = OmegaConf.structured(FairseqAdamConfig(lr=rates, tpu=False, use_old_adam=True))
    optimizer = FairseqAdam(adam, [torch.nn.Parameter(torch.zeros(1))])
    scheduler = build_lr_scheduler(cfg, optimizer)
    assert isinstance(scheduler, DecayOnBleu)
    return Made(scheduler, optimizer)


def rate(made: Made) -> float:
    """What the optimizer will really use for its next update."""
    (group,) = made.optimizer.optimizer.param_groups
    return float(group["lr"])


def drive(
    made: Made, bleus: Sequence[float], epoch_updates: int, first_epoch: int = 1
) -> list[float]:
    """Train through one epoch for each BLEU value; the rate after each."""
    rates = []
    for epoch, bleu in enumerate(bleus, start=first_epoch):
        for update in range((epoch - 1) * epoch_updates + 1, epoch * epoch_updates + 1):
            made.scheduler.step_update(update)
        made.scheduler.step(epoch, bleu)
        rates.append(rate(made))
    return rates


# ---------------------------------------------------------------------------------------------
# Warm-up
# ---------------------------------------------------------------------------------------------


def test_peak_is_the_papers_for_512_dimensions_and_8000_updates() -> None:
    """scale * d^-0.5 * step * warmup^-1.5 with scale 1, at step = warmup = 8000."""
    assert pytest.approx(512**-0.5 * 8000 * 8000**-1.5, rel=1e-12) == PEAK
    assert round(PEAK, 6) == 4.94e-4


def test_rate_of_each_update_of_the_warm_up() -> None:
    """Update 1 has an 8000th of the peak, update 4000 half of it, update 8000 and later all."""
    made = make()
    used = {}
    for update in range(1, 12_001):
        used[update] = rate(made)
        made.scheduler.step_update(update)
    assert used[1] == pytest.approx(6.176323555e-8, rel=1e-9)
    assert used[2] == pytest.approx(1.235264711e-7, rel=1e-9)
    assert used[4000] == pytest.approx(2.470529422e-4, rel=1e-9)
    assert used[7999] == pytest.approx(4.940441211658e-4, rel=1e-9)
    formula = {update: 512**-0.5 * update * 8000**-1.5 for update in range(1, 8001)}
    assert all(abs(used[update] / formula[update] - 1) < 1e-9 for update in formula)
    assert {used[update] for update in range(8000, 12_001)} == {PEAK}


def test_without_warm_up_the_first_update_has_the_given_rate() -> None:
    made = make(3e-4, warmup_updates=0)
    for update in range(1, 50):
        assert rate(made) == 3e-4
        made.scheduler.step_update(update)


# ---------------------------------------------------------------------------------------------
# Decay and stop
# ---------------------------------------------------------------------------------------------

# 1,500 updates an epoch, warm-up over 8,000: epoch 6 is the first that ends past it.
# (dev BLEU, rate after the epoch in parts of the peak, why)
SERIES = [
    (5.0, 1500 + 1, "warming up: the rate of update 1501"),
    (4.0, 3000 + 1, "..."),
    (3.0, 4500 + 1, "..."),
    (2.0, 6000 + 1, "below 5, 4, 3, but still warming up"),
    (1.0, 7500 + 1, "below 4, 3, 2, but still warming up"),
    (9.0, 1.0, "flat"),
    (8.0, 1.0, "above the lowest of 2, 1, 9"),
    (7.0, 1.0, "above the lowest of 1, 9, 8"),
    (6.9, 0.8, "below 9, 8, 7: the first decay"),
    (6.9, 0.8, "equal to the lowest of 8, 7, 6.9: not below"),
    (6.8, 0.64, "below 7, 6.9, 6.9"),
    (30.0, 0.64, "the best so far"),
    (20.0, 0.64, "worse than the one before, but above 6.9 and 6.8"),
    (10.0, 0.64, "above 6.8"),
    (9.99, 0.512, "below 30, 20, 10"),
    (9.98, 0.4096, "below 20, 10, 9.99"),
    (9.97, 0.32768, "below 10, 9.99, 9.98"),
]


def test_rates_of_a_series_of_bleu_values_worked_out_by_hand() -> None:
    rates = drive(make(PEAK, warmup_updates=8000), [bleu for bleu, _, _ in SERIES], 1500)
    for epoch, (given, (_, expected, why)) in enumerate(zip(rates, SERIES, strict=True), start=1):
        part = expected / 8000 if epoch <= 5 else expected
        assert given == pytest.approx(part * PEAK, rel=1e-9), f"epoch {epoch}: {why}"


def test_an_epoch_that_ends_with_the_last_update_of_the_warm_up_can_decay() -> None:
    """gl-en: 80 epochs of 100 updates are the warm-up of 8,000, as the official code has it."""
    rates = drive(make(1.0, warmup_updates=400), [4, 3, 2, 1], epoch_updates=100)
    assert rates == pytest.approx([101 / 400, 201 / 400, 301 / 400, 0.8])
    rates = drive(make(1.0, warmup_updates=401), [4, 3, 2, 1, 0], epoch_updates=100)
    assert rates == pytest.approx([101 / 401, 201 / 401, 301 / 401, 1.0, 0.8])


def test_no_decay_before_there_are_three_epochs_to_compare_with() -> None:
    made = make(3e-4, warmup_updates=0)
    rates = drive(made, [4, 3, 2, 1, 0, 0], epoch_updates=10)
    assert rates == pytest.approx([3e-4, 3e-4, 3e-4, 2.4e-4, 1.92e-4, 1.92e-4])


def test_the_decayed_rate_is_used_until_the_next_decay() -> None:
    made = make(3e-4, warmup_updates=0)
    drive(made, [4, 3, 2, 1], epoch_updates=10)
    for update in range(41, 60):
        made.scheduler.step_update(update)
        assert rate(made) == pytest.approx(2.4e-4)


def test_training_stops_under_the_least_rate() -> None:
    """3e-4 * 0.8^4 = 1.2288e-4 is not under 1.2e-4; the next one, 9.83e-5, is: the rate is 0.

    fairseq stops when the rate is at or under --stop-min-lr, which is 0.
    """
    made = make(3e-4, warmup_updates=0, least_lr=1.2e-4)
    rates = drive(made, [9, 8, 7, 6, 5, 4, 3], epoch_updates=10)
    assert rates == pytest.approx([3e-4, 3e-4, 3e-4, 2.4e-4, 1.92e-4, 1.536e-4, 1.2288e-4])
    assert drive(made, [2], epoch_updates=10, first_epoch=8) == [0.0]


def test_small_rates_of_the_warm_up_do_not_stop_the_training() -> None:
    made = make(PEAK, warmup_updates=8000, least_lr=5e-5)
    assert 0 < rate(made) < 5e-5
    assert all(given > 0 for given in drive(made, [1, 2, 3], epoch_updates=100))


def test_patience_and_factor_are_options() -> None:
    made = make(1.0, warmup_updates=0, bleu_patience=2, lr_decay=0.5)
    assert drive(made, [5, 4, 3, 3, 2], epoch_updates=1) == [1.0, 1.0, 0.5, 0.5, 0.25]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stop_min_lr": -1.0}, "--stop-min-lr 0"),  # fairseq's default
        ({"stop_min_lr": 1e-5}, "--stop-min-lr 0"),
        ({"best_checkpoint_metric": "loss"}, "--best-checkpoint-metric bleu"),
        ({"lr": [0.1, 0.2]}, "one --lr"),
    ],
)
def test_settings_that_would_break_the_rule_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**settings)


# ---------------------------------------------------------------------------------------------
# Resuming
# ---------------------------------------------------------------------------------------------


def saved(made: Made, updates: int) -> Made:
    """A new schedule from the state of another, in the order fairseq's trainer restores it."""
    file = io.BytesIO()
    torch.save(made.scheduler.state_dict(), file)
    file.seek(0)
    cfg = made.scheduler.cfg
    new = make(cfg.lr[0], warmup_updates=cfg.warmup_updates, least_lr=cfg.least_lr)
    new.scheduler.load_state_dict(torch.load(file, weights_only=True))
    new.scheduler.step_update(updates)
    return new


@pytest.mark.parametrize("cut", range(1, len(SERIES)))
def test_resumed_after_any_epoch_the_rates_are_the_same(cut: int) -> None:
    """fairseq saves an epoch's checkpoint before it tells the schedule the epoch's BLEU.

    On resuming, the plugin tells it then; fairseq calls `step` with the epoch to come and without
    a BLEU, before and after.
    """
    bleus = [bleu for bleu, _, _ in SERIES]
    expected = drive(make(PEAK, warmup_updates=80), bleus, 15)

    made = make(PEAK, warmup_updates=80)
    drive(made, bleus[: cut - 1], 15)
    made.scheduler.step_update(cut * 15)
    resumed = saved(made, updates=cut * 15)
    resumed.scheduler.step(cut + 1)
    resumed.scheduler.step(cut, bleus[cut - 1])
    resumed.scheduler.step(cut + 1)
    assert rate(resumed) == pytest.approx(expected[cut - 1], rel=1e-12)
    rest = drive(resumed, bleus[cut:], 15, first_epoch=cut + 1)
    assert rest == pytest.approx(expected[cut:], rel=1e-12)
    assert resumed.scheduler.history == bleus


def test_what_has_stopped_stays_stopped_when_resumed() -> None:
    """The BLEU that ended the training is told again when it is resumed."""
    made = make(1e-3, warmup_updates=0, least_lr=9e-4)
    drive(made, [4, 3, 2], 10)
    resumed = saved(made, updates=40)
    assert rate(resumed) == 1e-3
    resumed.scheduler.step(4, 1.0)
    resumed.scheduler.step(5)
    assert rate(resumed) == 0.0


# ---------------------------------------------------------------------------------------------
# By fairseq-train
# ---------------------------------------------------------------------------------------------

FLAT, WARMUP, LEAST, EPOCHS = 0.005, 6, 0.003, 12


def train(run: Run, data: Path, save_dir: Path, *arguments: object) -> str:
    """fairseq-train of a very small model, with decays after each epoch worse than the last."""
    sizes = [
        *("--encoder-layers", 1, "--decoder-layers", 1),
        *("--encoder-embed-dim", 16, "--decoder-embed-dim", 16),
        *("--encoder-ffn-embed-dim", 32, "--decoder-ffn-embed-dim", 32),
        *("--encoder-attention-heads", 2, "--decoder-attention-heads", 2),
    ]
    done = run(
        "fairseq-train",
        data,
        *("--user-dir", tiny.USER_DIR, "--task", "translation_qknorm"),
        *("--arch", "transformer_qknorm_tiny", "--qknorm-length", 12, *sizes),
        *("--dropout", 0.1, "--word-dropout", 0.02),
        *("--criterion", "label_smoothed_cross_entropy_allowed", "--label-smoothing", 0.1),
        *("--eval-bleu", "--eval-bleu-args", '{"beam": 2}', "--eval-tokenized-bleu"),
        *("--best-checkpoint-metric", "bleu", "--maximize-best-checkpoint-metric"),
        *("--optimizer", "adam", "--lr", FLAT, "--lr-scheduler", "decay_on_bleu"),
        *("--warmup-updates", WARMUP, "--bleu-patience", 1, "--least-lr", LEAST),
        *("--stop-min-lr", 0, "--max-tokens", 300, "--cpu", "--seed", 1),
        *("--save-dir", save_dir, "--no-epoch-checkpoints", "--log-format", "json"),
        *arguments,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def logged(output: str, key: str) -> list[float]:
    """A value of each epoch, from the JSON that fairseq logs."""
    records = [json.loads(match) for match in re.findall(r'\| (\{"epoch".*\})', output)]
    return [float(record[key]) for record in records if key in record]


def schedule_state(save_dir: Path) -> dict[str, Any]:
    qknorm_fairseq.register()  # lets torch's safe loader read fairseq's checkpoints
    checkpoint = torch.load(save_dir / "checkpoint_last.pt", weights_only=True)
    state: dict[str, Any] = checkpoint["optimizer_history"][-1]["lr_scheduler_state"]
    return state


def test_fairseq_train_decays_stops_and_resumes(run: Run, tmp_path: Path) -> None:
    """Once through, and once stopped after an epoch that makes the rate decay, then resumed."""
    data = tiny.write_data(tmp_path / "data", tiny.larger_text(train=150, valid=12))
    output = train(run, data, tmp_path / "through", "--max-epoch", EPOCHS)
    bleus, rates = logged(output, "valid_bleu"), logged(output, "train_lr")
    updates = [int(n) for n in logged(output, "train_num_updates")]

    # The rate that an epoch ends with is decayed by the epochs before it.
    flat = FLAT
    decayed = []
    for epoch in range(1, len(bleus) + 1):
        warm = min((updates[epoch - 1] + 1) / WARMUP, 1)
        assert rates[epoch - 1] == pytest.approx(flat * warm, rel=1e-4), f"epoch {epoch}"
        if epoch > 1 and updates[epoch - 1] >= WARMUP and bleus[epoch - 1] < bleus[epoch - 2]:
            flat *= 0.8
            decayed.append(epoch)
    assert len(decayed) >= 2, f"no test of the decay with {bleus}"
    stopped = "stopping training because current learning rate (0.0)" in output
    assert stopped == (len(bleus) < EPOCHS) == (flat < LEAST)

    # Stopped right after a decay: the checkpoint was written before fairseq told the schedule.
    cut = decayed[0]
    train(run, data, tmp_path / "resumed", "--max-epoch", cut)
    assert schedule_state(tmp_path / "resumed")["history"] == bleus[: cut - 1]
    rest = train(run, data, tmp_path / "resumed", "--max-epoch", EPOCHS)
    assert "Loaded checkpoint" in rest
    assert logged(rest, "train_lr") == rates[cut:]
    assert logged(rest, "valid_bleu") == bleus[cut:]
    state = schedule_state(tmp_path / "resumed")
    assert state == schedule_state(tmp_path / "through")
    assert state["history"] == bleus[:-1]  # the last one is told when it is resumed

    # The best checkpoint is the one of the best BLEU, over both parts.
    best = torch.load(tmp_path / "resumed" / "checkpoint_best.pt", weights_only=True)
    assert best["extra_state"]["val_loss"] == max(bleus)
