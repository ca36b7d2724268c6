"""Time of a mixture of experts, forward and backward, beside dense feed-forward modules.

    python tools/bench_moe.py [--threads 1] [--tokens 2560] [--dims 96 256 768]

A feed-forward module is D -> 4 D -> D; the mixture has N copies of it and k for a token. Beside it:
one such module, one of k x 4 D hidden units (equal active flops), and the naive mixture, in which
every expert hears every token. One process; in every round each runs once, in turn; a cell is the
fastest of --rounds in ms.
"""

import argparse
import time

import torch
from torch import nn

from wespeaker_qmargin.moe import MoEFeedForward
from wespeaker_qmargin.provenance import provenance
from wespeaker_qmargin.router import MoEOptions


def feed_forward(dim: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))


def naive(layer: MoEFeedForward, tokens):
    """Every expert of every token."""
    top = (tokens @ layer.router.weight.T).topk(layer.options.top_k)
    gates = torch.zeros(len(tokens), len(layer.experts))
    gates = gates.scatter(1, top.indices, top.values.softmax(dim=1))
    return sum(gates[:, n, None] * expert(tokens) for n, expert in enumerate(layer.experts))


def clock(forward, tokens) -> float:
    start = time.perf_counter()
    forward(tokens).sum().backward()
    return 1e3 * (time.perf_counter() - start)


def flops(dim: int, experts: int, top_k: int) -> float:
    """Return the flops of a token in a block with the mixture over those of the dense block.

    A block: four D x D projections of its attention and the feed-forward module of 8 D^2; attention
    scores are left out, which depend on the length.
    """
    attention, dense = 4 * dim**2, 8 * dim**2
    return (attention + top_k * dense + dim * experts) / (attention + dense)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--threads", type=int, default=1)
    add("--tokens", type=int, default=2560, help="of a batch [2560: 32 utterances of 1.6 s]")
    add("--dims", type=int, nargs="+", default=[96, 256, 768])
    add("--experts", type=int, default=3)
    add("--top_k", type=int, default=2)
    add("--rounds", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(provenance(torch.device("cpu")))
    print("| D | dense | equal flops | mixture | naive | mixture / equal | flops of a block |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for dim in args.dims:
        tokens = torch.randn(args.tokens, dim, requires_grad=True)
        options = MoEOptions(experts=args.experts, top_k=args.top_k)
        layer = MoEFeedForward(feed_forward(dim, 4 * dim), dim, options).eval()
        forwards = {
            "dense": feed_forward(dim, 4 * dim),
            "equal": feed_forward(dim, 4 * dim * args.top_k),
            "mixture": layer,
            "naive": lambda x, layer=layer: naive(layer, x),
        }
        torch.testing.assert_close(layer(tokens), naive(layer, tokens), atol=1e-5, rtol=1e-5)
        rounds = [[clock(f, tokens) for f in forwards.values()] for _ in range(args.rounds)]
        best = dict(zip(forwards, map(min, zip(*rounds))))
        cells = [f"{best[name]:.1f}" for name in forwards]
        ratio = best["mixture"] / best["equal"]
        block = flops(dim, args.experts, args.top_k)
        print(f"| {dim} | {' | '.join(cells)} | {ratio:.2f}x | {block:.2f}x |")


if __name__ == "__main__":
    main()
