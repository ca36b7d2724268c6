"""What the experts are compared with: other modules in the place of a feed-forward module.

    dataset_args: {wavlm_args: {feed_forward: {module: "study_ffn:ParallelAdapter", hidden: 768}}}

All are the module itself at first, and take over its children: a dense checkpoint fits.
"""

import peft
import torch
from torch import Tensor, nn


class Adapted(nn.Module):
    """The feed-forward module itself; its children are this module's, under their names."""

    def __init__(self, feed_forward: nn.Module, dim: int):
        super().__init__()
        for name, child in feed_forward.named_children():
            self.add_module(name, child)
        self._feed_forward = (feed_forward,)  # in a tuple: it is no child

    def forward(self, hidden: Tensor) -> Tensor:
        return self._feed_forward[0](hidden)


class ParallelAdapter(Adapted):
    """``ffn(x) + B gelu(A x)`` with ``hidden`` units, B = 0 at first.

    With the whole trained it is a wider feed-forward module; with the rest frozen, a parallel
    adapter. Reference: He et al. 2022, "Towards a unified view of parameter-efficient transfer
    learning".
    """

    def __init__(self, feed_forward: nn.Module, dim: int, hidden: int):
        super().__init__(feed_forward, dim)
        self.adapter = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
        nn.init.zeros_(self.adapter[2].weight)
        nn.init.zeros_(self.adapter[2].bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) + self.adapter(hidden)


class LowRank(Adapted):
    """LoRA of rank ``r`` on both linear layers, by peft.  Reference: Hu et al. 2022, "LoRA"."""

    def __init__(self, feed_forward: nn.Module, dim: int, r: int = 8):
        super().__init__(feed_forward, dim)
        names = [n for n, x in feed_forward.named_children() if isinstance(x, nn.Linear)]
        peft.inject_adapter_in_model(
            peft.LoraConfig(r=r, lora_alpha=2 * r, target_modules=names), feed_forward
        )
        for name in names:
            self.add_module(name, feed_forward.get_submodule(name))


class QualityLowRank(Adapted):
    """Low-rank updates of both linear layers times ``g = sigmoid(w . mean_t x_t + b)``.

    The gate sees the whole utterance, so that clean speech can leave the encoder as it was; g = 1/2
    at first. With the task's loss only: nobody tells it what is degraded.
    """

    def __init__(self, feed_forward: nn.Module, dim: int, r: int = 8):
        super().__init__(feed_forward, dim)
        self.quality, self._gate = nn.Linear(dim, 1), None
        nn.init.zeros_(self.quality.weight)
        nn.init.zeros_(self.quality.bias)
        self.updates = nn.ModuleDict()
        for name, layer in feed_forward.named_children():
            if isinstance(layer, nn.Linear):
                down = nn.Linear(layer.in_features, r, bias=False)
                up = nn.Linear(r, layer.out_features, bias=False)
                nn.init.zeros_(up.weight)
                self.updates[f"{name}_update"] = nn.Sequential(down, up)
                layer.register_forward_hook(self._updated(f"{name}_update"))

    def _updated(self, name: str):
        def hook(layer, args, output):
            return output + 2 * self._gate * self.updates[name](args[0])

        return hook

    def forward(self, hidden: Tensor) -> Tensor:
        self._gate = torch.sigmoid(self.quality(hidden.mean(dim=1, keepdim=True)))
        return super().forward(hidden)
