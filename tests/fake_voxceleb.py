"""VoxCeleb, MUSAN and RIRS_NOISES in the archives' exact layout, with other voices in them."""

import gzip
import hashlib
import io
import json
import subprocess
import tarfile
import tempfile
import zipfile
from itertools import combinations
from pathlib import Path

import numpy as np
import soundfile
from conftest import voice

from wespeaker_qmargin.files import read_table

FIRST_ID = {"vox1_dev": 10269, "vox1_test": 10270, "vox2_dev": 12}
NOISES = ("music/fma/music-fma", "noise/free-sound/noise-free-sound", "speech/us-gov/speech-us-gov")


def synthetic_voices(*, dev=3, test=4, vox2=5, takes=4) -> dict[str, list[list[np.ndarray]]]:
    """Return set -> speakers -> waveforms."""
    counts = {"vox1_dev": dev, "vox1_test": test, "vox2_dev": vox2}
    return {
        name: [
            [voice(FIRST_ID[name] + s, t, 0.5 + 0.3 * (t % 3)) for t in range(takes)]
            for s in range(count)
        ]
        for name, count in counts.items()
    }


def minivox_voices(minivox: Path, *, dev=3, test=4, vox2=5, takes=4, seconds=4.0):
    """Return the same from minivox: the two dev sets from its training, test from its test part.

    Common Voice only: there a network that knows nothing leaves room to learn.
    """
    voices = {"vox1_dev": ("train", 0, dev), "vox2_dev": ("train", dev, dev + vox2)}
    voices["vox1_test"] = ("test", 0, test)
    return {name: _read(minivox, *where, takes, seconds) for name, where in voices.items()}


def _read(minivox: Path, part: str, start: int, stop: int, takes: int, seconds: float):
    wavs, utts = read_table(minivox / part / "wav.scp"), {}
    for utt, speaker in read_table(minivox / part / "utt2spk").items():
        if speaker.startswith("cv-"):
            utts.setdefault(speaker, []).append(utt)
    speakers = [speaker for speaker in sorted(utts) if len(utts[speaker]) >= takes][start:stop]
    frames = round(16000 * seconds)
    return [
        [
            soundfile.read(minivox / wavs[utt], frames=frames, dtype="float32")[0]
            for utt in utts[speaker][:takes]
        ]
        for speaker in speakers
    ]


def write_archives(folder: Path, voices, *, ffmpeg: str | None) -> dict:
    """Write every file that is downloaded, and expected.json; return what is in that.

    Without ffmpeg VoxCeleb2 is left out. Lists: O has all pairs of test utterances that share a
    speaker, and as many others; E and H so of all utterances of VoxCeleb1.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tables = {name: utterances(name, speakers) for name, speakers in voices.items()}
    expected = {name: _count(table) for name, table in tables.items()}
    wavs = {name: {f"wav/{k}": wav_bytes(v) for k, v in t.items()} for name, t in tables.items()}
    write_parts(folder / "vox1_dev_wav_part", make_zip(wavs["vox1_dev"]), 4)
    (folder / "vox1_test_wav.zip").write_bytes(make_zip(wavs["vox1_test"]))
    del expected["vox2_dev"]["hours"]  # an old ffmpeg (4.2) keeps the padding: 4 % here
    if ffmpeg is None:
        del expected["vox2_dev"]
    else:
        m4a = encode_m4a(wavs["vox2_dev"], ffmpeg)
        renamed = {f"dev/aac/{name[4:-4]}.m4a": data for name, data in m4a.items()}
        write_parts(folder / "vox2_dev_aac_part", make_zip(renamed), 8)
    expected["musan"], expected["rirs"] = _write_musan(folder), _write_rirs(folder)
    test, both = tables["vox1_test"], tables["vox1_dev"] | tables["vox1_test"]
    for name, file, utts in (
        ("vox1_O", "veri_test2.txt", test),
        ("vox1_E", "list_test_all2.txt", both),
        ("vox1_H", "list_test_hard2.txt", dict(list(both.items())[::2])),
    ):
        expected[name] = _write_list(folder / file, sorted(utts))
    expected["md5"] = {
        path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())
    }
    (folder / "expected.json").write_text(json.dumps(expected))
    return expected


def utterances(name: str, speakers) -> dict[str, np.ndarray]:
    """Return key -> waveform; two utterances a video."""
    table = {}
    for number, takes in enumerate(speakers):
        for take, wav in enumerate(takes):
            video = hashlib.md5(f"{name} {number} {take // 2}".encode()).hexdigest()[:10]
            table[f"{_speaker(name, number)}/-{video}/{take % 2 + 1:05d}.wav"] = wav
    return table


def _speaker(name: str, number: int) -> str:
    # the dev speakers of VoxCeleb1 lie on both sides of its test speakers, id10270 to id10309
    return f"id{FIRST_ID[name] + number + 40 * (name == 'vox1_dev' and number > 0):05d}"


def _count(table) -> dict[str, float]:
    hours = sum(map(len, table.values())) / 16000 / 3600
    return {"speakers": len({k[:7] for k in table}), "utterances": len(table), "hours": hours}


def wav_bytes(wav: np.ndarray, rate: int = 16000) -> bytes:
    stream = io.BytesIO()
    soundfile.write(stream, wav, rate, format="WAV")
    return stream.getvalue()


def make_zip(contents: dict[str, bytes]) -> bytes:
    """Return a zip that also has entries for its folders, as the real ones do."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for parent in sorted({str(Path(name).parent) for name in contents}):
            archive.writestr(f"{parent}/", b"")
        for name, data in contents.items():
            archive.writestr(name, data)
    return stream.getvalue()


def write_parts(stem: Path, data: bytes, number: int) -> None:
    """Write aa, ab, ...: pieces of equal size, the last one smaller, as ``split -b`` makes them."""
    size = -(-len(data) // number)
    for i in range(number):
        stem.with_name(f"{stem.name}a{'abcdefgh'[i]}").write_bytes(data[i * size : (i + 1) * size])


def encode_m4a(wavs: dict[str, bytes], ffmpeg: str, *options: str) -> dict[str, bytes]:
    """Return the files as AAC in MPEG-4."""
    with tempfile.TemporaryDirectory() as temporary:
        command = [ffmpeg, "-nostdin", "-v", "error"]
        for i, data in enumerate(wavs.values()):
            Path(temporary, f"{i}.wav").write_bytes(data)
            command += ["-i", f"{temporary}/{i}.wav"]
        for i in range(len(wavs)):
            command += ["-map", str(i), "-c:a", "aac", "-b:a", "64k", *options]
            command += [f"{temporary}/{i}.m4a"]
        subprocess.run(command, check=True)
        return {name: Path(temporary, f"{i}.m4a").read_bytes() for i, name in enumerate(wavs)}


def _write_musan(folder: Path) -> dict[str, float]:
    rng = np.random.default_rng(0)
    contents = {"musan/README": b"noise", "musan/noise/free-sound/LICENSE": b"none"}
    for stem in NOISES:
        for i in range(2):
            noise = 0.1 * rng.standard_normal(16000 + 4000 * i)
            contents[f"musan/{stem}-{i:04d}.wav"] = wav_bytes(noise)
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, data in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    (folder / "musan.tar.gz").write_bytes(gzip.compress(stream.getvalue(), mtime=0))
    return {"utterances": 6, "hours": 3 * 36000 / 16000 / 3600}


def _write_rirs(folder: Path) -> dict[str, float]:
    rng = np.random.default_rng(1)
    contents = {"RIRS_NOISES/README": b"rooms", "RIRS_NOISES/pointsource_noises/x.wav": b"no"}
    for size in ("small", "medium", "large"):
        root = f"RIRS_NOISES/simulated_rirs/{size}room"
        contents[f"{root}/rir_list"] = b"a list"
        for room in ("Room001", "Room002"):
            response = rng.standard_normal(4000) * np.exp(-np.arange(4000) / 500)
            contents[f"{root}/{room}/{room}-00001.wav"] = wav_bytes(0.2 * response)
    (folder / "rirs_noises.zip").write_bytes(make_zip(contents))
    return {"utterances": 6}


def _write_list(path: Path, utts: list[str]) -> dict[str, int]:
    pairs = list(combinations(utts, 2))
    same = [pair for pair in pairs if pair[0][:7] == pair[1][:7]]
    other = [pair for pair in pairs if pair[0][:7] != pair[1][:7]][
        :: max(1, len(pairs) // len(same))
    ]
    lines = [f"1 {a} {b}\n" for a, b in same] + [f"0 {a} {b}\n" for a, b in other]
    path.write_text("".join(lines))
    return {"trials": len(lines), "targets": len(same)}
