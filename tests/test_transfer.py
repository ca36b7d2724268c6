"""Foreign checkpoints: what is found, what fits, whose rows, class means; and what is refused."""

import pickle
import shutil

import pytest
import torch
import torch.nn.functional as F
import yaml
from accelerate import PartialState

from wespeaker_qmargin.audio import load_audio
from wespeaker_qmargin.augment import change_speed
from wespeaker_qmargin.checkpoints import read_checkpoint
from wespeaker_qmargin.config import load_config, save_config
from wespeaker_qmargin.lists import read_utterances
from wespeaker_qmargin.model import SpeakerNet, from_wespeaker, load_checkpoint, save_checkpoint
from wespeaker_qmargin.transfer import find_source, match_tensors, transfer

ALL = ["--valid_speakers", "0"]
COPIES = [*ALL, "--dataset_args.speed_perturb_labels", "new"]
SPEEDS = (1.0, 0.9, 1.1)


def make_experiment(folder, config, speakers, *, average=True):
    """An exp_dir as ``train`` leaves it, with weights that nobody trained."""
    torch.manual_seed(7)
    copies = 3 if config.dataset_args.speed_perturb_labels == "new" else 1
    net = SpeakerNet(config, copies * len(speakers))
    save_config(config, folder / "config.yaml")
    save_checkpoint(net, folder / "models" / ("avg_model.pt" if average else "model_3.pt"))
    (folder / "speakers.txt").write_text("".join(f"{name}\n" for name in speakers))
    return folder


@pytest.fixture
def source_dir(tiny, tmp_path):
    """An exp_dir with the speakers s9, s1, s5 and two that nobody else knows, in that order."""
    speakers = ["s9", "s1", "x", "s5", "y"]
    return make_experiment(tmp_path / "source", load_config(tiny, ALL), speakers)


def start(tiny, source, words=(), **options):
    return transfer(load_config(tiny, [*ALL, *words]), source, PartialState(cpu=True), **options)


def rows_of(path):
    return read_checkpoint(path)["projection.weight"]


def test_rows_come_by_name_and_the_backbone_whole(tiny, source_dir):
    source = find_source(source_dir)
    state, report = start(tiny, source)
    old = read_checkpoint(source.checkpoint)
    assert state.keys() == old.keys()
    for key in old.keys() - {"projection.weight"}:
        assert torch.equal(state[key], old[key]), key
    new = {f"s{i}": row for i, row in enumerate(state["projection.weight"])}
    for name, row in zip(source.speakers, old["projection.weight"]):
        if name in new:
            assert torch.equal(new[name], row), name
    assert len(report.loaded) == len(old) - 1
    assert not (report.new or report.dropped or report.mismatched)
    counts = report.rows_by_name, report.rows_from_means, report.rows_random, report.rows_dropped
    assert counts == (3, 7, 0, 2)
    assert "3 by speaker name, 7 from class means" in str(report)


def mean_embedding(config, checkpoint, speaker, speed, per_class=6):
    """The direction of a new row, by whole utterances one after the other."""
    net = SpeakerNet(config)
    load_checkpoint(net, checkpoint, head=False)
    net.eval()

    def mean(utterances, speed):
        total = 0
        for utterance in utterances:
            wav = torch.from_numpy(change_speed(load_audio(utterance, 16000), speed))
            with torch.no_grad():
                total += F.normalize(net.embed(wav[None])[0].double(), dim=0)
        return total / len(utterances)

    utterances = read_utterances("kaldi", config.train_data)
    his = [u for u in utterances if u.spk == speaker]
    his = [his[0], his[-1]] if per_class == 2 else his
    return F.normalize(mean(his, speed) - mean(utterances, 1.0), dim=0).float()


def test_new_speakers_get_class_means_of_the_length_of_the_others(tiny, source_dir):
    source, config = find_source(source_dir), load_config(tiny, ALL)
    weight = start(tiny, source, per_class=2)[0]["projection.weight"]
    by_name = weight[[1, 5, 9]].norm(dim=1).mean()
    for speaker in (0, 4, 8):
        expected = mean_embedding(config, source.checkpoint, f"s{speaker}", 1.0, per_class=2)
        torch.testing.assert_close(weight[speaker], by_name * expected)
    more = start(tiny, source, per_class=6)[0]["projection.weight"]
    expected = mean_embedding(config, source.checkpoint, "s4", 1.0)
    torch.testing.assert_close(more[4], by_name * expected)
    assert not torch.allclose(more[4], weight[4])


def test_class_means_classify_and_random_prototypes_do_not(tiny, source_dir, monkeypatch):
    """With embeddings that differ little beside what they share: mean filter banks, 16 bands."""

    def embed(self, wavs, seeds=None):
        return F.avg_pool1d(self.features(wavs).mean(dim=1), 5) + 20

    monkeypatch.setattr(SpeakerNet, "embed", embed)
    words = ["--dataset_args.cmvn", "false"]
    source = find_source(source_dir)._replace(speakers=None)
    config = load_config(tiny, [*ALL, *words])
    right = {}
    for prototypes in ("means", "random"):
        net = SpeakerNet(config, 10)
        state = start(tiny, source, words, prototypes=prototypes, per_class=2)[0]
        net.load_state_dict(from_wespeaker(state))
        net.eval()
        hits = []
        for utterance in read_utterances("kaldi", config.train_data):
            with torch.no_grad():
                embedding = net.embed(torch.from_numpy(load_audio(utterance, 16000))[None])
                scores, _ = net.projection(embedding, torch.zeros(1, dtype=torch.long))
            hits.append(f"s{scores.argmax()}" == utterance.spk)
        right[prototypes] = sum(hits) / len(hits)
    assert right["means"] > 0.7 and right["random"] < 0.4


def test_random_prototypes_are_those_of_the_seed(tiny, source_dir):
    source, config = find_source(source_dir), load_config(tiny, ALL)
    torch.manual_seed(config.seed)
    drawn = SpeakerNet(config, 10).projection.weight.detach()
    state, report = start(tiny, source, prototypes="random")
    new = [0, 2, 3, 4, 6, 7, 8]
    assert torch.equal(state["projection.weight"][new], drawn[new])
    assert (report.rows_by_name, report.rows_random) == (3, 7)
    with pytest.raises(ValueError, match="expected means or random, got 'mean'"):
        start(tiny, source, prototypes="mean")
    with pytest.raises(ValueError, match="per_class"):
        start(tiny, source, per_class=0)


@pytest.mark.parametrize("old, new", [(3, 1), (3, 3), (1, 3)])
def test_rows_of_speed_copies(tiny, tmp_path, old, new):
    speakers = ["s2", "x", "s0"]
    words = COPIES if old == 3 else ALL
    folder = make_experiment(tmp_path / "source", load_config(tiny, words), speakers)
    config = load_config(tiny, COPIES if new == 3 else ALL)
    source = find_source(folder)
    state, report = transfer(config, source, PartialState(cpu=True), per_class=6)
    weight, before = state["projection.weight"], rows_of(source.checkpoint)
    assert len(weight) == 10 * new and len(before) == 3 * old
    shared = min(old, new)
    for speed in range(shared):
        assert torch.equal(weight[10 * speed + 2], before[3 * speed])
        assert torch.equal(weight[10 * speed], before[3 * speed + 2])
    assert report.rows_by_name == 2 * shared
    assert report.rows_from_means == 10 * new - 2 * shared
    for speed in range(new):
        expected = mean_embedding(config, source.checkpoint, "s7", SPEEDS[speed])
        row = F.normalize(weight[10 * speed + 7], dim=0)
        torch.testing.assert_close(row, expected)
    if new == 3:
        slow, fast = weight[10 + 7], weight[20 + 7]
        assert not torch.allclose(slow, fast)


def test_speed_copies_of_a_large_margin_stage_of_wespeakers(tiny, tmp_path):
    """Its config.yaml says that it does not perturb; the head has kept the rows."""
    folder = make_experiment(tmp_path / "source", load_config(tiny, COPIES), ["s2", "x", "s0"])
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    saved["dataset_args"]["speed_perturb"] = False
    (folder / "config.yaml").write_text(yaml.safe_dump(saved))
    with pytest.raises(ValueError, match="9 rows, .* 1 speeds"):
        start(tiny, find_source(folder))
    (folder / "config.yaml").write_text(yaml.safe_dump({**saved, "do_lm": True}))
    state, report = start(tiny, find_source(folder))
    assert report.rows_by_name == 2
    before = rows_of(folder / "models" / "avg_model.pt")
    assert torch.equal(state["projection.weight"][[2, 0]], before[[0, 2]])


def test_without_a_speaker_list_all_prototypes_are_new(tiny, source_dir, tmp_path):
    folder = tmp_path / "wespeaker"
    folder.mkdir()
    shutil.copy(source_dir / "models" / "avg_model.pt", folder)
    shutil.copy(source_dir / "config.yaml", folder)
    report = start(tiny, find_source(folder))[1]
    assert (report.rows_by_name, report.rows_from_means, report.rows_dropped) == (0, 10, 5)


def test_nothing_is_embedded_where_all_are_known(tiny, source_dir, monkeypatch):
    speakers = [f"s{i}" for i in range(10)]
    folder = make_experiment(source_dir.parent / "all", load_config(tiny, ALL), speakers[::-1])
    monkeypatch.setattr(SpeakerNet, "embed", None)
    state, report = start(tiny, find_source(folder))
    before = rows_of(folder / "models" / "avg_model.pt")
    assert torch.equal(state["projection.weight"], before.flip(0)) and report.rows_by_name == 10


def test_subcentres_are_not_taken_for_speed_copies(tiny, tmp_path):
    kind = "project_type: arc_margin_intertopk_subcenter"
    head = ["--projection_args", f"{{{kind}, scale: 32, easy_margin: false}}"]
    config = load_config(tiny, [*COPIES, *head])
    folder = tmp_path / "source"
    save_config(config, folder / "config.yaml")
    (folder / "speakers.txt").write_text("s0\ns1\n")
    save_checkpoint(SpeakerNet(config, 2), folder / "models" / "avg_model.pt")
    assert len(rows_of(folder / "models" / "avg_model.pt")) == 6
    report = start(tiny, find_source(folder))[1]
    assert (report.rows_by_name, report.rows_from_means) == (0, 10)
    with pytest.raises(ValueError, match="arc_margin_intertopk_subcenter: it has no row a class"):
        start(tiny, find_source(folder), head)


def test_speaker_lists_that_disagree_with_the_rows(tiny, source_dir):
    path = source_dir / "speakers.txt"
    path.write_text("s9\ns1\nx\ns5\n")
    with pytest.raises(ValueError, match="head has 5 rows, but speakers.txt .* names 4 speakers"):
        start(tiny, find_source(source_dir))
    path.write_text("s9\ns1\nx\ns5\ns9\n")
    with pytest.raises(ValueError, match="s9 comes twice"):
        find_source(source_dir)
    path.write_text("s9\ns1\nx\ns5\ny\n")
    saved = yaml.safe_load((source_dir / "config.yaml").read_text())
    saved["dataset_args"]["speed_perturb_labels"] = "new"
    (source_dir / "config.yaml").write_text(yaml.safe_dump(saved))
    with pytest.raises(ValueError, match="names 5 speakers and its config.yaml 3 speeds"):
        start(tiny, find_source(source_dir))


def resnet(num_blocks, embed_dim=16):
    sizes = f"m_channels: 4, block: BasicBlock, num_blocks: {num_blocks}"
    return [
        "--model",
        "ResNet",
        "--model_args",
        f"{{feat_dim: 80, embed_dim: {embed_dim}, {sizes}}}",
    ]


def test_rows_of_another_dimension_are_not_taken(tiny, tmp_path):
    config = load_config(tiny, [*ALL, *resnet([3, 4, 6, 3])])
    folder = make_experiment(tmp_path / "source", config, ["s0", "x"])
    state, report = start(tiny, find_source(folder), resnet([3, 4, 6, 3], 12))
    assert state["projection.weight"].shape == (10, 12)
    assert (report.rows_by_name, report.rows_from_means) == (0, 10)
    assert [name.split(":")[0] for name in report.mismatched] == ["seg_1.weight", "seg_1.bias"]


def test_what_a_path_can_be(source_dir, tmp_path):
    model = source_dir / "models" / "avg_model.pt"
    for path in (source_dir, model):
        source = find_source(path)
        assert source.checkpoint == model and source.config["model"] == "XVEC"
        assert source.speakers == ["s9", "s1", "x", "s5", "y"]
    shutil.copy(model, tmp_path / "weights.pt")
    (tmp_path / "tiny.yaml").rename(tmp_path / "other.yaml")
    assert find_source(tmp_path / "weights.pt") == (tmp_path / "weights.pt", None, None)
    shutil.copy(model, source_dir / "avg_model.pt")
    assert find_source(source_dir).checkpoint == source_dir / "avg_model.pt"
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        find_source(tmp_path / "nothing")
    model.rename(model.with_name("model_3.pt"))
    (source_dir / "avg_model.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"avg_model.pt: no such checkpoint; .*: 3"):
        find_source(source_dir)


@pytest.mark.parametrize("wrap", ["state_dict", "model", "module."])
def test_wrapped_weights_load_the_same(tiny, source_dir, tmp_path, wrap):
    source = find_source(source_dir)
    plain = read_checkpoint(source.checkpoint)
    if wrap == "module.":
        torch.save({f"module.{k}": v for k, v in plain.items()}, tmp_path / "wrapped.pt")
    else:
        torch.save({wrap: plain, "epoch": 3}, tmp_path / "wrapped.pt")
    state = start(tiny, source._replace(checkpoint=tmp_path / "wrapped.pt"))[0]
    for key, value in start(tiny, source)[0].items():
        assert torch.equal(state[key], value), key


@pytest.mark.parametrize(
    "words, message",
    [
        (["--model_args.hid_dim", "20"], r"only \d+ of \d+ tensors fit .*mismatched \(frame_1"),
        (
            ["--model", "ResNet34", "--model_args", "{feat_dim: 80, embed_dim: 16}"],
            r"only \d+ of \d+ tensors fit .*new \(conv1.weight.*dropped \(frame_1.*another arch",
        ),
    ],
)
def test_other_architectures_are_refused(tiny, source_dir, words, message):
    with pytest.raises(ValueError, match=message):
        start(tiny, find_source(source_dir), words)


def test_a_shallower_network_of_one_family_is_refused(tiny, tmp_path):
    words = {"deep": resnet([3, 4, 6, 3]), "shallow": resnet([2, 2, 2, 2])}
    for one, other in (("deep", "shallow"), ("shallow", "deep")):
        config = load_config(tiny, [*ALL, *words[one]])
        folder = make_experiment(tmp_path / one, config, ["a", "b"])
        with pytest.raises(ValueError, match="another architecture"):
            start(tiny, find_source(folder), words[other])


def test_the_share_of_fitting_tensors_decides():
    wanted = {f"t{i}": torch.zeros(2) for i in range(20)}
    found = {**wanted, "t0": torch.zeros(3)}
    del found["t1"]
    report = match_tensors(found, wanted, "x.pt")
    assert len(report.loaded) == 18 and report.new == ["t1"]
    assert report.mismatched == ["t0: (3,) instead of (2,)"]
    # 18 of 21 names
    with pytest.raises(ValueError, match=r"only 18 of 21 .* 1 dropped \(extra\), 1 mismatched"):
        match_tensors({**found, "extra": torch.zeros(1)}, wanted, "x.pt")
    with pytest.raises(ValueError, match=r"x.pt: 1 tensors \(t7\) not finite"):
        match_tensors({**wanted, "t7": torch.tensor([0.0, float("nan")])}, wanted, "x.pt")


class Evil:
    def __reduce__(self):
        import os

        return os.system, ("touch evil",)


def test_files_that_are_no_checkpoint(tiny, source_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = find_source(source_dir)
    good = source.checkpoint.read_bytes()
    (tmp_path / "half.pt").write_bytes(good[: len(good) // 2])
    (tmp_path / "evil.pt").write_bytes(pickle.dumps({"a": Evil()}))
    torch.save({"state_dict": read_checkpoint(source.checkpoint), "x": Evil()}, "evil2.pt")
    torch.save({"epoch": 3}, "numbers.pt")
    for name in ("half", "evil", "evil2", "numbers"):
        with pytest.raises(ValueError, match=rf"{name}\.pt"):
            start(tiny, source._replace(checkpoint=tmp_path / f"{name}.pt"))
    assert not (tmp_path / "evil").exists()


def test_speakers_without_usable_audio_stay_random(tiny, source_dir, corpus, tmp_path, caplog):
    folder = tmp_path / "data"
    folder.mkdir()
    shutil.copy(corpus / "utt2spk", folder)
    lines = (corpus / "wav.scp").read_text().splitlines()
    (tmp_path / "bad.wav").write_text("no audio")
    lines = [f"{x.split()[0]} {tmp_path}/bad.wav" if x.startswith("s4-") else x for x in lines]
    (folder / "wav.scp").write_text("\n".join(lines))
    state, report = start(tiny, find_source(source_dir), ["--train_data", str(folder)])
    assert (report.rows_from_means, report.rows_random) == (6, 1)
    assert state["projection.weight"][4].isfinite().all()
    assert "s4-0" in caplog.text and "bad.wav" in caplog.text


def test_wespeakers_names_of_the_state(tiny, source_dir):
    """What comes out is what ``train --checkpoint`` takes."""
    state, _ = start(tiny, find_source(source_dir))
    SpeakerNet(load_config(tiny, ALL), 10).load_state_dict(from_wespeaker(state))
