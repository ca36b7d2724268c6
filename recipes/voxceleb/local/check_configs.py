"""Check configs, with the files that they are based on, before anything is prepared for them."""

import argparse
import sys

from wespeaker_qmargin.config import load_config

EXAMPLE = """example:
  python recipes/voxceleb/local/check_configs.py conf/voxceleb/resnet34/cosface_m02.yaml
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="+", help="YAML of a run")
    for path in parser.parse_args().config:
        try:
            load_config(path, check_paths=False)
        except (OSError, ValueError) as error:
            sys.exit(f"check_configs.py: {path}: {error}")


if __name__ == "__main__":
    main()
