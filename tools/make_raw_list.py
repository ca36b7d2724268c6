"""Write a WeSpeaker raw list: one JSON object {"key", "spk", "wav"} a line."""

import argparse
import json
import sys

from wespeaker_qmargin.files import write_text
from wespeaker_qmargin.lists import read_utterances


def make_raw_list(wav_scp, utt2spk, raw_list) -> int:
    """Write ``raw_list`` from a wav.scp and a utt2spk with the same keys; return how many lines."""
    lines = [
        json.dumps({"key": u.key, "spk": u.spk, "wav": u.source}, ensure_ascii=False) + "\n"
        for u in read_utterances("kaldi", wav_scp, utt2spk)
    ]
    write_text(raw_list, "".join(lines))
    return len(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python tools/make_raw_list.py train/wav.scp train/utt2spk train/raw.list",
    )
    for name in ("wav_scp", "utt2spk", "raw_list"):
        parser.add_argument(name)
    try:
        count = make_raw_list(**vars(parser.parse_args()))
    except (ValueError, OSError) as error:
        print(f"make_raw_list: error: {error}", file=sys.stderr)
        return 1
    print(f"{count} utterances", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
