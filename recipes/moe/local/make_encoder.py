"""Make the study's encoder: a small untrained WavLM whose CNN begins as a filter bank.

The released encoders learn their CNN from tens of thousands of hours. Two hours teach a random one
nothing, so the first layer begins as 48 mel-spaced bands of 25 ms every 10 ms at four phases, the
second as the sum of a band's rectified phases over two frames: magnitudes, every 20 ms.
"""

import argparse
import math
import sys
from pathlib import Path

import torch
import transformers

EXAMPLE = """example:
  python recipes/moe/local/make_encoder.py recipes/moe/exp/study/encoder
"""
RATE, WIDTH, STEP = 16000, 400, 160  # Hz, samples
BANDS, PHASES = 48, 4
LOW, HIGH = 80.0, 7600.0  # Hz


def make(folder, *, dim: int = 96, layers: int = 3, heads: int = 4, seed: int = 0) -> int:
    """Write the encoder as save_pretrained does; return its number of parameters."""
    torch.manual_seed(seed)
    config = transformers.WavLMConfig(
        hidden_size=dim,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * dim,
        initializer_range=dim**-0.5,
        conv_dim=(BANDS * PHASES, BANDS),
        conv_kernel=(WIDTH, 2),
        conv_stride=(STEP, 2),
        feat_extract_norm="layer",
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        num_buckets=32,
        max_bucket_distance=80,
    )
    model = transformers.WavLMModel(config)
    first, second = (layer.conv for layer in model.feature_extractor.conv_layers)
    with torch.no_grad():
        first.weight.copy_(filters()[:, None])
        second.weight.zero_()
        for band in range(BANDS):
            second.weight[band, band::BANDS] = 1 / math.sqrt(2 * PHASES)
    model.save_pretrained(folder)
    extractor = transformers.Wav2Vec2FeatureExtractor(
        do_normalize=False, return_attention_mask=False
    )
    extractor.save_pretrained(folder)
    return model.num_parameters()


def filters() -> torch.Tensor:
    """Return band-pass filters (phases x bands, 400) of unit energy, a phase's bands in turn."""
    ends = [2595 * math.log10(1 + f / 700) for f in (LOW, HIGH)]
    centres = 700 * (10 ** (torch.linspace(*ends, BANDS) / 2595) - 1)
    time = (torch.arange(WIDTH) - WIDTH / 2) / RATE
    window = torch.hann_window(WIDTH)
    phases = torch.arange(PHASES) * 2 * math.pi / PHASES
    waves = torch.cos(2 * math.pi * centres[None, :, None] * time + phases[:, None, None])
    waves = (window * waves).flatten(0, 1)
    return waves / waves.norm(dim=1, keepdim=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dim", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    args = parser.parse_args()
    if args.dim % 4:
        sys.exit(f"make_encoder.py: --dim: expected a multiple of 4 heads, got {args.dim}")
    print(f"{make(args.folder, dim=args.dim, layers=args.layers)} parameters")


if __name__ == "__main__":
    main()
