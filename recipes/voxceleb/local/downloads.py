"""Say what the VoxCeleb recipes need to be downloaded, and what of it is there already.

Nothing is downloaded. VoxCeleb's audio is handed out on request by its authors, who then send a
link or a key (https://mm.kaist.ac.kr/datasets/voxceleb/); the addresses below are those the files
had at VGG. MUSAN, the impulse responses and the trial lists are free to fetch. Put everything, as
it is, into one folder; parts need not be joined.
"""

import argparse
import hashlib
import json
import logging
import sys
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger(__name__)

EXAMPLE = """example:
  python recipes/voxceleb/local/downloads.py data/download_data
"""
VGG = "https://www.robots.ox.ac.uk/~vgg/data/voxceleb/meta"
VGG_AUDIO = "https://thor.robots.ox.ac.uk/~vgg/data/voxceleb/vox1a"
OPENSLR = "https://www.openslr.org/resources"
BLOCK = 1 << 22
HOURS_TOLERANCE = 0.02  # an AAC frame more or less an utterance is 1 % of VoxCeleb2


class Corpus(NamedTuple):
    """A corpus as it is distributed, and where its folders come to lie.

    ``parts`` joined in this order are one archive; ``whole`` are the names that the joined file
    goes by. It is unpacked into ``target``, which makes ``root`` (both below the folder for
    unpacked corpora). Sizes are in GB (10^9 bytes) and rounded.
    """

    parts: tuple[str, ...]
    whole: tuple[str, ...]
    url: str
    target: str
    root: str
    archive_gb: float
    unpacked_gb: float


CORPORA = {
    "vox1_dev": Corpus(
        tuple(f"vox1_dev_wav_parta{letter}" for letter in "abcd"),
        ("vox1_dev_wav.zip",),
        VGG_AUDIO,
        "voxceleb1/dev",
        "voxceleb1/dev",
        33,
        39,
    ),
    "vox1_test": Corpus(
        ("vox1_test_wav.zip",), (), VGG_AUDIO, "voxceleb1/test", "voxceleb1/test", 1.1, 1.3
    ),
    "vox2_dev": Corpus(
        tuple(f"vox2_dev_aac_parta{letter}" for letter in "abcdefgh"),
        ("vox2_dev_aac.zip", "vox2_aac.zip"),
        VGG_AUDIO,
        "voxceleb2_m4a",
        "voxceleb2_m4a",
        77.5,
        78,
    ),
    "musan": Corpus(("musan.tar.gz",), (), f"{OPENSLR}/17", "", "musan", 11, 12.5),
    "rirs": Corpus(("rirs_noises.zip",), (), f"{OPENSLR}/28", "", "RIRS_NOISES", 1.3, 4),
}
LISTS = {
    "vox1_O": "veri_test2.txt",
    "vox1_E": "list_test_all2.txt",
    "vox1_H": "list_test_hard2.txt",
}
# published by VGG (counts) and by PaddleSpeech's VoxCeleb recipe (the same, hours, targets, MD5s);
# their hours add up to VGG's 352 and 2,442 for VoxCeleb1 and 2, test sets included
EXPECTED = {
    "vox1_dev": {"speakers": 1211, "utterances": 148642, "hours": 340.4},
    "vox1_test": {"speakers": 40, "utterances": 4874, "hours": 11.2},
    "vox2_dev": {"speakers": 5994, "utterances": 1092009, "hours": 2360.2},
    "musan": {"utterances": 2016},
    "rirs": {"utterances": 60000},
    "vox1_O": {"trials": 37611, "targets": 18802},
    "vox1_E": {"trials": 579818, "targets": 289921},
    "vox1_H": {"trials": 550894, "targets": 275488},
    "md5": {
        "vox1_dev_wav_partaa": "e395d020928bc15670b570a21695ed96",
        "vox1_dev_wav_partab": "bbfaaccefab65d82b21903e81a8a8020",
        "vox1_dev_wav_partac": "017d579a2a96a077f40042ec33e51512",
        "vox1_dev_wav_partad": "7bb1e9f70fddc7a678fa998ea8b3ba19",
        "vox1_dev_wav.zip": "ae63e55b951748cc486645f532ba230b",
        "vox1_test_wav.zip": "185fdc63c3c739954633d50379a3d102",
        "vox2_dev_aac_partaa": "da070494c573e5c0564b1d11c3b20577",
        "vox2_dev_aac_partab": "17fe6dab2b32b48abaf1676429cdd06f",
        "vox2_dev_aac_partac": "1de58e086c5edf63625af1cb6d831528",
        "vox2_dev_aac_partad": "5a043eb03e15c5a918ee6a52aad477f9",
        "vox2_dev_aac_partae": "cea401b624983e2d0b2a87fb5d59aa60",
        "vox2_dev_aac_partaf": "fc886d9ba90ab88e7880ee98effd6ae9",
        "vox2_dev_aac_partag": "d160ecc3f6ee3eed54d55349531cb42e",
        "vox2_dev_aac_partah": "6b84a81b9af72a9d9eecbb3b1f602e65",
        "vox2_dev_aac.zip": "bbc063c46078a602ca71605645c2a402",
        "vox2_aac.zip": "bbc063c46078a602ca71605645c2a402",
        "musan.tar.gz": "0c472d4fc0c5141eca47ad1ffeb2a7df",
        "rirs_noises.zip": "e6f48e257286e05de56413b4779d8ffb",
        "veri_test2.txt": "b73110731c9223c1461fe49cb48dddfc",
        "list_test_all2.txt": "a53e059deb562ffcfc092bf5d90d9f3a",
        "list_test_hard2.txt": "857790e09d579a68eb2e339a090343c8",
    },
}


def find_files(name: str, download_dir) -> tuple[list[Path], list[str]]:
    """Return (paths, missing names) of a corpus's archive or of a trial list.

    The paths are in the order in which they are joined: the parts, or one file where somebody
    joined them.
    """
    folder = Path(download_dir)
    if name in CORPORA:
        parts, whole = CORPORA[name].parts, CORPORA[name].whole
    else:
        parts, whole = (LISTS[name],), ()
    for other in whole:
        if (folder / other).is_file():
            return [folder / other], []
    return [folder / part for part in parts], [p for p in parts if not (folder / p).is_file()]


def check_md5(path: Path, md5: str) -> None:
    """Raise ValueError unless the file's MD5 is ``md5``."""
    logger.info("checking %s", path)
    digest = hashlib.md5()
    with open(path, "rb") as stream:
        while block := stream.read(BLOCK):
            digest.update(block)
    if digest.hexdigest() != md5:
        raise ValueError(
            f"{path}: md5 {digest.hexdigest()}, expected {md5}: the file ({path.stat().st_size} "
            "bytes) is incomplete or another one; download it again"
        )


def check_counts(where: str, found: dict[str, float], expected: dict[str, float]) -> None:
    """Raise ValueError unless ``found`` has the counts of ``expected`` (hours: to 2 %)."""
    for what, value in expected.items():
        tolerance = HOURS_TOLERANCE * value if what == "hours" else 0
        if abs(found[what] - value) > tolerance:
            raise ValueError(
                f"{where}: {found[what]:.8g} {what}, expected {value}: it is incomplete or another "
                "one than the published (--expect none takes any)"
            )


def read_expected(text: str) -> dict[str, dict]:
    """Return what ``official``, ``none`` or a JSON file in the form of EXPECTED stands for.

    Raises:
        FileNotFoundError: no such file.  ValueError: a file of another form.
    """
    if text in ("official", "none"):
        return EXPECTED if text == "official" else {}
    try:
        expected = json.loads(Path(text).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{text}: not JSON ({error})") from error
    sets, counts = EXPECTED.keys(), {key for name in CORPORA | LISTS for key in EXPECTED[name]}
    if (
        not isinstance(expected, dict)
        or not expected.keys() <= sets
        or not all(expected[name].keys() <= counts for name in expected.keys() - {"md5"})
    ):
        raise ValueError(
            f"{text}: expected an object of {', '.join(sets)}, each with some of "
            f"{', '.join(sorted(counts))} (md5: file names)"
        )
    return expected


def describe(download_dir) -> str:
    """Return a text that lists every file: whether it is there, its MD5 and its address."""
    lines = []
    for name in (*CORPORA, *LISTS):
        paths, missing = find_files(name, download_dir)
        title = name
        if name in CORPORA:
            corpus = CORPORA[name]
            title += f": about {corpus.archive_gb} GB, unpacked {corpus.unpacked_gb} GB"
        if name == "vox2_dev":
            title += ", and 272 GB more as wav (roughly 150 GB as flac)"
        lines.append(title)
        url = CORPORA[name].url if name in CORPORA else VGG
        for path in paths:
            state = "to download" if path.name in missing else "is there   "
            md5 = EXPECTED["md5"][path.name]
            lines.append(f"  {state}  {path.name:20}  md5 {md5}  {url}/{path.name}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("download_dir", help="where the files are, or will be")
    parser.add_argument(
        "--check", action="store_true", help="also compare the MD5 of what is there"
    )
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    print(f"into {args.download_dir}:\n{describe(args.download_dir)}")
    try:
        for name in (*CORPORA, *LISTS) if args.check else ():
            for path in filter(Path.is_file, find_files(name, args.download_dir)[0]):
                check_md5(path, EXPECTED["md5"][path.name])
    except (OSError, ValueError) as error:
        sys.exit(f"downloads.py: {error}")


if __name__ == "__main__":
    main()
