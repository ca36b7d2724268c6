"""Extraction: every utterance once, the same at every call, bad audio named."""

import kaldiio
import numpy as np
import pytest
import torch

from wespeaker_qmargin.config import load_config, save_config
from wespeaker_qmargin.extract import extract_experiment
from wespeaker_qmargin.model import SpeakerNet, save_checkpoint


@pytest.fixture
def exp(tiny, tmp_path):
    config = load_config(tiny)
    torch.manual_seed(0)
    save_config(config, tmp_path / "exp" / "config.yaml")
    save_checkpoint(SpeakerNet(config, 8), tmp_path / "exp" / "models" / "avg_model.pt")
    return tmp_path / "exp"


def call(exp, corpus, out, **more):
    return extract_experiment(exp, data_type="kaldi", data=str(corpus), out_dir=out, **more)


def test_whole_list_is_extracted_deterministically(exp, corpus, tmp_path):
    first = dict(kaldiio.load_scp(str(call(exp, corpus, tmp_path / "a"))))
    second = dict(kaldiio.load_scp(str(call(exp, corpus, tmp_path / "b", num_workers=2))))
    keys = [line.split()[0] for line in (corpus / "wav.scp").read_text().splitlines()]
    assert list(first) == keys
    for key in keys:
        assert first[key].dtype == np.float32 and first[key].shape == (16,)
        np.testing.assert_array_equal(first[key], second[key])
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["xvector.ark", "xvector.scp"]


def test_labels_are_not_needed(exp, corpus, tmp_path):
    (tmp_path / "nolabels").mkdir()
    (tmp_path / "nolabels" / "wav.scp").write_text((corpus / "wav.scp").read_text())
    assert call(exp, tmp_path / "nolabels", tmp_path / "a").exists()


def test_untrained_is_another_network(exp, corpus, tmp_path):
    trained = dict(kaldiio.load_scp(str(call(exp, corpus, tmp_path / "a"))))
    floor = dict(kaldiio.load_scp(str(call(exp, corpus, tmp_path / "b", which="untrained"))))
    assert not np.allclose(trained["s0-0"], floor["s0-0"])


def test_bad_audio_is_named_and_the_rest_is_written(exp, corpus, tmp_path):
    lines = (corpus / "wav.scp").read_text().splitlines()[:5]
    broken = tmp_path / "broken.wav"
    broken.write_bytes(b"RIFFnonsense")
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "wav.scp").write_text("\n".join([*lines, f"bad {broken}"]) + "\n")
    with pytest.raises(ValueError, match=r"1 of 6 utterances.*bad: .*broken\.wav"):
        call(exp, folder, tmp_path / "out")
    assert len((tmp_path / "out" / "xvector.scp").read_text().splitlines()) == 5
    assert (tmp_path / "out" / "xvector.bad").read_text().startswith(f"bad: {broken}: ")
    call(exp, folder, tmp_path / "out", skip_bad=True)
    (folder / "wav.scp").write_text(f"bad {broken}\n")
    with pytest.raises(ValueError, match="1 of 1"):
        call(exp, folder, tmp_path / "none", skip_bad=True)
    assert [p.name for p in (tmp_path / "none").iterdir()] == ["xvector.bad"]


def test_utterance_below_one_frame(exp, tmp_path):
    import soundfile

    soundfile.write(tmp_path / "short.wav", np.zeros(399, dtype=np.float32), 16000)
    (tmp_path / "wav.scp").write_text(f"short {tmp_path}/short.wav\n")
    with pytest.raises(ValueError, match=r"short: .*too short"):
        extract_experiment(
            exp, data_type="kaldi", data=str(tmp_path / "wav.scp"), out_dir=tmp_path / "out"
        )


def test_nan_embedding_is_named(exp, corpus, tmp_path):
    from wespeaker_qmargin.checkpoints import read_checkpoint

    state = read_checkpoint(exp / "models" / "avg_model.pt")
    state["seg_2.bias"][:] = float("nan")
    torch.save(state, exp / "models" / "avg_model.pt")
    with pytest.raises(ValueError, match="s0-0: its embedding is not finite"):
        call(exp, corpus, tmp_path / "out")
    assert not (tmp_path / "out" / "xvector.scp").exists()


def test_old_output_survives_a_failure(exp, corpus, tmp_path):
    call(exp, corpus, tmp_path / "out")
    before = (tmp_path / "out" / "xvector.scp").read_text()
    (exp / "models" / "avg_model.pt").write_bytes(b"half")
    with pytest.raises(ValueError, match="avg_model.pt"):
        call(exp, corpus, tmp_path / "out")
    assert (tmp_path / "out" / "xvector.scp").read_text() == before


def test_fewer_frames_than_the_network_needs_are_named_and_the_rest_is_written(
    exp, corpus, tmp_path
):
    import soundfile

    soundfile.write(tmp_path / "short.wav", np.ones(800, dtype=np.float32) / 9, 16000)
    good = (corpus / "wav.scp").read_text().splitlines()[0]
    (tmp_path / "wav.scp").write_text(f"short {tmp_path}/short.wav\n{good}\n")
    out = call(exp, tmp_path / "wav.scp", tmp_path / "out", skip_bad=True)
    assert len(out.read_text().splitlines()) == 1
    told = (tmp_path / "out" / "xvector.bad").read_text()
    assert told.count("\n") == 1 and "short.wav: too short: 0.050 s, at least" in told


def test_no_memory_for_one_utterance_does_not_end_the_others(exp, corpus, tmp_path, monkeypatch):
    embed, calls = SpeakerNet.embed, []

    def first_fails(net, wavs, seeds=None):
        calls.append(wavs.shape[1])
        if len(calls) == 1:
            raise RuntimeError("out of memory\nand more")
        return embed(net, wavs, seeds)

    monkeypatch.setattr(SpeakerNet, "embed", first_fails)
    out = call(exp, corpus, tmp_path / "out", skip_bad=True)
    assert len(out.read_text().splitlines()) == len(calls) - 1
    told = (tmp_path / "out" / "xvector.bad").read_text()
    assert told.endswith(f": no embedding of {calls[0]} samples: out of memory\n")
