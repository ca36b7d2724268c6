"""The mini recipe's data tools: synthetic voices, Mini LibriSpeech, and the check of any folder."""

import functools
import hashlib
import http.server
import subprocess
import sys
import tarfile
import threading
from collections import Counter
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import soundfile

from wespeaker_qmargin import files

ROOT = Path(__file__).parents[1]
LOCAL = ROOT / "recipes" / "mini" / "local"
sys.path.insert(0, str(LOCAL))

import make_demo  # noqa: E402
import prepare_data  # noqa: E402
import prepare_minilibrispeech  # noqa: E402

# ---------------------------------------------------------------------------------- prepare_data


def tone(path: Path, frames: int = 1600) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, 0.1 * np.sin(0.1 * np.arange(frames)), 16000)


def write_folder(folder: Path) -> Path:
    """Make a small data folder: 3 + 3 speakers of 2 utterances, trials, noises, responses."""
    for split, first in (("train", 0), ("test", 3)):
        utts = [(f"s{s}-{u}", f"s{s}") for s in range(first, first + 3) for u in (0, 1)]
        for utt, _ in utts:
            tone(folder / split / "wav" / f"{utt} x.wav")
        (folder / split / "wav.scp").write_text(
            "".join(f"{utt} {split}/wav/{utt} x.wav\n" for utt, _ in utts)
        )
        (folder / split / "utt2spk").write_text("".join(f"{utt} {spk}\n" for utt, spk in utts))
    (folder / "test" / "trials").mkdir()
    trials = "s3-0 s3-1 target\ns3-0 s4-1 nontarget\n"
    (folder / "test" / "trials" / "a.trials").write_text(trials)
    (folder / "test" / "trials" / "b.trials").write_text("1 s4-0 s4-1\n0 s4-0 s5-1\n")
    for kind, keys in (("noise", ("fan", "music-1", "x/speech-2")), ("rir", ("hall",))):
        for key in keys:
            tone(folder / "aug" / kind / f"{key}.wav")
        table = "".join(f"{key} aug/{kind}/{key}.wav\n" for key in keys)
        (folder / "aug" / f"{kind}.scp").write_text(table)
    (folder / "NOTE").write_text("synthetic tones\n")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_folder_is_prepared(tmp_path):
    data, out = write_folder(tmp_path / "data"), tmp_path / "out"
    found = prepare_data.prepare_data(data, out)
    assert found["train"] == found["test"] == (6, 3) and (found["noise"], found["rir"]) == (3, 1)
    for split in ("train", "test"):
        wavs = files.read_table(out / split / "wav.scp")
        assert list(wavs) == list(files.read_table(data / split / "wav.scp"))
        assert all(Path(wav).is_absolute() and Path(wav).is_file() for wav in wavs.values())
        assert files.read_table(out / split / "utt2spk") == files.read_table(
            data / split / "utt2spk"
        )
    assert list(files.read_table(out / "musan" / "wav.scp")) == [
        "noise-fan",
        "music-1",
        "x/speech-2",
    ]
    assert list(files.read_table(out / "rirs" / "wav.scp")) == ["hall"]
    assert (out / "test" / "trials" / "b.trials").read_text() == (
        "s4-0 s4-1 target\ns4-0 s5-1 nontarget\n"
    )
    assert (out / "NOTE").read_text() == "synthetic tones\n"


def test_prepared_folder_is_data_itself_and_a_second_run_changes_nothing(tmp_path):
    data, out, again = write_folder(tmp_path / "data"), tmp_path / "out", tmp_path / "again"
    prepare_data.prepare_data(data, out)
    before = contents(out)
    prepare_data.prepare_data(data, out)
    prepare_data.prepare_data(out, again)
    assert contents(out) == before == contents(again)


def test_what_an_earlier_corpus_left_is_gone(tmp_path):
    data, out = write_folder(tmp_path / "data"), tmp_path / "out"
    prepare_data.prepare_data(data, out)
    (out / "train" / "raw.list").write_text("made by a later stage")
    for name in ("NOTE", "aug/noise.scp", "aug/rir.scp", "test/trials/b.trials"):
        (data / name).unlink()
    prepare_data.prepare_data(data, out)
    assert sorted(contents(out)) == [
        "test/trials/a.trials",
        "test/utt2spk",
        "test/wav.scp",
        "train/raw.list",
        "train/utt2spk",
        "train/wav.scp",
    ]


def test_trials_may_be_one_file(tmp_path):
    data = write_folder(tmp_path / "data")
    text = (data / "test" / "trials" / "a.trials").read_text()
    for path in (data / "test" / "trials").iterdir():
        path.unlink()
    (data / "test" / "trials").rmdir()
    (data / "test" / "trials").write_text(text)
    prepare_data.prepare_data(data, tmp_path / "out")
    assert (tmp_path / "out" / "test" / "trials" / "trials.trials").read_text() == text


def edit(name: str, old: str, new: str):
    def damage(data: Path) -> None:
        text = (data / name).read_text()
        assert old in text
        (data / name).write_text(text.replace(old, new))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "train" / "wav.scp").unlink(), r"train/wav\.scp: no such file"),
        (lambda d: (d / "test" / "utt2spk").write_text(""), r"utt2spk: the file is empty"),
        (
            lambda d: (d / "train/wav/s0-0 x.wav").unlink(),
            r"used, 1 in all: s0-0 .*\(no such file\)",
        ),
        (lambda d: (d / "test/wav/s4-0 x.wav").write_text(""), r"s4-0 .*\(empty\)"),
        (lambda d: (d / "test/wav/s4-0 x.wav").write_text("no audio" * 9), r"\(not an audio file"),
        (lambda d: tone(d / "aug/rir/hall.wav", 0), r"rir\.scp: audio .* hall .*\(no samples\)"),
        (edit("train/utt2spk", "s0-1 s0\n", ""), "in wav.scp and not in utt2spk, 1 in all: s0-1"),
        (edit("train/wav.scp", "s0-1 train/wav/s0-1 x.wav\n", ""), "in utt2spk and not in wav.scp"),
        (edit("test/utt2spk", "s3-1 s3", "s3-1 s0"), "speakers in both train and test .*: s0"),
        (
            edit("test/trials/b.trials", "s5-1", "s0-1"),
            r"b\.trials: keys without audio, 1 in all: s0-1",
        ),
        (edit("test/trials/a.trials", "nontarget", "target"), r"a\.trials: both target and"),
        (edit("test/trials/a.trials", " nontarget", " perhaps"), r"a\.trials:2: .*'perhaps'"),
        (edit("train/wav.scp", "train/wav/s0-0 x.wav", "sox x.mp3 - |"), "s0-0: shell commands"),
    ],
)
def test_bad_folder_is_refused_and_nothing_is_written(tmp_path, damage, message):
    data, out = write_folder(tmp_path / "data"), tmp_path / "out"
    damage(data)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        prepare_data.prepare_data(data, out)
    assert not out.exists()


def test_no_trials_and_no_folder(tmp_path):
    data = write_folder(tmp_path / "data")
    for path in (data / "test" / "trials").iterdir():
        path.unlink()
    with pytest.raises(FileNotFoundError, match=r"trials: expected a trial list"):
        prepare_data.prepare_data(data, tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="no such folder"):
        prepare_data.prepare_data(tmp_path / "nowhere", tmp_path / "out")


def test_overlap_is_accepted_when_asked(tmp_path):
    data = write_folder(tmp_path / "data")
    edit("test/utt2spk", "s3-1 s3", "s3-1 s0")(data)
    assert prepare_data.prepare_data(data, tmp_path / "out", allow_overlap=True)["test"] == (6, 4)


def test_drawn_trials():
    utt2spk = {f"s{s}-{u}": f"s{s}" for s in range(6) for u in range(5)}
    every = prepare_data.draw_trials(utt2spk, per_speaker=99, ratio=1, seed=0)
    pairs = list(zip(every.enroll, every.test))
    targets = {pair for pair, same in zip(pairs, every.is_target) if same}
    assert targets == {p for p in combinations(sorted(utt2spk), 2) if p[0][:2] == p[1][:2]}
    assert len(pairs) == len(set(pairs)) == 2 * 6 * 10
    assert all((utt2spk[a] == utt2spk[b]) == same for (a, b), same in zip(pairs, every.is_target))
    some = prepare_data.draw_trials(utt2spk, per_speaker=4, ratio=2.5, seed=0)
    assert Counter(utt2spk[a] for a, t in zip(some.enroll, some.is_target) if t) == Counter(
        {f"s{s}": 4 for s in range(6)}
    )
    assert (~some.is_target).sum() == 60
    turned = dict(reversed(utt2spk.items()))
    assert prepare_data.draw_trials(turned, per_speaker=4, ratio=2.5, seed=0)[:2] == some[:2]
    assert prepare_data.draw_trials(utt2spk, per_speaker=4, ratio=2.5, seed=1)[:2] != some[:2]
    with pytest.raises(ValueError, match="no trials in 5 utterances of 1 speakers"):
        prepare_data.draw_trials({f"a{i}": "a" for i in range(5)}, per_speaker=1, ratio=1)


@pytest.mark.minivox
def test_minivox(minivox, tmp_path):
    found = prepare_data.prepare_data(minivox, tmp_path)
    assert found["train"] == (1721, 452) and found["test"] == (638, 88)
    counts = {k: (t.is_target.sum(), (~t.is_target).sum()) for k, t in found["trials"].items()}
    assert counts["cv"] == (1646, 8000) and counts["ls"] == (450, 4500) and len(counts) == 5
    assert (found["noise"], found["rir"]) == (6, 60) and not (tmp_path / "NOTE").exists()


# ------------------------------------------------------------------------------------- make_demo


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    pytest.importorskip("espeakng_loader")
    folder = tmp_path_factory.mktemp("demo") / "corpus"
    assert make_demo.make_demo(folder, num_speakers=10, num_utts=3, seed=1)
    return folder


def test_demo_corpus_passes_the_check(demo, tmp_path):
    found = prepare_data.prepare_data(demo, tmp_path)
    assert found["train"] == (24, 8) and found["test"] == (6, 2)
    labels = found["trials"]["demo"].is_target
    assert labels.sum() == (~labels).sum() == 6
    assert found["noise"] >= 5 and found["rir"] >= 10
    assert "Synthetic" in (tmp_path / "NOTE").read_text()
    assert "mean nothing" in (demo / "README").read_text()
    assert sorted(path.name for path in demo.parent.iterdir()) == ["corpus"]


def test_demo_voices_are_speech_like_and_differ(demo):
    clips = {}
    for split in ("train", "test"):
        for utt, wav in files.read_table(demo / split / "wav.scp").items():
            samples, rate = soundfile.read(demo / wav)
            assert rate == 16000 and samples.ndim == 1 and 1.5 < len(samples) / rate < 8
            assert 0.1 < np.abs(samples).max() < 1 and samples.std() > 0.01
            clips[utt] = samples
    lengths = Counter(map(len, clips.values()))
    assert lengths.most_common(1)[0][1] == 1  # no two utterances are one text of one voice


def test_demo_is_a_function_of_its_arguments(demo, tmp_path):
    assert make_demo.make_demo(tmp_path / "same", num_speakers=10, num_utts=3, seed=1)
    assert contents(tmp_path / "same") == contents(demo)
    assert make_demo.make_demo(tmp_path / "other", num_speakers=10, num_utts=3, seed=2)
    other, own = contents(tmp_path / "other"), contents(demo)
    assert not any(other[name] == own[name] for name in own if name.endswith(".wav"))


def test_complete_demo_is_kept_and_other_folders_are_refused(demo, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in demo.rglob("*")}
    assert not make_demo.make_demo(demo, num_speakers=10, num_utts=3, seed=1)
    with pytest.raises(ValueError, match="something else"):
        make_demo.make_demo(demo, num_speakers=11, num_utts=3, seed=1)
    assert {path: path.stat().st_mtime_ns for path in demo.rglob("*")} == before
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="something else"):
        make_demo.make_demo(tmp_path, num_speakers=10, num_utts=3)
    with pytest.raises(ValueError, match="at least 4 speakers"):
        make_demo.make_demo(tmp_path / "x", num_speakers=3)
    assert contents(tmp_path) == {"thesis.tex": b"precious"}


def test_interrupted_demo_leaves_no_folder(tmp_path, monkeypatch):
    pytest.importorskip("espeakng_loader")

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(make_demo, "_write_augmentation", stop)
    with pytest.raises(KeyboardInterrupt):
        make_demo.make_demo(tmp_path / "x", num_speakers=4, num_utts=2)
    assert not list(tmp_path.iterdir())


def test_room_response_falls_60_decibels_in_the_named_time():
    rir = make_demo.room_response(0.5, np.random.default_rng(0))
    tail = np.square(rir[100:])
    left = 10 * np.log10(np.cumsum(tail[::-1])[::-1] / tail.sum())  # Schroeder's integral
    slope = np.polyfit(np.arange(4000) / 16000, left[:4000], 1)[0]
    assert -60 / slope == pytest.approx(0.5, rel=0.1) and np.argmax(np.abs(rir)) == 0


def test_coloured_noise_has_the_named_slope():
    noise = make_demo.coloured_noise(1 << 16, 1.0, np.random.default_rng(0))
    power = np.square(np.abs(np.fft.rfft(noise)))[8:-8]
    slope = np.polyfit(np.log(np.arange(8, len(power) + 8)), np.log(power), 1)[0]
    assert slope == pytest.approx(-2, abs=0.05) and noise.std() == pytest.approx(1)


# ----------------------------------------------------------------------- prepare_minilibrispeech


def write_librispeech(folder: Path, part: str, speakers) -> None:
    for speaker in speakers:
        for number in range(3):
            tone(folder / "LibriSpeech" / part / speaker / "77" / f"{speaker}-77-{number:04d}.flac")
        trans = folder / "LibriSpeech" / part / speaker / "77" / f"{speaker}-77.trans.txt"
        trans.write_text("nothing is said\n")
    (folder / "LibriSpeech" / "README.TXT").write_text("also in the archive")


@pytest.fixture(scope="module")
def web(tmp_path_factory):
    """Serve the two archives on the loopback device; return (url, md5 by part, folder)."""
    folder, served = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("served")
    md5 = {}
    for part, speakers in (("train-clean-5", ("11", "12")), ("dev-clean-2", ("13", "14"))):
        write_librispeech(folder / part, part, speakers)
        archive = served / f"{part}.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(folder / part / "LibriSpeech", "LibriSpeech")
        md5[part] = hashlib.md5(archive.read_bytes()).hexdigest()
    handler = functools.partial(RangeHandler, directory=str(served))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", md5, served
        server.shutdown()


class RangeHandler(http.server.SimpleHTTPRequestHandler):
    """Serves ``Range: bytes=N-``, and breaks off where ``cut`` says."""

    cut: int | None = None
    requests: list[tuple[str, str | None]] = []  # noqa: RUF012

    def do_GET(self):
        self.requests.append((self.path, self.headers.get("Range")))
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            return self.send_error(404)
        start = int((self.headers.get("Range") or "bytes=0-")[6:-1])
        body = path.read_bytes()[start:]
        if not body:
            return self.send_error(416)
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.cut])

    def log_message(self, *_):
        pass


@pytest.fixture(autouse=True)
def whole_answers():
    RangeHandler.cut = None
    RangeHandler.requests.clear()


def prepare_libri(out, web, **options):
    url, md5, _ = web
    prepare_minilibrispeech.prepare_minilibrispeech(out, **{"url": url, "md5": md5, **options})


def test_minilibrispeech_is_downloaded_and_prepared(web, tmp_path):
    prepare_libri(tmp_path / "libri", web)
    found = prepare_data.prepare_data(tmp_path / "libri", tmp_path / "out")
    assert found["train"] == found["test"] == (6, 2)
    assert files.read_table(tmp_path / "out/train/utt2spk")["11-77-0002"] == "11"
    labels = found["trials"]["dev-clean-2"].is_target
    assert (labels.sum(), (~labels).sum()) == (6, 9)
    assert "Mini LibriSpeech" in (tmp_path / "out" / "NOTE").read_text()
    before = contents(tmp_path / "libri")
    for archive in (tmp_path / "libri" / "archives").iterdir():
        archive.unlink()
    prepare_libri(tmp_path / "libri", web, url="http://127.0.0.1:1")  # needs no network any more
    after = contents(tmp_path / "libri")
    assert after == {name: body for name, body in before.items() if "archives" not in name}


def test_broken_download_continues_where_it_stopped(web, tmp_path):
    RangeHandler.cut = 1000
    with pytest.raises(OSError, match=r"Run again to continue .* put it at .*train-clean-5\.tar"):
        prepare_libri(tmp_path, web)
    assert (tmp_path / "archives" / "train-clean-5.tar.gz.part").stat().st_size == 1000
    assert not (tmp_path / "LibriSpeech").exists() and not (tmp_path / "train").exists()
    RangeHandler.cut = None
    prepare_libri(tmp_path, web)
    assert ("/train-clean-5.tar.gz", "bytes=1000-") in RangeHandler.requests
    assert len(files.read_table(tmp_path / "train" / "wav.scp")) == 6


def test_download_that_ended_before_its_renaming(web, tmp_path):
    (tmp_path / "archives").mkdir()
    body = (web[2] / "train-clean-5.tar.gz").read_bytes()
    (tmp_path / "archives" / "train-clean-5.tar.gz.part").write_bytes(body)
    prepare_libri(tmp_path, web)
    assert len(files.read_table(tmp_path / "train" / "wav.scp")) == 6


def test_archives_fetched_by_hand_are_used(web, tmp_path):
    prepare_libri(tmp_path, web, archive_dir=web[2], url="http://127.0.0.1:1")
    assert not RangeHandler.requests and (tmp_path / "test" / "wav.scp").is_file()


def test_no_network_says_what_to_fetch_and_where_to_put_it(web, tmp_path):
    for url in ("http://127.0.0.1:1", web[0] + "/nowhere"):
        with pytest.raises(OSError) as error:
            prepare_libri(tmp_path, web, url=url)
        assert f"{url}/train-clean-5.tar.gz" in str(error.value)
        assert f"put it at {tmp_path / 'archives' / 'train-clean-5.tar.gz'}" in str(error.value)


def test_wrong_archives_are_refused(web, tmp_path):
    md5 = dict(web[1])
    archive = tmp_path / "train-clean-5.tar.gz"
    whole = (web[2] / archive.name).read_bytes()
    archive.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"train-clean-5.tar.gz: md5 .* incomplete or another"):
        prepare_libri(tmp_path / "out", web, archive_dir=tmp_path)
    md5["train-clean-5"] = hashlib.md5(whole[:-100]).hexdigest()
    with pytest.raises(ValueError, match=r"train-clean-5.tar.gz: .*delete it"):
        prepare_libri(tmp_path / "out", web, archive_dir=tmp_path, md5=md5)
    archive.write_bytes((web[2] / "dev-clean-2.tar.gz").read_bytes())
    md5["train-clean-5"] = md5["dev-clean-2"]
    with pytest.raises(ValueError, match="holds no folder LibriSpeech/train-clean-5"):
        prepare_libri(tmp_path / "out", web, archive_dir=tmp_path, md5=md5)
    assert not list((tmp_path / "out").rglob("*.*"))


def test_archive_that_reaches_outside_is_refused(web, tmp_path):
    archive = tmp_path / "train-clean-5.tar.gz"
    evil = tmp_path / "evil.txt"
    evil.write_text("evil")
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(evil, "../../../escaped.txt")
    md5 = {"train-clean-5": hashlib.md5(archive.read_bytes()).hexdigest()}
    with pytest.raises(ValueError, match=r"escaped\.txt"):
        prepare_libri(tmp_path / "a" / "b" / "out", web, archive_dir=tmp_path, md5=md5)
    assert not list(tmp_path.rglob("escaped.txt"))


# -------------------------------------------------------------------------------------- commands


@pytest.mark.parametrize("name", ["make_demo", "prepare_data", "prepare_minilibrispeech"])
def test_scripts_show_an_example_and_fail_in_one_line(name, tmp_path):
    script = [sys.executable, str(LOCAL / f"{name}.py")]
    shown = subprocess.run([*script, "--help"], capture_output=True, text=True)
    assert shown.returncode == 0 and f"python recipes/mini/local/{name}.py " in shown.stdout
    (tmp_path / "file").write_text("")
    bad = {
        "make_demo": [str(tmp_path / "file"), "--num_speakers", "10"],
        "prepare_data": [str(tmp_path / "nowhere"), str(tmp_path / "out")],
        "prepare_minilibrispeech": [str(tmp_path / "out"), "--url", "http://127.0.0.1:1"],
    }
    failed = subprocess.run([*script, *bad[name]], capture_output=True, text=True)
    assert failed.returncode == 1 and failed.stderr.startswith(f"{name}.py: ")
    assert len(failed.stderr.strip().splitlines()) == 1
