"""What experts do: similarity, drift, usage by segment, the command, its page."""

import json

import numpy as np
import pytest
import torch

from wespeaker_qmargin.checkpoints import average_epochs
from wespeaker_qmargin.cli import main
from wespeaker_qmargin.config import load_config
from wespeaker_qmargin.evidence import experts_section
from wespeaker_qmargin.experts import SEGMENTS, Cka, analyse, segments
from wespeaker_qmargin.lists import read_utterances
from wespeaker_qmargin.train import train


def cka(x, y, pieces=3) -> float:
    found = Cka()
    for one, other in zip(x.chunk(pieces), y.chunk(pieces)):
        found.add(one, other)
    return found.value()


def test_similarity():
    """Against the kernel form: HSIC of centred Gram matrices."""
    torch.manual_seed(0)
    x, y = torch.randn(50, 4).double() + 3, torch.randn(50, 6).double() - 1
    centre = torch.eye(50).double() - 1 / 50
    k, other = (centre @ z @ z.T @ centre for z in (x, y))
    assert cka(x, y) == pytest.approx(((k * other).sum() / (k.norm() * other.norm())).item())
    turn, _ = torch.linalg.qr(torch.randn(4, 4).double())
    assert cka(x, 7 * x @ turn + 5) == pytest.approx(1)
    assert np.isnan(Cka().value())


def test_segments():
    rate, rng = 16000, np.random.default_rng(0)
    time = np.arange(rate // 2) / rate
    voiced = sum(np.sin(2 * np.pi * 120 * k * time) / k for k in (1, 2, 3)) / 3
    noise = 0.1 * rng.standard_normal(rate // 2)
    quiet = 1e-4 * rng.standard_normal(rate // 2)
    kinds = segments(np.concatenate([voiced, noise, quiet]).astype(np.float32), 75)
    for part, name in (
        (kinds[2:23], "voiced"),
        (kinds[27:48], "unvoiced"),
        (kinds[52:], "silence"),
    ):
        assert (part == SEGMENTS.index(name)).mean() > 0.9, name
    assert (segments(np.zeros(3200, dtype=np.float32), 9) == 0).all()


@pytest.fixture
def adapted(tiny_ssl, corpus, tmp_path):
    dense = train(load_config(tiny_ssl, ["--exp_dir", str(tmp_path / "dense")]))
    average_epochs(dense, 1)
    moe_yaml, tuned = tmp_path / "moe.yaml", tmp_path / "tuned"
    moe_yaml.write_text(
        "dataset_args: {wavlm_args: {moe: {experts: 2, top_k: 1}}}\nnum_epochs: 1\n"
    )
    words = ["--from", dense, "--data", corpus, "--exp_dir", tuned, "--config", moe_yaml]
    assert main(["finetune", *map(str, words), "--prototype_epochs", "0"]) == 0
    average_epochs(tuned, 1)
    return dense, tuned


def test_the_command_and_its_section(adapted, corpus, tmp_path, capsys):
    dense, tuned = adapted
    words = ["experts", "--exp_dir", tuned, "--from", dense, "--data", f"a={corpus}", f"b={corpus}"]
    assert main([*map(str, words), "--sample", "6", "--drop", "2", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "experts.json").read_text())
    assert report["data"]["a"] == report["data"]["b"], "the same speech"
    assert len(report["drift"]) == 2 and all(x > 0 for y in report["drift"].values() for x in y)
    similar = report["data"]["a"]["cka"]
    assert len(similar) == 3 and all(0 < x <= 1 + 1e-9 for x in similar)
    for values in report["data"]["a"]["experts"].values():
        assert sum(values["load"]) == pytest.approx(1) == sum(values["importance"])
        assert all(x is None or sum(x) == pytest.approx(1) for x in values["by_segment"].values())
        assert max(values["dropped"]) > 0
    section = experts_section(tmp_path)
    assert "| a | frontend.encoder" in section.text and b"<svg" in section.images["experts.svg"]


def test_an_encoder_that_was_not_changed(adapted, corpus, tmp_path):
    dense, _ = adapted
    report = analyse(dense, dense, {"x": read_utterances("kaldi", corpus)[:3]})
    assert list(report["drift"].values()) == [[0.0], [0.0]]
    assert report["data"]["x"]["experts"] == {}
    (tmp_path / "experts.json").write_text(json.dumps(report))
    assert "mixture" not in experts_section(tmp_path).text
    assert report["data"]["x"]["cka"] == pytest.approx([1, 1, 1])


def test_other_numbers_of_experts_before(adapted, corpus, tmp_path, caplog):
    dense, tuned = adapted
    heard = {"x": read_utterances("kaldi", corpus)[:2]}
    there, back = (analyse(a, b, heard)["drift"] for a, b in ((tuned, dense), (dense, tuned)))
    for name, moved in back.items():
        assert len(moved) == 2 and moved == pytest.approx(there[name], rel=0.1), "one to each"
    three = tmp_path / "three"
    words = [
        "--exp_dir",
        three,
        "--config",
        tmp_path / "moe.yaml",
        "--from",
        tuned,
        "--data",
        corpus,
    ]
    more = ["--dataset_args.wavlm_args.moe.experts", 3, "--merge_experts", "--prototype_epochs", 0]
    assert main(["finetune", *map(str, [*words, *more])]) == 0
    average_epochs(three, 1)
    words = ["--exp_dir", three, "--from", tuned, "--data", f"x={corpus}", "--out", tmp_path]
    assert main(["experts", *map(str, [*words, "--sample", 2])]) == 0, "and its figure"
    assert json.loads((tmp_path / "experts.json").read_text())["drift"] == {}
    assert "before and after are not the same ones" in caplog.text


def test_bad_input(adapted, corpus, tmp_path, capsys):
    dense, tuned = adapted
    for words, message in (
        (["--data", "x"], "expected NAME=FOLDER, found 'x'"),
        (["--data", f"x={corpus}", "--from", str(tmp_path / "none")], "no such config file"),
    ):
        common = ["--exp_dir", str(tuned), "--from", str(dense), "--out", str(tmp_path)]
        assert main(["experts", *common, *words]) == 1
        assert message in capsys.readouterr().err
    (tmp_path / "experts.json").write_text("{}")
    with pytest.raises(ValueError, match="not what experts writes"):
        experts_section(tmp_path)
