"""Make a tiny, randomly initialised WavLM or w2v-BERT in the layout of the released ones.

For tests, and to run a recipe end to end where the pretrained weights are not: it hears 16 kHz and
gives a frame every 20 ms, like them.
"""

import argparse
import sys
from pathlib import Path

import torch
import transformers

from wespeaker_qmargin.tensors import write_tensors
from wespeaker_qmargin.wavlm_original import original_names


def make_wavlm(
    folder,
    *,
    layers: int = 2,
    dim: int = 32,
    heads: int = 4,
    conv_dim: int = 16,
    norm: str = "group",
    seed: int = 0,
    original=None,
) -> int:
    """Write a WavLM to ``folder`` as save_pretrained does; return its number of parameters.

    Args:
        norm: of its CNN; ``group`` as in Base and Base+, ``layer`` as in Large, which also puts
            layer norms first and hears normalised waves.
        original: write the same network to this file too, in the layout of ``WavLM-Base+.pt``.
    """
    large = norm == "layer"
    config = transformers.WavLMConfig(
        hidden_size=dim,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * dim,
        initializer_range=dim**-0.5,
        conv_dim=(conv_dim,) * 7,
        feat_extract_norm=norm,
        do_stable_layer_norm=large,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        num_buckets=32,
        max_bucket_distance=80,
    )
    model = _build(transformers.WavLMModel, config, seed)
    model.save_pretrained(folder)
    extractor = transformers.Wav2Vec2FeatureExtractor(
        do_normalize=large, return_attention_mask=large
    )
    extractor.save_pretrained(folder)
    if original is not None:
        cfg = _original_cfg(config, large)
        write_tensors(original, {"cfg": cfg, "model": _original(model)})
    return model.num_parameters()


def make_w2vbert(folder, *, layers: int = 2, dim: int = 32, heads: int = 4, seed: int = 0) -> int:
    """Write a w2v-BERT to ``folder`` as save_pretrained does; return its number of parameters."""
    config = transformers.Wav2Vec2BertConfig(
        hidden_size=dim,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * dim,
        initializer_range=dim**-0.5,
    )
    model = _build(transformers.Wav2Vec2BertModel, config, seed)
    model.save_pretrained(folder)
    transformers.SeamlessM4TFeatureExtractor().save_pretrained(folder)
    return model.num_parameters()


def _build(model_class, config, seed: int):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        # biases 0 and scales 1 would hide a tensor that was misplaced
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def _original(model) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    renamed = {theirs: state[ours] for theirs, ours in original_names(model.config).items()}
    return {**renamed, "mask_emb": state["masked_spec_embed"]}


def _original_cfg(config, large: bool) -> dict:
    convs = zip(config.conv_dim, config.conv_kernel, config.conv_stride)
    return {
        "extractor_mode": "layer_norm" if large else "default",
        "encoder_layers": config.num_hidden_layers,
        "encoder_embed_dim": config.hidden_size,
        "encoder_ffn_embed_dim": config.intermediate_size,
        "encoder_attention_heads": config.num_attention_heads,
        "activation_fn": config.hidden_act,
        "layer_norm_first": large,
        "conv_feature_layers": " + ".join(f"[({d},{k},{s})]" for d, k, s in convs),
        "conv_bias": config.conv_bias,
        "feature_grad_mult": 1.0,
        "normalize": large,
        "dropout": config.hidden_dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.activation_dropout,
        "encoder_layerdrop": config.layerdrop,
        "dropout_input": config.feat_proj_dropout,
        "dropout_features": 0.0,
        "conv_pos": config.num_conv_pos_embeddings,
        "conv_pos_groups": config.num_conv_pos_embedding_groups,
        "relative_position_embedding": True,
        "num_buckets": config.num_buckets,
        "max_distance": config.max_bucket_distance,
        "gru_rel_pos": True,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python tools/make_tiny_encoder.py wavlm exp/tiny_wavlm --layers 3",
    )
    parser.add_argument("kind", choices=("wavlm", "w2vbert"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=2, help="transformer layers [2]")
    parser.add_argument("--dim", type=int, default=32, help="of the hidden states [32]")
    parser.add_argument("--heads", type=int, default=4, help="attention heads [4]")
    parser.add_argument("--seed", type=int, default=0)
    wavlm = parser.add_argument_group("wavlm only")
    wavlm.add_argument("--conv_dim", type=int, help="channels of the CNN [16]")
    wavlm.add_argument("--norm", choices=("group", "layer"), help="as Base+, or as Large [group]")
    wavlm.add_argument("--original", help="write WavLM-Base+.pt's layout too, to this file")
    transformers.utils.logging.disable_progress_bar()
    given = {k: v for k, v in vars(parser.parse_args()).items() if v is not None}
    make = {"wavlm": make_wavlm, "w2vbert": make_w2vbert}[given.pop("kind")]
    try:
        count = make(**given)
    except (TypeError, ValueError, OSError) as error:
        print(f"make_tiny_encoder: error: {error}", file=sys.stderr)
        return 1
    print(f"{count} parameters", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
