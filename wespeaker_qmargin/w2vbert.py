"""w2v-BERT as a front-end, from transformers; LoRA."""

from torch import Tensor, nn

from wespeaker_qmargin import w2vbert_features
from wespeaker_qmargin.frontend import SAMPLE_RATE, SslFrontend, checkpoint_layers, drop_layers
from wespeaker_qmargin.ssl_weights import load_transformers, require


class W2VBertFrontend(SslFrontend):
    """w2v-BERT 2.0 (L 25, D 1024), one frame every 20 ms; with LoRA, if wanted.

    Takes the options of WeSpeaker's ``w2vbert`` front-end that have a meaning here, and its
    checkpoints; differs in computing input features on the device of the waves, in masking padding,
    and in keeping what is frozen in eval mode.

    Args:
        model_name: a local folder, or a name on the Hugging Face hub.
        frozen: train nothing of the checkpoint's; it stays in eval mode.
        use_lora: train low-rank updates of a frozen encoder's linear layers.
        lora_config_args: of ``peft.LoraConfig``; WeSpeaker's defaults: r 16, lora_alpha 32,
            target_modules [linear_q, linear_v], lora_dropout 0.1, bias none.
        grad_mult, layer_drop, gradient_checkpointing, moe, feed_forward, sample_rate: see
            ``WavLMFrontend``; any layer may be skipped, each has two feed-forward modules.

    Raises:
        ImportError, FileNotFoundError, ValueError: see ``ssl_weights``; an option out of range;
            LoRA on an encoder that is not frozen, or that has experts.

    References: Barrault et al. 2023, "Seamless", section 3.2.1; Hu et al. 2022, "LoRA".
    """

    def __init__(
        self,
        model_name: str = "facebook/w2v-bert-2.0",
        *,
        frozen: bool = True,
        use_lora: bool = False,
        lora_config_args: dict | None = None,
        grad_mult: float = 1.0,
        layer_drop: float = 0.0,
        gradient_checkpointing: bool = False,
        moe: dict | None = None,
        feed_forward: dict | None = None,
        sample_rate: int = SAMPLE_RATE,
    ):
        super().__init__(
            frozen=frozen, grad_mult=grad_mult, layer_drop=layer_drop, sample_rate=sample_rate
        )
        if use_lora and not frozen:
            raise ValueError("use_lora trains updates of a frozen encoder: set frozen: True")
        if lora_config_args and not use_lora:
            raise ValueError("lora_config_args without LoRA: set use_lora: True")
        if use_lora and (moe or feed_forward):
            raise ValueError("use_lora updates a plain encoder: without moe and feed_forward")
        self.encoder = load_transformers(model_name, "wav2vec2-bert")
        config = self.encoder.config
        self.num_layers, self.size = config.num_hidden_layers + 1, config.hidden_size
        self._num_mel_bins = config.feature_projection_input_dim // w2vbert_features.STRIDE
        self.min_samples = w2vbert_features.MIN_SAMPLES
        self._change_feed_forwards(self.encoder, moe, feed_forward)
        if gradient_checkpointing:
            checkpoint_layers(self.encoder)
        if layer_drop > 0:
            drop_layers(self.encoder.encoder.layers, layer_drop, _skipped)
        self.encoder.requires_grad_(not frozen)
        self.use_lora = use_lora
        if use_lora:
            self.encoder = _with_lora(self.encoder, lora_config_args or {})

    def train(self, mode: bool = True):
        super().train(mode)
        if self.use_lora:
            for name, module in self.encoder.named_modules():
                if "lora_" in name:
                    module.train(mode)
            # the layers themselves, not what is in them: layer drop, gradient checkpointing
            for layer in self._plain_encoder().encoder.layers:
                layer.training = mode
        return self

    def _plain_encoder(self) -> nn.Module:
        return self.encoder.get_base_model() if self.use_lora else self.encoder

    def merge_lora(self) -> None:
        """Add the low-rank updates to the encoder's weights; what is left is a plain encoder.

        Saved afterwards, the model loads into a front-end without LoRA.
        """
        if not self.use_lora:
            raise ValueError("there is no LoRA in this front-end")
        self.encoder, self.use_lora = self.encoder.merge_and_unload(), False

    def num_frames(self, samples):
        return w2vbert_features.num_frames(samples)

    def _hidden(self, wavs: Tensor, samples: Tensor) -> tuple[Tensor, ...]:
        ragged = bool((samples != wavs.shape[1]).any())
        features, valid = w2vbert_features.w2vbert_features(
            wavs, samples if ragged else None, num_mel_bins=self._num_mel_bins
        )
        found = self._plain_encoder()(features, attention_mask=valid, output_hidden_states=True)
        return found.hidden_states


def _skipped(hidden: Tensor, arguments: dict) -> Tensor:
    return hidden


def _with_lora(encoder: nn.Module, arguments: dict) -> nn.Module:
    peft = require("peft", "use_lora", "ssl")
    defaults = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.1, "bias": "none"}
    defaults["target_modules"] = ["linear_q", "linear_v"]
    try:
        config = peft.LoraConfig(task_type="FEATURE_EXTRACTION", **{**defaults, **arguments})
        return peft.get_peft_model(encoder, config)
    except (TypeError, ValueError) as error:
        raise ValueError(f"lora_config_args: {error}") from error
