"""Training items: crops, speeds, labels, bad files, and that they are pure functions."""

from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch

from wespeaker_qmargin.audio import Utterance
from wespeaker_qmargin.augment import AudioSource, Augmenter
from wespeaker_qmargin.data import TrainSet, collate
from wespeaker_qmargin.lists import speaker_labels

CROP = (20 - 1) * 160 + 400  # 20 frames


def settings(**changes) -> SimpleNamespace:
    args = {
        "resample_rate": 16000,
        "num_frms": 20,
        "frontend": "fbank",
        "fbank_args": {},
        "filter": True,
        "filter_args": {"min_num_frames": 10, "max_num_frames": 60},
        "speed_perturb": False,
        "speed_perturb_mode": "random",
        "speed_perturb_labels": "new",
    }
    return SimpleNamespace(**{**args, **changes})


def ramp(samples: int, number: int) -> np.ndarray:
    """A wave whose values tell the utterance (the thousands) and the sample."""
    return ((number * 20000 + np.arange(samples)) / 2**20).astype(np.float32)


def place(wav) -> tuple[int, int]:
    """(utterance, first sample) of a crop of a ramp."""
    return divmod(round(float(wav[0]) * 2**20), 20000)


def write_utterances(folder) -> list[Utterance]:
    """Eight utterances of 1 s, two for each of the speakers s3, s2, s1, s0."""
    found = []
    for number in range(8):
        path = folder / f"{number}.wav"
        soundfile.write(path, ramp(16000, number), 16000, subtype="FLOAT")
        found.append(Utterance(f"u{number}", f"s{3 - number // 2}", str(path)))
    return found


@pytest.fixture
def utterances(tmp_path) -> list[Utterance]:
    return write_utterances(tmp_path)


def train_set(utterances, *, seed=5, augmenter=None, **changes) -> TrainSet:
    labels = speaker_labels(utterances)
    return TrainSet(utterances, labels, settings(**changes), seed=seed, augmenter=augmenter)


def test_items_are_crops_of_their_utterance_with_its_label(utterances):
    items = train_set(utterances)
    assert len(items) == 8 and items.num_class == 4 and items.num_samples == CROP
    starts = set()
    for epoch in range(30):
        for index in range(8):
            sample = items[epoch, index]
            number, start = place(sample.wav)
            assert number == index and sample.key == f"u{index}"
            assert sample.label == 3 - index // 2
            assert np.array_equal(sample.wav, ramp(16000, number)[start : start + CROP])
            assert sample.wav.dtype == torch.float32 and sample.problems == []
            starts.add(start)
    # from the first to the last sample but those of a crop
    assert min(starts) < 500 and max(starts) > 16000 - CROP - 500 and len(starts) > 200


def test_items_are_functions_of_seed_epoch_and_index(utterances):
    items = train_set(utterances)
    sample = items[3, 2]
    again = train_set(utterances)[3, 2]
    assert torch.equal(sample.wav, again.wav) and sample.seed == again.seed
    assert 0 <= sample.seed < 2**63
    others = [items[3, 3], items[4, 2], train_set(utterances, seed=6)[3, 2]]
    assert len({sample.seed, *(other.seed for other in others)}) == 4
    assert place(items[4, 2].wav) != place(sample.wav)
    assert place(others[2].wav) != place(sample.wav)


def test_crop_longer_than_the_utterance_repeats_it(utterances):
    sample = train_set(utterances, num_frms=250, filter=False)[0, 1]
    expected = np.resize(ramp(16000, 1), (250 - 1) * 160 + 400)
    assert np.array_equal(sample.wav, expected)


def test_max_num_frames_limits_what_is_repeated(utterances):
    sample = train_set(utterances, num_frms=100)[0, 1]  # of at most 60 frames, 9600 samples
    assert sample.wav.shape == (99 * 160 + 400,)
    _, start = place(sample.wav)
    stretch = ramp(16000, 1)[start : start + 9600]
    assert len(stretch) == 9600
    assert np.array_equal(sample.wav, np.resize(stretch, 99 * 160 + 400))


def test_min_num_frames_replaces_the_short(utterances, tmp_path):
    soundfile.write(tmp_path / "1.wav", ramp(1599, 1), 16000, subtype="FLOAT")
    items = train_set(utterances)
    sample = items[0, 1]
    assert sample.key != "u1" and place(sample.wav)[0] == int(sample.key[1])
    assert sample.label == items[0, int(sample.key[1])].label
    assert sample.problems == []
    assert len(sample.too_short) == 1
    assert sample.too_short[0].startswith(f"u1: {tmp_path}/1.wav: too short: 0.100 s, at least 0.1")
    assert torch.equal(sample.wav, items[0, 1].wav)
    soundfile.write(tmp_path / "1.wav", ramp(1600, 1), 16000, subtype="FLOAT")
    assert items[0, 1].key == "u1"
    # without the filter a single frame is enough
    soundfile.write(tmp_path / "1.wav", ramp(400, 1), 16000, subtype="FLOAT")
    unfiltered = train_set(utterances, filter=False)
    assert np.array_equal(unfiltered[0, 1].wav, np.resize(ramp(400, 1), CROP))
    soundfile.write(tmp_path / "1.wav", ramp(399, 1), 16000, subtype="FLOAT")
    assert unfiltered[0, 1].too_short


def test_bad_files_are_replaced_and_named(utterances, tmp_path):
    (tmp_path / "2.wav").write_text("no audio")
    (tmp_path / "3.wav").unlink()
    items = train_set(utterances)
    for epoch in range(5):
        batch = collate([items[epoch, index] for index in range(8)])
        assert {"u2", "u3"}.isdisjoint(batch.keys)
        text = "\n".join(batch.problems)
        assert f"u2: {tmp_path}/2.wav: " in text and f"u3: {tmp_path}/3.wav: No such file" in text
        assert batch.too_short == []
    replacements = {items[epoch, 2].key for epoch in range(40)}
    assert replacements == {"u0", "u1", "u4", "u5", "u6", "u7"}


def test_a_list_whose_files_all_fail_ends_in_an_error(utterances, tmp_path):
    for number in range(8):
        (tmp_path / f"{number}.wav").write_bytes(b"")
    with pytest.raises(ValueError, match="200 utterances drawn in a row are unus.*: u5") as caught:
        train_set(utterances)[0, 5]
    message = str(caught.value)
    assert "the file is empty" in message and "\n" not in message
    assert message.count("the file is empty") == 3 and message.endswith("; ...")


def test_a_list_of_too_short_utterances_says_so(utterances, tmp_path):
    for number in range(8):
        soundfile.write(tmp_path / f"{number}.wav", ramp(1599, number), 16000)
    with pytest.raises(ValueError, match=r"\(200 too short\): u5: .*at least 0\.1"):
        train_set(utterances)[0, 5]


def test_one_usable_utterance_of_many_is_found(utterances, tmp_path):
    many = utterances[:1] + [Utterance(f"x{i}", "s3", f"{tmp_path}/no{i}.wav") for i in range(15)]
    items = train_set(many)
    assert all(items[0, index].key == "u0" for index in range(16))


def test_bad_noise_files_are_no_bad_utterances(utterances, tmp_path):
    (tmp_path / "noise.scp").write_text(f"noise-a {tmp_path}/gone.wav\n")
    noise = AudioSource(tmp_path / "noise.scp")
    items = train_set(utterances, augmenter=Augmenter(noise, None, prob=1.0, sample_rate=16000))
    sample = items[0, 0]
    assert sample.key == "u0" and sample.problems == sample.too_short == []
    assert sample.bad_sources[0] == f"noise-a: {tmp_path}/gone.wav: No such file or directory"
    assert "this source is off" in sample.bad_sources[-1]
    assert collate([sample, items[0, 1]]).bad_sources == 2 * sample.bad_sources
    assert torch.equal(sample.wav, train_set(utterances)[0, 0].wav)


def test_augmenter_gets_the_crop_and_a_generator_of_its_own(utterances):
    def augment(wav, rng, *, problems):
        assert wav.shape == (CROP,)
        return np.full(CROP, rng.random(), np.float32)

    values = {float(train_set(utterances, augmenter=augment)[0, i].wav[0]) for i in range(8)}
    assert len(values) == 8


def tones(tmp_path, rate=16000, seconds=2.0) -> list[Utterance]:
    found = []
    for number, frequency in enumerate((500, 700)):
        time = np.arange(int(rate * seconds)) / rate
        path = tmp_path / f"t{number}.wav"
        soundfile.write(path, 0.5 * np.sin(2 * np.pi * frequency * time), rate, subtype="FLOAT")
        found.append(Utterance(f"u{number}", f"s{number}", str(path)))
    return found


def pitch(wav: torch.Tensor) -> float:
    spectrum = np.abs(np.fft.rfft(wav.numpy() * np.hanning(len(wav)), 2**18))
    return float(np.argmax(spectrum) * 16000 / 2**18)


def test_random_speeds_are_new_classes_in_upstreams_layout(tmp_path):
    items = train_set(tones(tmp_path), speed_perturb=True, num_frms=60)
    assert len(items) == 2 and items.num_class == 6
    seen = {}
    for epoch in range(20):
        for index, frequency in ((0, 500), (1, 700)):
            sample = items[epoch, index]
            speed = pitch(sample.wav) / frequency
            block = {1.0: 0, 0.9: 1, 1.1: 2}[round(speed, 2)]
            assert sample.label == index + 2 * block
            seen[block] = seen.get(block, 0) + 1
    assert min(seen.values()) >= 6 and len(seen) == 3


def test_expanded_speeds_and_same_labels(tmp_path):
    utterances = tones(tmp_path)
    expanded = train_set(utterances, speed_perturb=True, speed_perturb_mode="expanded", num_frms=60)
    assert len(expanded) == 6 and expanded.num_class == 6
    found = [(pitch(expanded[0, i].wav), expanded[0, i].label) for i in range(6)]
    expected = [(500, 0), (450, 2), (550, 4), (700, 1), (630, 3), (770, 5)]
    np.testing.assert_allclose(found, expected, atol=1.0)
    same_labels = train_set(utterances, speed_perturb=True, speed_perturb_labels="same")
    assert same_labels.num_class == 2
    assert {same_labels[epoch, 1].label for epoch in range(9)} == {1}
    assert len({round(pitch(same_labels[epoch, 1].wav)) for epoch in range(9)}) == 3


def chord(seconds: np.ndarray) -> np.ndarray:
    frequencies = (110.3, 333.7, 741.1, 1503.9, 2710.5)
    return 0.1 * sum(np.sin(2 * np.pi * f * seconds + f) for f in frequencies)


@pytest.mark.parametrize("speed, factor", [(0, 1.0), (1, 0.9), (2, 1.1)])
@pytest.mark.parametrize("rate", [16000, 44100, 8000])
def test_a_crop_at_any_rate_and_speed_is_the_wave_at_that_place(tmp_path, rate, speed, factor):
    path = tmp_path / "a.wav"
    soundfile.write(path, chord(np.arange(3 * rate) / rate), rate, subtype="FLOAT")
    items = train_set(
        [Utterance("u", "s", str(path))],
        speed_perturb=True,
        speed_perturb_mode="expanded",
        num_frms=100,
        filter=False,
    )
    starts = set()
    for epoch in range(3):
        found = items[epoch, speed].wav.numpy()
        assert found.shape == (99 * 160 + 400,)
        steps = np.arange(len(found)) * factor / 16000
        # which sample of the file it begins with, told from 60 of its samples
        few = slice(500, 12500, 200)
        guesses = chord(np.arange(2 * rate)[:, None] / rate + steps[few])
        start = int(np.argmin(np.square(guesses - found[few]).sum(axis=1)))
        starts.add(start)
        # at its ends a crop is resampled without its surroundings
        error = (found - chord(start / rate + steps))[200:-200]
        assert np.abs(error).max() < 1e-3
        assert np.abs(found[-40:]).max() > 0.02
    assert len(starts) == 3


def test_frames_are_those_of_the_front_end(tmp_path):
    utterances = tones(tmp_path)
    assert train_set(
        utterances, fbank_args={"frame_shift": 20, "frame_length": 30}
    ).num_samples == (19 * 320 + 480)
    ssl = {"frontend": "s3prl", "s3prl_args": {"frame_shift": 20, "frame_length": 20}}
    assert train_set(utterances, **ssl).num_samples == 20 * 320
    mel = {"frontend": "tfmel", "tfmel_args": {"hop_length": 80, "win_length": 320}}
    assert train_set(utterances, **mel).num_samples == 19 * 80 + 320
    plain = {"frontend": "w2vbert", "w2vbert_args": None}
    assert train_set(utterances, **plain).num_samples == CROP
    assert train_set(utterances, resample_rate=8000).num_samples == CROP // 2


def test_speakers_without_class_are_refused(utterances):
    labels = {"s0": 0, "s1": 1}
    with pytest.raises(ValueError, match="2 speakers of the training set have no class: s2, s3"):
        TrainSet(utterances, labels, settings(), seed=0)
    with pytest.raises(ValueError, match="the training set is empty"):
        TrainSet([], labels, settings(), seed=0)
    for name in ("speed_perturb_mode", "speed_perturb_labels"):
        with pytest.raises(ValueError, match=f"{name} 'x': expected"):
            train_set(utterances, **{name: "x"})
