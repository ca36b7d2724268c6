"""Write a trained model as a folder that is ready for use: stage 8 of the VoxCeleb recipes.

OUT_DIR gets avg_model.pt, config.yaml (without what only training needs) and speakers.txt (the
names of the head's rows). WeSpeaker's load_model takes such a folder; for frontend: wavlm call
wespeaker_qmargin.register() first. Low-rank updates (LoRA) are added to the encoder's weights.
"""

import argparse
import copy
import shutil
import sys
from pathlib import Path

import torch
import yaml

from wespeaker_qmargin.checkpoints import find_checkpoint, read_checkpoint
from wespeaker_qmargin.config import Config, load_config, to_dict
from wespeaker_qmargin.files import write_text
from wespeaker_qmargin.model import SpeakerNet, full_state, load_checkpoint
from wespeaker_qmargin.tensors import write_tensors

EXAMPLE = """example:
  python recipes/voxceleb/local/export_model.py exp/resnet34 exp/resnet34/export
"""
# options of our front-ends that WeSpeaker's do not have
TRAINING_ONLY = ("layer_drop", "grad_mult", "gradient_checkpointing", "freeze_cnn")


def export_model(exp_dir, out_dir) -> Path:
    """Write ``out_dir`` from ``exp_dir``, whose models are averaged; return it.

    Raises:
        FileNotFoundError: no config.yaml, or no averaged model.
    """
    exp_dir, out_dir = Path(exp_dir), Path(out_dir)
    config = load_config(exp_dir / "config.yaml", check_paths=False)
    checkpoint = find_checkpoint(exp_dir, "avg")
    options = getattr(config.dataset_args, f"{config.dataset_args.frontend}_args") or {}
    if options.get("use_lora"):
        state = _merged(config, checkpoint)
        options = {**options, "use_lora": False, "lora_config_args": None}
    else:
        state = read_checkpoint(checkpoint)
    options = {key: value for key, value in options.items() if key not in TRAINING_ONLY}
    write_tensors(out_dir / "avg_model.pt", state)
    write_text(out_dir / "config.yaml", _content(config, options))
    shutil.copyfile(exp_dir / "speakers.txt", out_dir / "speakers.txt")
    return out_dir


def _merged(config: Config, checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the checkpoint with the low-rank updates in the encoder's own weights."""
    net = SpeakerNet(config)
    load_checkpoint(net, checkpoint, head=False)
    net.frontend.merge_lora()
    head = {k: v for k, v in read_checkpoint(checkpoint).items() if k.startswith("projection.")}
    return {**full_state(net), **head}


def _content(config: Config, options: dict) -> str:
    content = copy.deepcopy(to_dict(config))
    content["dataset_args"][f"{config.dataset_args.frontend}_args"] = options
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("exp_dir", help="experiment: config.yaml, models/avg_model.pt")
    parser.add_argument("out_dir", help="gets the folder's files")
    try:
        print(export_model(**vars(parser.parse_args())))
    except (OSError, ValueError, ImportError) as error:
        sys.exit(f"export_model.py: {error}")


if __name__ == "__main__":
    main()
