"""The VoxCeleb recipes' data: archives in their exact layout to Kaldi folders, then to shards."""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import soundfile
from conftest import ROOT, voice
from fake_voxceleb import (
    encode_m4a,
    make_zip,
    minivox_voices,
    synthetic_voices,
    utterances,
    wav_bytes,
    write_archives,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from wespeaker_qmargin import files
from wespeaker_qmargin.audio import load_audio
from wespeaker_qmargin.augment import AudioSource, Augmenter
from wespeaker_qmargin.lists import read_utterances

LOCAL = ROOT / "recipes" / "voxceleb" / "local"
sys.path[:0] = [str(LOCAL), str(ROOT / "tools")]

import convert_m4a  # noqa: E402
import downloads  # noqa: E402
import kaldi_folder  # noqa: E402
import make_raw_list  # noqa: E402
import make_shards  # noqa: E402
import make_trials  # noqa: E402
import measure  # noqa: E402
import prepare_voxceleb  # noqa: E402
import unpack  # noqa: E402
from prepare_voxceleb import Plan, prepare  # noqa: E402

try:
    FFMPEG = convert_m4a.find_ffmpeg()
except FileNotFoundError:
    FFMPEG = None
needs_ffmpeg = pytest.mark.skipif(FFMPEG is None, reason="needs ffmpeg (or imageio-ffmpeg)")
SETS = tuple(s for s in prepare_voxceleb.SETS if FFMPEG or s != "vox2_dev")
VOX1 = ("vox1_dev", "vox1_test")
AUDIO = (*VOX1, "vox2_dev")


@pytest.fixture(scope="module")
def archives(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("down loads") / "download_data"
    write_archives(folder, synthetic_voices(), ffmpeg=FFMPEG)
    return folder


def plan_of(out: Path, archives: Path, **changes) -> Plan:
    expected = changes.pop("expected", None)
    if expected is None:
        expected = downloads.read_expected(str(archives / "expected.json"))
    return Plan(out, archives, out / "raw_data", expected=expected, ffmpeg=FFMPEG, **changes)


@pytest.fixture(scope="module")
def prepared(archives, tmp_path_factory) -> Path:
    """Everything, made by the command."""
    out = tmp_path_factory.mktemp("prepared") / "data"
    command = [LOCAL / "prepare_voxceleb.py", out, "--download_dir", archives, "--jobs", "2"]
    command += ["--expect", archives / "expected.json", "--sets", *SETS]
    command += ["--ffmpeg", FFMPEG] if FFMPEG else []
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "vox1_dev: 3 speakers, 12 utterances, " in done.stdout
    return out


@pytest.fixture
def own(archives, tmp_path) -> Path:
    """A copy of the archives to damage."""
    return Path(shutil.copytree(archives, tmp_path / "own"))


@pytest.fixture
def call(monkeypatch, capsys):
    """Return a function that runs a command in this process: (exit status, stdout, stderr)."""

    def call(module, *words) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [module.__file__, *map(str, words)])
        try:
            status = module.main() or 0
        except SystemExit as stop:
            status = stop.code or 0
        out, err = capsys.readouterr()
        return (1, out, f"{err}{status}\n") if isinstance(status, str) else (status, out, err)

    return call


def stamps(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.is_file()
    }


def zip_contents(archives: Path, stem: str) -> dict[str, bytes]:
    """Read an archive as a user would: cat, then unzip."""
    joined = archives.parent / "joined.zip"
    joined.write_bytes(b"".join(p.read_bytes() for p in sorted(archives.glob(f"{stem}*"))))
    with zipfile.ZipFile(joined) as archive:
        return {n: archive.read(n) for n in archive.namelist() if not n.endswith("/")}


# ------------------------------------------------------------------------------- all of stage 1


def test_voxceleb1_is_what_was_in_the_archives(archives, prepared):
    for name, stem in (("vox1_dev", "vox1_dev_wav_part"), ("vox1_test", "vox1_test_wav.zip")):
        wavs = files.read_table(prepared / name / "wav.scp")
        contents = zip_contents(archives, stem)
        assert list(wavs) == sorted(key.removeprefix("wav/") for key in contents)
        for key, path in wavs.items():
            assert Path(path).is_absolute()
            digest = hashlib.sha256(Path(path).read_bytes()).digest()
            assert digest == hashlib.sha256(contents[f"wav/{key}"]).digest()


def test_kaldi_files_agree(prepared):
    for name in (*(s for s in AUDIO if s in SETS), "vox1"):
        wavs, speakers, by_speaker, seconds = (
            files.read_table(prepared / name / file)
            for file in ("wav.scp", "utt2spk", "spk2utt", "utt2dur")
        )
        assert list(wavs) == list(speakers) == list(seconds) == sorted(wavs)
        assert all(key.startswith(f"{speaker}/") for key, speaker in speakers.items())
        assert [k for keys in by_speaker.values() for k in keys.split()] == list(wavs)
        assert all(speakers[k] == s for s, keys in by_speaker.items() for k in keys.split())
        for key, path in wavs.items():
            assert float(seconds[key]) == pytest.approx(soundfile.info(path).duration, abs=1e-4)
    both = [files.read_table(prepared / name / "wav.scp") for name in (*VOX1, "vox1")]
    assert both[0] | both[1] == both[2] and len(both[2]) == 28


@needs_ffmpeg
def test_voxceleb2_is_decoded(prepared):
    wavs = files.read_table(prepared / "vox2_dev" / "wav.scp")
    assert len(wavs) == 20
    originals = utterances("vox2_dev", synthetic_voices()["vox2_dev"])
    assert wavs.keys() == originals.keys()
    for key, path in wavs.items():
        original = originals[key]
        assert path.endswith(f"raw_data/voxceleb2_wav/dev/aac/{key}")
        info = soundfile.info(path)
        assert (info.samplerate, info.channels, info.subtype) == (16000, 1, "PCM_16")
        decoded = soundfile.read(path, dtype="float32")[0]
        assert abs(len(decoded) - len(original)) <= 1024
        assert np.corrcoef(decoded[: len(original)], original[: len(decoded)])[0, 1] > 0.95


def test_noise_and_rooms_are_sources_of_augmentation(prepared, caplog):
    noise, rirs = AudioSource(prepared / "musan"), AudioSource(prepared / "rirs" / "wav.scp")
    assert noise.keys[2] == "noise/free-sound/noise-free-sound-0000.wav" and len(noise) == 6
    assert rirs.keys[0] == "largeroom/Room001/Room001-00001.wav" and len(rirs) == 6
    augmenter = Augmenter(noise, rirs, prob=1.0, sample_rate=16000)
    assert not caplog.records  # every key has a category with an SNR of its own
    for seed in range(10):
        out = augmenter(voice(0, 0), np.random.default_rng(seed))
        assert np.isfinite(out).all() and out.shape == voice(0, 0).shape


def test_trials_are_the_lists(archives, prepared):
    for name, source in downloads.LISTS.items():
        lines = (archives / source).read_text().splitlines()
        words = {"1": "target", "0": "nontarget"}
        expected = [f"{a} {b} {words[label]}" for label, a, b in map(str.split, lines)]
        assert (prepared / "trials" / f"{name}.trials").read_text().splitlines() == expected


def test_nothing_is_left_lying_about(prepared):
    names = [path.name for path in prepared.rglob(".*")]
    assert sorted(names) == [".done"] * len([s for s in SETS if s in downloads.CORPORA])
    assert not list(prepared.rglob("bad.list"))


def test_second_run_does_nothing(archives, prepared, monkeypatch):
    before = {
        k: v for k, v in stamps(prepared).items() if k.split("/")[0] not in ("vox1", "trials")
    }
    monkeypatch.setattr(prepare_voxceleb, "unpack", None)
    monkeypatch.setattr(prepare_voxceleb, "measure", None)
    found = prepare(plan_of(prepared, archives), SETS)
    assert found["vox1_test"]["utterances"] == 16 and found["vox1_O"]["targets"] == 24
    assert before.items() <= stamps(prepared).items()


def test_finished_sets_need_no_archives(archives, prepared, tmp_path):
    out = Path(shutil.copytree(prepared, tmp_path / "data"))
    shutil.rmtree(out / "raw_data" / "musan")
    plan = plan_of(out, tmp_path / "nothing", expected=plan_of(out, archives).expected)
    done = {s: json.loads((out / s / ".done").read_text()) for s in ("musan", "rirs")}
    for name, record in done.items():
        record["settings"]["tree"] = str(plan.tree(name))
        (out / name / ".done").write_text(json.dumps(record))
    assert prepare(plan, ["musan", "rirs"])["musan"]["utterances"] == 6
    (out / "musan" / ".done").unlink()
    with pytest.raises(FileNotFoundError, match="musan.tar.gz"):
        prepare(plan, ["musan", "rirs"])


def test_unpacked_trees_are_taken_where_they_are(archives, prepared, tmp_path):
    raw, out = prepared / "raw_data", tmp_path / "data"
    trees = {"vox1_dev": raw / "voxceleb1", "vox1_test": raw / "voxceleb1"}
    trees |= {"musan": raw / "musan", "rirs": raw / "RIRS_NOISES"}
    if FFMPEG:
        trees["vox2_dev"] = raw / "voxceleb2_wav"  # wav files already: nothing to convert
    before = stamps(raw)
    prepare(plan_of(out, archives, trees=trees), SETS)
    assert stamps(raw) == before and not (out / "raw_data").exists()
    for path in prepared.rglob("*"):
        if path.is_file() and "raw_data" not in path.parts and path.name != ".done":
            assert (out / path.relative_to(prepared)).read_text() == path.read_text()


@needs_ffmpeg
def test_joined_archives_in_the_names_that_people_give_them(archives, own, tmp_path):
    for stem, whole in (("vox1_dev_wav_part", "vox1_dev_wav"), ("vox2_dev_aac_part", "vox2_aac")):
        zip_contents(own, stem)
        for part in own.glob(f"{stem}*"):
            part.unlink()
        (own.parent / "joined.zip").rename(own / f"{whole}.zip")
    found = prepare(plan_of(tmp_path / "data", own), ["vox1_dev", "vox2_dev"])
    assert (found["vox1_dev"]["utterances"], found["vox2_dev"]["utterances"]) == (12, 20)


@needs_ffmpeg
def test_flac_has_the_same_keys_and_samples(archives, prepared, tmp_path):
    tree = {"vox2_dev": prepared / "raw_data" / "voxceleb2_m4a"}
    prepare(plan_of(tmp_path, archives, trees=tree, audio_format="flac"), ["vox2_dev"])
    assert not list((prepared / "raw_data").rglob("*.flac"))
    wavs, flacs = (files.read_table(f / "vox2_dev" / "wav.scp") for f in (prepared, tmp_path))
    wav_plan = plan_of(tmp_path, archives, trees=tree)  # the same folder: not done before
    assert prepare(wav_plan, ["vox2_dev"]) and (wav_plan.converted / "dev").is_dir()
    assert list(wavs) == list(flacs)
    for key, flac in flacs.items():
        assert flac.endswith(".flac") and soundfile.info(flac).subtype == "PCM_16"
        assert np.array_equal(soundfile.read(flac)[0], soundfile.read(wavs[key])[0])


@needs_ffmpeg
def test_m4a_files_may_go_once_they_are_converted(archives, prepared, tmp_path):
    out = Path(shutil.copytree(prepared, tmp_path / "data"))
    shutil.rmtree(out / "raw_data" / "voxceleb2_m4a")
    (out / "vox2_dev" / ".done").unlink()
    found = prepare(plan_of(out, tmp_path / "nothing", expected={}), ["vox2_dev"])
    assert found["vox2_dev"]["utterances"] == 20


@needs_ffmpeg
@pytest.mark.minivox
def test_real_speech(minivox, tmp_path):
    voices = minivox_voices(minivox, takes=3)
    write_archives(tmp_path / "down", voices, ffmpeg=FFMPEG)
    found = prepare(plan_of(tmp_path / "data", tmp_path / "down"))
    assert [found[name]["utterances"] for name in AUDIO] == [9, 12, 15]
    wavs = files.read_table(tmp_path / "data" / "vox2_dev" / "wav.scp")
    for key, original in utterances("vox2_dev", voices["vox2_dev"]).items():
        decoded = soundfile.read(wavs[key], dtype="float32")[0][: len(original)]
        error = decoded - original[: len(decoded)]
        assert 10 * np.log10(np.square(original).mean() / np.square(error).mean()) > 10  # dB


# ---------------------------------------------------------------------------------- interruptions


def test_interrupted_unpacking_goes_on(own, tmp_path, monkeypatch):
    plan, write, calls = plan_of(tmp_path, own), unpack._write, []

    def stop_at_the_fifth(*words):
        calls.append(words)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return write(*words)

    monkeypatch.setattr(unpack, "_write", stop_at_the_fifth)
    with pytest.raises(KeyboardInterrupt):
        prepare(plan, ["vox1_dev"])
    assert plan.unpacking("vox1_dev").is_file() and not (tmp_path / "vox1_dev").exists()
    before = {k: v for k, v in stamps(plan.raw_dir).items() if k.endswith(".wav")}
    assert 0 < len(before) < 12
    monkeypatch.setattr(unpack, "_write", write)
    checked = []
    monkeypatch.setattr(prepare_voxceleb, "check_md5", lambda path, _: checked.append(path.name))
    os.utime(own / "vox1_dev_wav_partab", (0, 0))
    monkeypatch.setattr(unpack, "_write", stop_at_the_fifth)
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        prepare(plan, ["vox1_dev"])
    assert len(checked) == 4  # another archive: looked at again
    monkeypatch.setattr(unpack, "_write", write)
    checked.clear()
    assert prepare(plan, ["vox1_dev"])["vox1_dev"]["utterances"] == 12
    assert before.items() <= stamps(plan.raw_dir).items() and not checked


@needs_ffmpeg
def test_interrupted_conversion_goes_on(archives, prepared, tmp_path, monkeypatch):
    tree = {"vox2_dev": prepared / "raw_data" / "voxceleb2_m4a"}
    plan, decode, calls = plan_of(tmp_path, archives, trees=tree), convert_m4a._decode, []

    def stop_in_the_second(ffmpeg, pairs):
        calls.append(pairs)
        if len(calls) == 2:
            for _, new in pairs:
                Path(convert_m4a._part(new)).write_bytes(b"half of a file")
            raise KeyboardInterrupt
        return decode(ffmpeg, pairs)

    monkeypatch.setattr(convert_m4a, "_decode", stop_in_the_second)
    with pytest.raises(KeyboardInterrupt):
        prepare(plan, ["vox2_dev"])
    before = {k: v for k, v in stamps(plan.converted).items() if not k.endswith(".part")}
    assert len(before) == 16
    assert prepare(plan, ["vox2_dev"])["vox2_dev"]["utterances"] == 20
    assert [len(pairs) for pairs in calls] == [16, 4, 4]
    assert before.items() <= stamps(plan.converted).items()
    assert not list(plan.converted.rglob("*.part"))


def test_failure_keeps_what_was_finished(own, tmp_path):
    good = (own / "vox1_test_wav.zip").read_bytes()
    (own / "vox1_test_wav.zip").write_bytes(good[:-1000])
    plan = plan_of(tmp_path, own)
    with pytest.raises(ValueError, match="vox1_test_wav.zip: md5 .* incomplete or another"):
        prepare(plan, [*VOX1, "vox1_O"])
    finished = stamps(tmp_path / "vox1_dev")
    assert ".done" in finished and not (tmp_path / "trials").exists()
    (own / "vox1_test_wav.zip").write_bytes(good)
    prepare(plan, [*VOX1, "vox1_O"])
    assert finished == stamps(tmp_path / "vox1_dev")


# ---------------------------------------------------------------------------------- bad archives


def test_everything_missing_is_told_at_once_and_nothing_is_done(own, tmp_path, call):
    for name in ("vox1_dev_wav_partac", "list_test_hard2.txt", "musan.tar.gz"):
        (own / name).unlink()
    out = tmp_path / "data"
    status, _, err = call(prepare_voxceleb, out, "--download_dir", own)
    assert status == 1 and not out.exists() and len(err.splitlines()) == 1
    for text in ("vox1_dev_wav_partac, ", "list_test_hard2.txt", "musan.tar.gz", "downloads.py"):
        assert text in err


@pytest.mark.parametrize(
    ("name", "corpus"),
    [
        ("vox1_test_wav.zip", "vox1_test"),
        ("vox1_dev_wav_partad", "vox1_dev"),
        ("musan.tar.gz", "musan"),
        ("rirs_noises.zip", "rirs"),
    ],
)
def test_half_an_archive(own, tmp_path, name, corpus):
    whole = (own / name).read_bytes()
    (own / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=f"{name}: md5 .*download it again"):
        prepare(plan_of(tmp_path, own), [corpus])
    with pytest.raises(ValueError, match=f"(?s){name}.*incomplete or broken; download it again"):
        prepare(plan_of(tmp_path, own, expected={}), [corpus])
    assert not (tmp_path / corpus).exists()
    (own / name).write_bytes(whole)
    assert prepare(plan_of(tmp_path, own), [corpus])[corpus]["left_out"] == 0


def test_damaged_zip_names_the_file(own, tmp_path):
    data = bytearray((own / "vox1_test_wav.zip").read_bytes())
    with zipfile.ZipFile(own / "vox1_test_wav.zip") as archive:
        member = [m for m in archive.infolist() if not m.is_dir()][3]
    middle = member.header_offset + member.compress_size // 2
    data[middle : middle + 20] = bytes(20)
    (own / "vox1_test_wav.zip").write_bytes(data)
    with pytest.raises(ValueError, match=f"vox1_test_wav.zip: .*({member.filename}|Error -3)"):
        prepare(plan_of(tmp_path, own, expected={}), ["vox1_test"])
    assert not (tmp_path / "raw_data" / "voxceleb1" / "test" / member.filename).exists()


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_archive_that_reaches_outside_is_refused(tmp_path, kind):
    archive = tmp_path / f"evil.{kind}"
    if kind == "zip":
        archive.write_bytes(make_zip({"wav/../../../escaped.wav": b"evil"}))
    else:
        (tmp_path / "evil").write_text("evil")
        with tarfile.open(archive, "w") as tar:
            tar.add(tmp_path / "evil", "../../escaped.wav")
    with pytest.raises(ValueError, match=r"evil\.\w+: .*escaped.wav: a path that leads out"):
        unpack.unpack([archive], tmp_path / "a" / "b")
    assert not list(tmp_path.rglob("escaped*"))


def test_another_corpus_in_an_archive_of_that_name(own, tmp_path):
    shutil.copy(own / "rirs_noises.zip", own / "vox1_test_wav.zip")
    with pytest.raises(ValueError, match="vox1_test: no audio in .*id10270/5r0dWxy17C8/00001.wav"):
        prepare(plan_of(tmp_path, own, expected={}), ["vox1_test"])
    shutil.copy(own / "rirs_noises.zip", own / "musan.tar.gz")
    with pytest.raises(ValueError, match="musan.tar.gz: holds no folder musan"):
        prepare(plan_of(tmp_path, own, expected={}), ["musan"])


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    reads=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=8),
)
def test_joined_files_read_as_one(tmp_path_factory, sizes, reads):
    folder = tmp_path_factory.mktemp("parts")
    data = bytes(range(sum(sizes)))
    paths, start = [folder / str(i) for i in range(len(sizes))], 0
    for path, size in zip(paths, sizes):
        path.write_bytes(data[start : start + size])
        start += size
    with unpack.JoinedFile(paths) as joined:
        assert joined.read() == data
        for position, count in reads:
            assert joined.seek(position) == position
            assert joined.read(count) == data[position : position + count]
        assert joined.seek(-1, os.SEEK_END) == len(data) - 1 if data else True


# ------------------------------------------------------------------------------ counts and lists


@pytest.mark.parametrize(
    ("name", "what", "value", "message"),
    [
        ("vox1_dev", "speakers", 1211, "3 speakers, expected 1211"),
        ("vox1_dev", "utterances", 13, "12 utterances, expected 13: it is incomplete"),
        ("vox1_dev", "hours", 340.4, "hours, expected 340.4"),
        ("rirs", "utterances", 60000, "RIRS_NOISES: 6 utterances"),
    ],
)
def test_other_counts_are_refused(archives, tmp_path, name, what, value, message):
    with pytest.raises(ValueError, match=message):
        prepare(plan_of(tmp_path, archives, expected={name: {what: value}}), [name])
    assert not (tmp_path / name).exists()
    assert prepare(plan_of(tmp_path, archives, expected={}), [name])[name][what] != value
    with pytest.raises(ValueError, match=message):  # what was done before does not hide it
        prepare(plan_of(tmp_path, archives, expected={name: {what: value}}), [name])
    assert not (tmp_path / name / ".done").exists()


def test_hours_may_differ_by_two_per_cent():
    downloads.check_counts("x", {"hours": 98.1}, {"hours": 100})
    for hours in (97.9, 102.1):
        with pytest.raises(ValueError, match=f"x: {hours} hours, expected 100"):
            downloads.check_counts("x", {"hours": hours}, {"hours": 100})


def test_other_lists_are_refused(own, prepared, tmp_path):
    trees = dict.fromkeys(VOX1, prepared / "raw_data" / "voxceleb1")
    o_list, sets = own / "veri_test2.txt", (*VOX1, "vox1_O")
    lines = o_list.read_text().splitlines(keepends=True)
    o_list.write_text("".join(lines[1:]))
    plan = plan_of(tmp_path, own, trees=trees)
    with pytest.raises(ValueError, match="veri_test2.txt: md5 "):
        prepare(plan, sets)
    expected = {key: value for key, value in plan.expected.items() if key != "md5"}
    plan = plan_of(tmp_path, own, trees=trees, expected=expected)
    with pytest.raises(ValueError, match=f"{len(lines) - 1} trials, expected {len(lines)}"):
        prepare(plan, sets)
    o_list.write_text("".join([lines[0].replace("1 ", "0 ", 1), *lines[1:]]))
    with pytest.raises(ValueError, match="23 targets, expected 24"):
        prepare(plan, sets)
    o_list.write_text("".join(lines).replace("id10270/", "id19999/"))
    with pytest.raises(ValueError, match="4 of 16 utterances are not in .*id19999.*E and H need"):
        prepare(plan, sets)
    assert not (tmp_path / "trials").exists() and (tmp_path / "vox1_test" / ".done").exists()


def test_lists_need_their_audio(archives, tmp_path):
    with pytest.raises(ValueError, match="vox1_O: .*add vox1_test to --sets"):
        prepare(plan_of(tmp_path, archives), ["vox1_O"])
    with pytest.raises(ValueError, match="vox1_E|list_test_all2.txt: 12 of 28 utterances"):
        prepare(plan_of(tmp_path, archives), ["vox1_test", "vox1_E"])
    assert (tmp_path / "trials").exists() is False


def test_list_without_labels(tmp_path):
    (tmp_path / "list").write_text("a b\nc d\n")
    with pytest.raises(ValueError, match="expected lines '1|0 enroll test'"):
        make_trials.make_trials(tmp_path / "list", tmp_path / "out")


def test_published_counts_and_files():
    expected = downloads.EXPECTED
    assert (expected["vox1_dev"]["speakers"], expected["vox1_dev"]["utterances"]) == (1211, 148642)
    assert (expected["vox2_dev"]["speakers"], expected["vox2_dev"]["utterances"]) == (5994, 1092009)
    assert [expected[f"vox1_{x}"]["trials"] for x in "OEH"] == [37611, 579818, 550894]
    names = {part for corpus in downloads.CORPORA.values() for part in corpus.parts + corpus.whole}
    assert names | set(downloads.LISTS.values()) == expected["md5"].keys() and len(names) == 18
    assert all(len(md5) == 32 for md5 in expected["md5"].values())


@pytest.mark.parametrize("text", ["[]", '{"vox3": {}}', '{"musan": {"files": 3}}', "{"])
def test_bad_expectations(tmp_path, text):
    (tmp_path / "expected.json").write_text(text)
    with pytest.raises(
        ValueError, match="expected.json: (not JSON|expected an object of vox1_dev)"
    ):
        downloads.read_expected(str(tmp_path / "expected.json"))


def test_what_to_download(own, call):
    (own / "vox1_dev_wav_partab").unlink()
    status, out, _ = call(downloads, own)
    lines = {line.split()[-4]: line for line in out.splitlines() if " md5 " in line}
    assert len(lines) == 18 and status == 0
    missing = {name for name, line in lines.items() if line.strip().startswith("to download")}
    assert missing - set(downloads.CORPORA["vox2_dev"].parts) == {"vox1_dev_wav_partab"}
    assert "e395d020928bc15670b570a21695ed96" in lines["vox1_dev_wav_partaa"]
    assert lines["musan.tar.gz"].endswith("https://www.openslr.org/resources/17/musan.tar.gz")
    status, _, err = call(downloads, own, "--check")  # they are not the true files
    assert status == 1 and "vox1_dev_wav_partaa: md5 " in err


# ------------------------------------------------------------------------------------- bad audio


def m4a_tree(folder: Path, number: int = 4) -> dict[str, Path]:
    wavs = {f"id00012/v/{i:05d}": wav_bytes(voice(i, 0, 3.0)) for i in range(number)}
    paths = {}
    for name, data in encode_m4a(wavs, FFMPEG, "-movflags", "+faststart").items():
        paths[f"{name}.wav"] = path = folder / "dev" / "aac" / f"{name}.m4a"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return paths


@needs_ffmpeg
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: b"", "moov atom not found|Invalid data"),
        (lambda data: b"not audio" * 50, "moov atom not found|Invalid data"),
        (lambda data: data[:300], "."),
        (lambda data: data[: len(data) // 2], r"it decodes to 1\.\d+ of 3\.\d+ s; .*partial file"),
    ],
)
def test_unreadable_m4a_is_named_and_the_others_are_converted(tmp_path, damage, reason):
    paths = m4a_tree(tmp_path / "tree")
    whole = paths["id00012/v/00002.wav"].read_bytes()
    paths["id00012/v/00002.wav"].write_bytes(damage(whole))
    plan = Plan(
        tmp_path / "data",
        tmp_path,
        tmp_path / "raw",
        trees={"vox2_dev": tmp_path / "tree"},
        expected={"vox2_dev": {"utterances": 4}},
        ffmpeg=FFMPEG,
    )
    named = rf"1 of 4 files cannot be used .*vox2_dev/bad.list\): id.*/00002.m4a: ({reason})"
    with pytest.raises(ValueError, match=f"{named}.*--skip_bad"):
        prepare(plan, ["vox2_dev"])
    assert len(list(plan.converted.rglob("*.*"))) == 3
    assert "00002.m4a" in (plan.out_dir / "vox2_dev" / "bad.list").read_text()
    skipping = Plan(**{**vars(plan), "skip_bad": True})
    found = prepare(skipping, ["vox2_dev"])["vox2_dev"]
    assert (found["utterances"], found["left_out"]) == (4, 1)
    assert len(files.read_table(plan.out_dir / "vox2_dev" / "wav.scp")) == 3
    (plan.out_dir / "vox2_dev" / ".done").unlink()
    paths["id00012/v/00002.wav"].write_bytes(whole)
    assert prepare(plan, ["vox2_dev"])["vox2_dev"]["left_out"] == 0
    assert len(files.read_table(plan.out_dir / "vox2_dev" / "wav.scp")) == 4
    assert not (plan.out_dir / "vox2_dev" / "bad.list").exists()


@needs_ffmpeg
def test_wav_beside_its_m4a_is_not_converted(tmp_path):
    paths = m4a_tree(tmp_path / "tree")
    done = paths["id00012/v/00001.wav"].with_suffix(".wav")
    done.write_bytes(wav_bytes(voice(9, 9)))
    found = measure.find_audio(measure.find_folders(tmp_path / "tree", measure.SPEAKERS))
    audio, bad = convert_m4a.convert_missing(found, tmp_path / "new", ffmpeg=FFMPEG)
    assert not bad and audio["id00012/v/00001.wav"] == str(done) and len(audio) == 4
    assert len(list((tmp_path / "new").rglob("*.wav"))) == 3


@needs_ffmpeg
def test_stereo_and_other_rates_become_16_khz_mono(tmp_path):
    t = np.arange(3 * 44100) / 44100
    stereo = 0.3 * np.stack([np.sin(2 * np.pi * 440 * t), np.sin(2 * np.pi * 440 * t)], axis=1)
    (m4a,) = encode_m4a({"a": wav_bytes(stereo, 44100)}, FFMPEG).values()
    (tmp_path / "a.m4a").write_bytes(m4a)
    new = str(tmp_path / "a.wav")
    assert convert_m4a.convert([(str(tmp_path / "a.m4a"), new)], ffmpeg=FFMPEG) == {}
    wav, rate = soundfile.read(new)
    assert rate == 16000 and wav.ndim == 1 and len(wav) / rate == pytest.approx(3, abs=0.06)
    spectrum = np.abs(np.fft.rfft(wav[8000:24000]))
    assert spectrum.argmax() == 440  # bins of 1 Hz


@needs_ffmpeg
def test_convert_command(tmp_path, call):
    paths = m4a_tree(tmp_path / "in", 3)
    paths["id00012/v/00000.wav"].write_bytes(b"no")
    words = [tmp_path / "in", tmp_path / "out", "--ffmpeg", FFMPEG, "--format", "flac"]
    status, out, _ = call(convert_m4a, *words)
    assert status == 1 and "2 converted, 0 were there, 1 bad" in out
    assert f"bad: {paths['id00012/v/00000.wav']}: " in out
    paths["id00012/v/00000.wav"].unlink()
    status, out, _ = call(convert_m4a, *words)
    assert status == 0 and "0 converted, 2 were there, 0 bad" in out
    assert len(list((tmp_path / "out" / "dev" / "aac").rglob("*.flac"))) == 2


def test_no_ffmpeg_says_how_to_get_one(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(FileNotFoundError, match="pip install imageio-ffmpeg.*--ffmpeg"):
        convert_m4a.find_ffmpeg()
    with pytest.raises(FileNotFoundError, match="nowhere/ffmpeg: no such program"):
        convert_m4a.find_ffmpeg("nowhere/ffmpeg")


def test_full_disk_stops_the_conversion(tmp_path):
    script = tmp_path / "ffmpeg"
    script.write_text(
        "#!/bin/sh\necho 'av_interleaved_write_frame(): No space left on device' >&2\nexit 1\n"
    )
    script.chmod(0o755)
    with pytest.raises(OSError, match="no space left on the disk; make room"):
        convert_m4a.convert([("a.m4a", str(tmp_path / "new" / "a.wav"))], ffmpeg=str(script))


def test_wav_files_that_cannot_be_used(archives, prepared, tmp_path):
    tree = Path(shutil.copytree(prepared / "raw_data" / "voxceleb1" / "test", tmp_path / "tree"))
    short, slow, empty, *_ = sorted(tree.rglob("*.wav"))
    short.write_bytes(short.read_bytes()[:-500])
    slow.write_bytes(wav_bytes(voice(0, 0), 8000))
    empty.write_bytes(b"")
    plan = plan_of(tmp_path / "data", archives, trees={"vox1_test": tree}, expected={})
    with pytest.raises(
        ValueError, match="3 of 16 files .*vox1_test/bad.list.*truncated.*8000 Hz.*empty"
    ):
        prepare(plan, ["vox1_test"])
    found = prepare(Plan(**{**vars(plan), "skip_bad": True}), ["vox1_test"])["vox1_test"]
    assert (found["utterances"], found["left_out"]) == (16, 3)
    assert len(files.read_table(tmp_path / "data" / "vox1_test" / "utt2spk")) == 13


def test_one_key_in_two_places(tmp_path):
    for root in ("a", "b"):
        path = tmp_path / root / "id10001" / "v" / "00001.wav"
        path.parent.mkdir(parents=True)
        path.write_bytes(wav_bytes(voice(0, 0)))
    with pytest.raises(ValueError, match="id10001/v/00001.wav is there twice: .*/a/.* and .*/b/"):
        measure.find_audio(measure.find_folders(tmp_path, measure.SPEAKERS))


def test_hidden_files_are_not_utterances(tmp_path):
    for name in ("v/00001.wav", "v/._00001.wav", ".v/00002.wav", "v/.00003.wav.part"):
        path = tmp_path / "id10001" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(wav_bytes(voice(0, 0)))
    found = measure.find_audio(measure.find_folders(tmp_path, measure.SPEAKERS))
    assert list(found.audio) == ["id10001/v/00001.wav"] and not found.m4a


def test_only_dev_of_voxceleb2_is_taken(tmp_path):
    for part, speaker in (("dev", "id00012"), ("test", "id00017")):
        path = tmp_path / "tree" / part / "aac" / speaker / "v" / "00001.wav"
        path.parent.mkdir(parents=True)
        path.write_bytes(wav_bytes(voice(0, 0)))
    trees = {"vox2_dev": tmp_path / "tree"}
    plan = Plan(tmp_path, tmp_path, tmp_path / "raw", trees=trees, expected={})
    prepare(plan, ["vox2_dev"])
    assert list(files.read_table(tmp_path / "vox2_dev" / "wav.scp")) == ["id00012/v/00001.wav"]


def test_join_and_measure_commands(prepared, tmp_path, call):
    folders = [prepared / name for name in VOX1]
    assert call(kaldi_folder, *folders, tmp_path / "both")[0] == 0
    for name in ("wav.scp", "utt2spk", "spk2utt", "utt2dur"):
        assert (tmp_path / "both" / name).read_text() == (prepared / "vox1" / name).read_text()
    assert kaldi_folder.join([folders[0]], tmp_path / "one") == 12
    status, out, _ = call(measure, prepared / "raw_data" / "voxceleb1")
    assert "28 files of 7 speakers" in out and status == 0


# ---------------------------------------------------------------------------------------- shards


def shards_of(folder: Path, out: Path, **options) -> list[Path]:
    source = folder / "vox1"
    make_shards.make_shards(
        source / "wav.scp", source / "utt2spk", out / "shards", out / "shard.list", **options
    )
    return [Path(line) for line in (out / "shard.list").read_text().splitlines()]


def test_shards_hold_the_utterances(prepared, tmp_path):
    shards = shards_of(prepared, tmp_path, num_utts_per_shard=10)
    assert [shard.name for shard in shards] == [f"shards_{i:09d}.tar" for i in range(3)]
    source = read_utterances("kaldi", prepared / "vox1")
    stored = read_utterances("shard", tmp_path / "shard.list", prepared / "vox1" / "utt2spk")
    assert [(u.key, u.spk) for u in stored] == [(u.key, u.spk) for u in source]
    for one, other in zip(stored, source):
        assert np.array_equal(load_audio(one, 16000), load_audio(other, 16000))
    with tarfile.open(shards[0]) as tar:
        names = tar.getnames()
        assert tar.extractfile(names[1]).read() == Path(source[0].source).read_bytes()
    assert len(names) == 20 and names[:2] == [f"{source[0].key}.spk", f"{source[0].key}.wav"]


def test_shards_are_a_function_of_the_lists_and_the_seed(prepared, tmp_path):
    shuffled = {"num_utts_per_shard": 10, "shuffle": True}
    one = shards_of(prepared, tmp_path / "1", **shuffled, seed=1)
    two = shards_of(prepared, tmp_path / "2", **shuffled, seed=1, jobs=2)
    other = shards_of(prepared, tmp_path / "3", **shuffled, seed=2)
    assert [p.read_bytes() for p in one] == [p.read_bytes() for p in two]
    assert all(a.read_bytes() != b.read_bytes() for a, b in zip(one, other))
    order = [u.key for u in read_utterances("kaldi", prepared / "vox1")]
    random.Random(1).shuffle(order)
    assert [u.key for u in read_utterances("shard", tmp_path / "1" / "shard.list")] == order


def test_only_missing_shards_are_written(prepared, tmp_path):
    shards = shards_of(prepared, tmp_path, num_utts_per_shard=10)
    before, data = stamps(tmp_path), shards[1].read_bytes()
    shards[1].unlink()
    shards_of(prepared, tmp_path, num_utts_per_shard=10)
    assert shards[1].read_bytes() == data
    after = stamps(tmp_path)
    changed = {name for name in before if after[name] != before[name]}
    assert not changed & {f"shards/{shards[0].name}", f"shards/{shards[2].name}"}


@pytest.mark.parametrize("change", [{"num_utts_per_shard": 9}, {"shuffle": True}])
def test_shards_of_something_else_are_not_mixed(prepared, tmp_path, change):
    shards_of(prepared, tmp_path, num_utts_per_shard=10)
    before = stamps(tmp_path)
    with pytest.raises(ValueError, match="holds shards_\\*.tar of other lists or options; remove"):
        shards_of(prepared, tmp_path, **{"num_utts_per_shard": 10, **change})
    assert stamps(tmp_path) == before
    shards_of(prepared, tmp_path, **change, prefix="other")
    (tmp_path / "shards" / "shards.json").unlink()
    with pytest.raises(ValueError, match="other lists or options"):
        shards_of(prepared, tmp_path, num_utts_per_shard=10)


def test_bad_file_is_named_and_the_other_shards_are_written(prepared, tmp_path):
    wavs = files.read_table(prepared / "vox1" / "wav.scp")
    keys = list(wavs)
    (tmp_path / "cut.wav").write_bytes(Path(wavs[keys[12]]).read_bytes()[:-300])
    wavs |= {keys[11]: str(tmp_path / "gone.wav"), keys[12]: str(tmp_path / "cut.wav")}
    (tmp_path / "vox1").mkdir()
    shutil.copy(prepared / "vox1" / "utt2spk", tmp_path / "vox1")
    scp = tmp_path / "vox1" / "wav.scp"
    scp.write_text("".join(f"{k} {v}\n" for k, v in wavs.items()))
    with pytest.raises(ValueError, match=f"2 utterances .*{keys[11]}.*gone.*{keys[12]}.*truncated"):
        shards_of(tmp_path, tmp_path, num_utts_per_shard=10)
    assert not (tmp_path / "shard.list").exists()
    assert sorted(p.name[-6:] for p in (tmp_path / "shards").glob("*.tar")) == ["00.tar", "02.tar"]
    scp.write_text(scp.read_text().replace("cut.wav", "cut.m4a"))
    with pytest.raises(ValueError, match="other lists"):
        shards_of(tmp_path, tmp_path, num_utts_per_shard=10)
    with pytest.raises(ValueError, match="cut.m4a: expected a file of wav, flac"):
        shards_of(tmp_path, tmp_path, num_utts_per_shard=10, prefix="new")


def test_shards_command(prepared, tmp_path, call):
    vox1 = prepared / "vox1"
    words = [vox1 / "wav.scp", vox1 / "utt2spk", tmp_path / "shards", tmp_path / "shard.list"]
    words += ["--shuffle", "--seed", "3", "--jobs", "2", "--num_utts_per_shard"]
    assert call(make_shards, *words, "20") == (0, "", "2 shards\n")
    status, _, err = call(make_shards, *words, "0")
    assert status == 1 and "expected 1 or more utterances" in err


def test_raw_list_of_the_same_folder(prepared, tmp_path):
    vox1 = prepared / "vox1"
    make_raw_list.make_raw_list(vox1 / "wav.scp", vox1 / "utt2spk", tmp_path / "list")
    assert read_utterances("raw", tmp_path / "list") == read_utterances("kaldi", vox1)


# -------------------------------------------------------------------------------------- commands


COMMANDS = (
    prepare_voxceleb,
    downloads,
    unpack,
    convert_m4a,
    measure,
    make_trials,
    kaldi_folder,
    make_shards,
)


def test_every_file_is_a_command_with_an_example(call):
    assert {Path(m.__file__).name for m in COMMANDS[:-1]} <= {p.name for p in LOCAL.glob("*.py")}
    for module in COMMANDS:
        status, out, _ = call(module, "--help")
        assert status == 0 and f"python {Path(module.__file__).relative_to(ROOT)} " in out


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (prepare_voxceleb, ["out", "--download_dir", "nowhere"]),
        (prepare_voxceleb, ["out", "--vox1", "nowhere"]),
        (prepare_voxceleb, ["out", "--expect", "nowhere"]),
        (unpack, ["nowhere.zip", "out"]),
        (convert_m4a, ["nowhere", "out"]),
        (measure, ["nowhere"]),
        (make_trials, ["nowhere", "out"]),
        (kaldi_folder, ["nowhere", "out"]),
    ],
)
def test_commands_fail_in_one_line(module, words, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = call(module, *words)
    assert status == 1 and out == "" and "nowhere" in err
    assert err.startswith(f"{Path(module.__file__).name}: ") and len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()
