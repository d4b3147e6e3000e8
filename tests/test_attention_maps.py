"""`qknorm attention` and the statistics of a run, against the definition and against the model."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from browser import DESKTOP, PHONE, browser_page
from conftest import Run
from fairseq import checkpoint_utils
from faults import Fault
from torch import Tensor

import qknorm_fairseq
from qknorm_fairseq.attention_maps import (
    MOST_SUBWORDS,
    AttentionMaps,
    attend,
    figure,
    write_page,
)
from qknorm_fairseq.attention_statistics import of_run, statistics
from qknorm_fairseq.attention_weights import AttentionRecorder, attention_modules
from qknorm_fairseq.errors import QKNormError
from qknorm_fairseq.subwords import Subwords
from qknorm_fairseq.translator import Translator

SOURCE = "Kalo mitu neka."


@pytest.fixture(params=["checkpoint", "transformer_checkpoint"])
def trained(request: pytest.FixtureRequest) -> Path:
    """A checkpoint of a QKNorm Transformer, then one of fairseq's own."""
    path: Path = request.getfixturevalue(request.param)
    return path


def plain_model(checkpoint: Path, prepared: Path) -> tuple[Any, Any]:
    """The model and its task as fairseq loads them, not prepared for a search."""
    qknorm_fairseq.register()
    overrides = {"data": str(prepared)}
    models, _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(checkpoint)], arg_overrides=overrides
    )
    return models[0].eval(), task


def by_definition(module: Any, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(scale q k^T + mask) of each head, H x T x S, from T x 1 x D and S x 1 x D."""
    maps = []
    for head in range(module.num_heads):
        part = slice(head * module.head_dim, (head + 1) * module.head_dim)
        q, k = module.q_proj(query)[:, 0, part], module.k_proj(key)[:, 0, part]
        if getattr(module, "g", None) is not None:
            q, k = q / q.norm(dim=1, keepdim=True), k / k.norm(dim=1, keepdim=True)
            logits = module.g * q @ k.T
        else:
            logits = q @ k.T / math.sqrt(module.head_dim)
        maps.append(torch.softmax(logits if mask is None else logits + mask, dim=1))
    return torch.stack(maps)


def expected(model: Any, source: list[int], target: list[int]) -> dict[str, Tensor]:
    """The weights of each module for one pair, from what its layers were given."""
    given: dict[str, dict[str, Any]] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda _module, _args, inputs, name=name: given.update({name: inputs}),
            with_kwargs=True,
        )
        for name, module in attention_modules(model).items()
    ]
    with torch.no_grad():
        rows = torch.tensor([source]), torch.tensor([len(source)])
        model(*rows, torch.tensor([[target[-1], *target[:-1]]]))
        for hook in hooks:
            hook.remove()
        return {
            name: by_definition(
                module, given[name]["query"], given[name]["key"], given[name].get("attn_mask")
            )
            for name, module in attention_modules(model).items()
        }


def indices(task: Any, prepared: Path, text: str, target: bool = False) -> list[int]:
    dictionary = task.target_dictionary if target else task.source_dictionary
    pieces = Subwords(prepared / "sentencepiece.model").encode([text])[0]
    return [*map(dictionary.index, pieces), dictionary.eos()]


def test_the_maps_are_the_models_attention_number_by_number(
    trained: Path, prepared: Path, run: Run
) -> None:
    target = run("qknorm", "translate", "-c", trained, "--data", prepared, "--cpu", input=SOURCE)
    model, task = plain_model(trained, prepared)
    source_row = indices(task, prepared, SOURCE)
    target_row = indices(task, prepared, target.stdout.strip(), target=True)
    wanted = expected(model, source_row, target_row)
    maps = attend(Translator(trained, data=prepared, cpu=True), SOURCE)
    assert list(maps.source) == [task.source_dictionary[index] for index in source_row]
    assert list(maps.target) == [task.target_dictionary[index] for index in target_row]
    assert maps.labels("cross") == (maps.target, maps.source)
    assert maps.labels("decoder") == (maps.target, ("</s>", *maps.target[:-1]))
    names = {"encoder": "encoder_1_self", "decoder": "decoder_1_self", "cross": "decoder_1_cross"}
    for kind, name in names.items():
        (layer,) = maps.weights[kind]
        np.testing.assert_allclose(layer, wanted[name].numpy(), atol=1e-5)
        queries, keys = maps.labels(kind)
        assert layer.shape == (2, len(queries), len(keys))
    # The model's own word for it, averaged over the heads.
    rows = torch.tensor([source_row]), torch.tensor([len(source_row)])
    with torch.no_grad():
        _, extra = model(*rows, torch.tensor([[target_row[-1], *target_row[:-1]]]))
    own = extra["attn"][0][0].numpy()
    np.testing.assert_allclose(maps.weights["cross"][0].mean(axis=0), own, atol=1e-5)


def test_every_layer_in_a_deeper_model(tmp_path: Path) -> None:
    built = tiny.build(tiny.write_data(tmp_path / "data"))
    tiny.randomize(built.model)
    built.model.eval()
    sample = tiny.batch(built.task, numbers=[0])
    source = sample["net_input"]["src_tokens"][0].tolist()
    with torch.no_grad(), AttentionRecorder(built.model) as recorder:
        built.model(**sample["net_input"])
    wanted = expected(built.model, source, sample["target"][0].tolist())
    assert (
        set(recorder.weights)
        == set(wanted)
        == {
            *("encoder_1_self", "encoder_2_self", "decoder_1_self", "decoder_2_self"),
            *("decoder_1_cross", "decoder_2_cross"),
        }
    )
    for name, weights in recorder.weights.items():
        torch.testing.assert_close(weights[:, 0], wanted[name], atol=1e-5, rtol=0)


def test_recording_changes_nothing(trained: Path, prepared: Path) -> None:
    model, task = plain_model(trained, prepared)
    row = torch.tensor([indices(task, prepared, SOURCE)])
    call = (row, torch.tensor([row.shape[1]]), row)
    with torch.no_grad():
        before, extra_before = model(*call)
        with AttentionRecorder(model):
            during, extra_during = model(*call)
        after, _ = model(*call)
    torch.testing.assert_close(during, before, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(extra_during["attn"], extra_before["attn"], atol=1e-5, rtol=1e-5)
    assert torch.equal(after, before)
    for module in attention_modules(model).values():
        assert "forward" not in vars(module)
        assert not module.skip_embed_dim_check


def test_at_the_command_line(checkpoint: Path, prepared: Path, run: Run, tmp_path: Path) -> None:
    out = tmp_path / "maps"
    options = ("-c", checkpoint, "--data", prepared, "--cpu", "--source", SOURCE)
    done = run("qknorm", "attention", *options, "--target", "Shasha.", "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    names = {"attention.html", "cross_layer1.png", "cross_layer1.svg"}
    assert {file.name for file in out.iterdir()} == names
    told = json.loads(done.stdout)
    maps = attend(Translator(checkpoint, data=prepared, cpu=True), SOURCE, "Shasha.")
    assert told["source"] == list(maps.source)
    assert [(each["kind"], each["layer"], each["head"]) for each in told["maps"]] == [
        ("cross", 1, 1),
        ("cross", 1, 2),
    ]
    for each, weights in zip(told["maps"], maps.weights["cross"][0], strict=True):
        assert (each["queries"], each["keys"]) == (list(maps.target), list(maps.source))
        np.testing.assert_allclose(each["weights"], weights, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("--source", SOURCE, "--layer", 2), 2, "layers 1 to 1"),
        (("--source", SOURCE, "--head", 3), 2, "heads 1 to 2"),
        (("--source", SOURCE, "--kind", "self"), 2, "encoder, decoder and cross"),
        (("--source", " "), 2, "empty"),
        (("--source", SOURCE, "--target", ""), 1, "the target is empty"),
        (("--source", "kalo " * 200), 1, f"room for {MOST_SUBWORDS}"),
        (("--source", b"\xff"), 1, "not valid UTF-8"),
    ],
)
def test_what_can_not_be_shown_is_said(
    arguments: tuple[Any, ...],
    status: int,
    said: str,
    checkpoint: Path,
    prepared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fault: Fault,
) -> None:
    from qknorm_fairseq import cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    line = ["attention", "-c", checkpoint, "--data", prepared, "--cpu", *arguments]
    words = [
        word.decode("utf-8", "surrogateescape") if isinstance(word, bytes) else str(word)
        for word in line
    ]
    monkeypatch.setattr("sys.argv", ["qknorm", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    errors = capsys.readouterr().err
    assert ended.value.code == status, errors
    assert said in errors
    assert not list(tmp_path.iterdir())
    fault("attention", " ".join(words[6:])[:40], errors)


# Statistics.


def loops(maps: dict[str, list[Tensor]]) -> dict[str, dict[str, float]]:
    """Entropy and saturation, a row at a time, from H x T x S maps without padding."""
    result = {}
    for name, pairs in maps.items():
        entropies, saturated = [], []
        for head in (head for pair in pairs for head in pair.tolist()):
            for place, row in enumerate(head):
                visible = row[: place + 1] if name.startswith("decoder_1_self") else row
                if len(visible) > 1:
                    entropy = -sum(w * math.log(w) for w in visible if w > 0)
                    entropies.append(entropy / math.log(len(visible)))
                    saturated.append(max(visible) > 0.99)
        result[name] = {
            "entropy": sum(entropies) / len(entropies),
            "saturated": sum(saturated) / len(saturated),
        }
    return result


def run_folder(checkpoint: Path, prepared: Path, folder: Path) -> Path:
    """A run's folder as training leaves it."""
    folder.mkdir()
    shutil.copy(checkpoint, folder / "checkpoint_best.pt")
    for name in ("dict.xx.txt", "dict.yy.txt", "sentencepiece.model", "qknorm.json"):
        shutil.copy(prepared / name, folder)
    (folder / "config.yaml").write_text(f"task:\n  data: {prepared}\n")
    return folder


def test_statistics_of_a_run_are_those_of_each_sentence_by_itself(
    trained: Path, prepared: Path, tmp_path: Path
) -> None:
    model, task = plain_model(trained, prepared)
    maps: dict[str, list[Tensor]] = {}
    texts = [(prepared / f"test.{side}").read_text("utf-8").splitlines() for side in ("xx", "yy")]
    for source, target in zip(*texts, strict=True):
        rows = indices(task, prepared, source), indices(task, prepared, target, target=True)
        for name, weights in expected(model, *rows).items():
            maps.setdefault(name, []).append(weights)
    found = of_run(run_folder(trained, prepared, tmp_path / "run"), cpu=True)
    wanted = loops(maps)
    assert list(found) == ["encoder_1_self", "decoder_1_self", "decoder_1_cross"]
    for name, values in wanted.items():
        assert found[name] == pytest.approx(values, abs=1e-5)
    assert all(0 < values["entropy"] < 1 for values in found.values())


def test_statistics_are_kept_for_as_long_as_what_they_are_of_is_the_same(
    checkpoint: Path, transformer_checkpoint: Path, prepared: Path, tmp_path: Path
) -> None:
    folder = run_folder(checkpoint, prepared, tmp_path / "run")
    first = of_run(folder, cpu=True)
    cache = folder / "attention.json"
    content = json.loads(cache.read_text())
    assert content["modules"] == first
    content["modules"]["encoder_1_self"]["entropy"] = 0.125
    cache.write_text(json.dumps(content))
    assert of_run(folder, cpu=True)["encoder_1_self"]["entropy"] == 0.125
    shutil.copy(transformer_checkpoint, folder / "checkpoint_best.pt")
    newer = of_run(folder, cpu=True)
    assert newer["encoder_1_self"]["entropy"] not in (0.125, first["encoder_1_self"]["entropy"])
    cache.write_text("{")
    assert of_run(folder, cpu=True) == newer
    data = tmp_path / "data"
    shutil.copytree(prepared, data)
    (folder / "config.yaml").write_text(f"task:\n  data: {data}\n")
    for side in ("xx", "yy"):
        file = data / f"test.{side}"
        lines = file.read_text("utf-8").splitlines(keepends=True)
        file.write_text("".join(lines[: len(lines) // 2]), "utf-8")
    shorter = of_run(folder, cpu=True)
    assert shorter != newer
    shutil.rmtree(data)  # the run was carried elsewhere
    assert of_run(folder, cpu=True) == shorter


def test_statistics_that_can_not_be_kept(checkpoint: Path, prepared: Path, tmp_path: Path) -> None:
    folder = run_folder(checkpoint, prepared, tmp_path / "run")
    (folder / "attention.json").mkdir()  # even root can't write a file there
    heard: list[OSError] = []
    found = of_run(folder, cpu=True, not_kept=heard.append)
    assert "encoder_1_self" in found
    assert [error.filename for error in heard] == [str(folder / "attention.json")]


@pytest.mark.parametrize(
    ("g", "entropy", "saturated"), [(0.0, 1.0, 0.0), (1e6, 0.0, 1.0)], ids=["uniform", "one-hot"]
)
def test_the_extremes(g: float, entropy: float, saturated: float, tmp_path: Path) -> None:
    """g = 0 gives every key alike, an enormous g everything to the nearest."""
    built = tiny.build(tiny.write_data(tmp_path / "data"))
    tiny.randomize(built.model)
    built.model.eval()
    for module in attention_modules(built.model).values():
        module.g.data.fill_(g)
    found = statistics(built.model, [tiny.batch(built.task)])
    assert len(found) == 6
    for name, values in found.items():
        assert values["entropy"] == pytest.approx(entropy, abs=0.01 if g else 1e-6), name
        assert values["saturated"] == pytest.approx(saturated, abs=0.01), name


@pytest.mark.parametrize("missing", ["checkpoint_best.pt", "config.yaml", "test set"])
def test_statistics_need_their_files(
    missing: str, checkpoint: Path, prepared: Path, tmp_path: Path
) -> None:
    folder = run_folder(checkpoint, prepared, tmp_path / "run")
    if missing == "test set":
        (folder / "config.yaml").write_text(f"task:\n  data: {tmp_path}\n")
        missing = "test.xx"
    else:
        (folder / missing).unlink()
    with pytest.raises(QKNormError, match=missing):
        of_run(folder, cpu=True)


# Pictures and the page.


def random_maps(source: list[str], target: list[str], layers: int, heads: int) -> AttentionMaps:
    numbers = np.random.default_rng(1)

    def some(queries: int, keys: int) -> list[np.ndarray]:
        raw = np.exp(2 * numbers.normal(size=(layers, heads, queries, keys)))
        return list((raw / raw.sum(-1, keepdims=True)).astype(np.float32))

    s, t = len(source), len(target)
    weights = {"encoder": some(s, s), "decoder": some(t, t), "cross": some(t, s)}
    return AttentionMaps(tuple(source), tuple(target), weights)


def test_a_picture_shows_the_weights_and_the_subwords() -> None:
    maps = random_maps(["▁a", "▁$b$", "</s>"], ["▁كتاب", "</s>"], layers=2, heads=3)
    picture = figure(maps, "cross", 2, [1, 3])
    shown = [axes for axes in picture.axes if axes.images]
    assert [axes.get_xlabel() for axes in shown] == ["head 1", "head 3"]
    for axes, head in zip(shown, (0, 2), strict=True):
        np.testing.assert_array_equal(axes.images[0].get_array(), maps.weights["cross"][1][head])
    assert [label.get_text() for label in shown[0].get_xticklabels()] == ["▁a", "▁$b$", "</s>"]
    assert [label.get_text() for label in shown[0].get_yticklabels()] == ["▁كتاب", "</s>"]


HOSTILE = ["</script><script>window.hacked=1</script>", "<img src=//x.test/ onerror=hacked=1>"]


def test_the_page_in_a_browser(tmp_path: Path) -> None:
    maps = random_maps([*HOSTILE, "▁الكتاب", "</s>"], ["▁ספר", "<!--", "</s>"], layers=2, heads=3)
    file = tmp_path / "attention.html"
    write_page(file, maps, "cross", 2, None, model=HOSTILE[0])
    cells = "[...document.querySelectorAll('td')]"
    colours = f"{cells}.map(td => getComputedStyle(td).backgroundColor)"
    shares = f"{cells}.map(td => Number(td.style.getPropertyValue('--share')))"
    cell = f"{cells}[6]"  # of 3 x 4: row 1, column 2
    value = "document.getElementById('value').textContent"

    def told(weight: float) -> str:
        return f"<!-- takes {weight:.3f} from ▁الكتاب"

    def press(fieldset: str, choice: object) -> str:
        return f"document.querySelector('#{fieldset} [data-value=\"{choice}\"]').click()"

    with browser_page() as page:
        for size, scheme in ((DESKTOP, "light"), (PHONE, "dark")):
            page.open(file, size, scheme)
            assert page.run(f"{cells}.length") == 3 * 4
            assert page.run("typeof window.hacked") == "undefined"
            assert page.run("document.images.length") == 0
            assert page.run("document.documentElement.scrollWidth") <= size[0]
            labels = page.run("[...document.querySelectorAll('th bdi')].map(l => l.textContent)")
            assert labels == [*maps.source, *maps.target]

            page.run(f"{cell}.scrollIntoView()")
            box = page.run(f"{cell}.getBoundingClientRect().toJSON()")
            page.move_to(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
            page.move_to(0, 0)
            second_layer, first_layer = maps.weights["cross"][1], maps.weights["cross"][0]
            assert page.run(value) == told(second_layer.mean(axis=0)[1, 2])
            before = page.run(colours)
            page.run(press("heads", 3))
            assert page.run(colours) != before
            assert page.run(value) == told(second_layer[2][1, 2])
            page.run(press("layers", 1))
            assert page.run(value) == told(first_layer[2][1, 2])
            page.run(press("kinds", "encoder"))
            assert page.run(f"{cells}.length") == 4 * 4
            weights = maps.weights["encoder"][0]
            wanted = (weights[2] / weights.max()).flatten()
            np.testing.assert_allclose(page.run(shares), wanted, atol=2e-4)
        assert page.complaints == []
        assert set(page.requests) == {file.as_uri()}
