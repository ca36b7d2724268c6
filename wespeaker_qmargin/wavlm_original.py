"""The layout in which Microsoft released WavLM: ``WavLM-Base+.pt`` and its like."""

import re
from pathlib import Path

import torch
from torch import nn

from wespeaker_qmargin.ssl_weights import WITHOUT_PRETRAINING, first_line, require_transformers

_AFFINE = ("weight", "bias")


def load_original(path: str) -> tuple[nn.Module, bool]:
    """Return the encoder of Microsoft's ``WavLM-*.pt``, and whether it hears normalised waves.

    The file holds ``{"cfg": dict, "model": state dict}``; nothing in it is executed.

    Raises:
        ImportError: no package transformers.
        FileNotFoundError, ValueError: no such file; another layout; tensors missing, unknown or of
            another shape.
    """
    transformers = require_transformers(f"the encoder {path}")
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file; source: file needs the original WavLM-*.pt")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        config, state = _config(transformers, content["cfg"]), content["model"]
    except Exception as error:  # torch raises half a dozen kinds for damaged or foreign files
        raise ValueError(
            f"{path}: expected the original WavLM layout, {{'cfg': dict, 'model': tensors}}: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error
    names = original_names(config)
    wrong = names.keys() ^ (state.keys() - {"mask_emb"})
    if wrong:
        raise ValueError(
            f"{path}: {len(wrong)} tensors missing or unknown, {min(wrong)} the first; not the "
            "WavLM that its cfg describes"
        )
    with torch.device("meta"):  # neither draws random numbers nor fills memory twice
        encoder = transformers.WavLMModel(config)
    try:
        encoder.load_state_dict({ours: state[name] for name, ours in names.items()}, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{path}: its tensors do not fit its cfg: {error}") from error
    return encoder.float(), bool(content["cfg"]["normalize"])


def _config(transformers, cfg: dict):
    if not (cfg["relative_position_embedding"] and cfg["gru_rel_pos"]):
        raise ValueError("cfg without gated relative positions: not a WavLM")
    dims, kernels, strides = zip(*_conv_layers(cfg["conv_feature_layers"]))
    return transformers.WavLMConfig(
        hidden_size=cfg["encoder_embed_dim"],
        num_hidden_layers=cfg["encoder_layers"],
        num_attention_heads=cfg["encoder_attention_heads"],
        intermediate_size=cfg["encoder_ffn_embed_dim"],
        hidden_act=cfg["activation_fn"],
        hidden_dropout=cfg["dropout"],
        activation_dropout=cfg["activation_dropout"],
        attention_dropout=cfg["attention_dropout"],
        feat_proj_dropout=cfg["dropout_input"],
        feat_extract_norm={"default": "group", "layer_norm": "layer"}[cfg["extractor_mode"]],
        conv_dim=dims,
        conv_kernel=kernels,
        conv_stride=strides,
        conv_bias=cfg["conv_bias"],
        num_conv_pos_embeddings=cfg["conv_pos"],
        num_conv_pos_embedding_groups=cfg["conv_pos_groups"],
        do_stable_layer_norm=cfg["layer_norm_first"],
        num_buckets=cfg["num_buckets"],
        max_bucket_distance=cfg["max_distance"],
        **WITHOUT_PRETRAINING,
    )


def _conv_layers(text: str) -> list[tuple[int, int, int]]:
    """Read ``[(512,10,5)] + [(512,3,2)] * 4``: (channels, kernel, stride) of each layer."""
    layers = []
    for term in text.replace(" ", "").split("+"):
        match = re.fullmatch(r"\[\((\d+),(\d+),(\d+)\)\](?:\*(\d+))?", term)
        if match is None:
            raise ValueError(f"conv_feature_layers {text!r}: cannot read {term!r}")
        dim, kernel, stride, times = (int(n or 1) for n in match.groups())
        layers += [(dim, kernel, stride)] * times
    return layers


def original_names(config) -> dict[str, str]:
    """Return the original's name of every tensor -> transformers' name, for a ``WavLMConfig``."""
    modules = {
        "layer_norm": "feature_projection.layer_norm",
        "post_extract_proj": "feature_projection.projection",
        "encoder.layer_norm": "encoder.layer_norm",
    }
    cnn, group = "feature_extractor.conv_layers", config.feat_extract_norm == "group"
    for i in range(1 if group else len(config.conv_dim)):
        norm = f"{cnn}.{i}.2" if group else f"{cnn}.{i}.2.1"
        modules[norm] = f"{cnn}.{i}.layer_norm"
    attention = {f"{part}_proj": f"{part}_proj" for part in ("k", "v", "q", "out")}
    attention["grep_linear"] = "gru_rel_pos_linear"
    for i in range(config.num_hidden_layers):
        layer = f"encoder.layers.{i}"
        for theirs, ours in attention.items():
            modules[f"{layer}.self_attn.{theirs}"] = f"{layer}.attention.{ours}"
        modules[f"{layer}.self_attn_layer_norm"] = f"{layer}.layer_norm"
        modules[f"{layer}.fc1"] = f"{layer}.feed_forward.intermediate_dense"
        modules[f"{layer}.fc2"] = f"{layer}.feed_forward.output_dense"
        modules[f"{layer}.final_layer_norm"] = f"{layer}.final_layer_norm"
    names = {f"{a}.{part}": f"{b}.{part}" for a, b in modules.items() for part in _AFFINE}
    for i in range(len(config.conv_dim)):
        for part in _AFFINE if config.conv_bias else _AFFINE[:1]:
            names[f"{cnn}.{i}.0.{part}"] = f"{cnn}.{i}.conv.{part}"
    for i in range(config.num_hidden_layers):
        layer = f"encoder.layers.{i}"
        names[f"{layer}.self_attn.grep_a"] = f"{layer}.attention.gru_rel_pos_const"
    first = "encoder.layers.0"
    names[f"{first}.self_attn.relative_attention_bias.weight"] = (
        f"{first}.attention.rel_attn_embed.weight"
    )
    positions = "encoder.pos_conv_embed.conv"
    names["encoder.pos_conv.0.bias"] = f"{positions}.bias"
    names["encoder.pos_conv.0.weight_g"] = f"{positions}.parametrizations.weight.original0"
    names["encoder.pos_conv.0.weight_v"] = f"{positions}.parametrizations.weight.original1"
    return names
