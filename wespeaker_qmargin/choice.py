"""Which form of the head's loss is the fastest here: a measured rule on a CPU, a trial elsewhere.

All forms give the same loss and gradient, so this is a question of time and memory alone.
"""

import functools
import logging
import time

import torch

from wespeaker_qmargin.functional import q_margin_per_sample

logger = logging.getLogger(__name__)

# On the CPU (tools/bench_head.py, 32 to 512 samples, 192 and 256 dimensions) streaming costs about
# 0.25 of the dense form, and as much again for every 2.5 % of the classes that are active; below
# 2,000 classes its some 200 small operations cost more than the products that it saves.
_MIN_CLASSES, _MAX_SHARE = 2000, 0.025
_DENSE_COPIES = 8  # of the B x C scores that the dense form may hold at once, when memory is asked


@functools.lru_cache(maxsize=64)
def expected_support(*, num_class: int, dim: int, alpha: float, scale: float) -> float:
    """Return about how many classes have p > 0 at initialisation, without margin.

    Prototypes and embeddings are then independent directions, whose cosines are close to
    N(0, 1 / dim): the support of one sample whose scores are the C mid-quantiles of that.
    """
    place = (torch.arange(num_class, dtype=torch.float64) + 0.5) / num_class
    scores = scale * torch.special.ndtri(place) / dim**0.5
    label = torch.tensor([num_class // 2])
    _, support, _ = q_margin_per_sample(scores[None].clamp(-scale, scale), label, alpha=alpha)
    return float(support)


def rule(*, num_class: int, dim: int, alpha: float, scale: float) -> str:
    """Return "dense" or "streaming", whichever is the faster on a CPU, as it was measured.

    The state at initialisation decides, where most classes are active: streaming then is no slower
    than dense, and several times faster later.
    """
    if num_class < _MIN_CLASSES:
        return "dense"
    if alpha == 1:
        return "streaming"  # the same products, in less memory
    support = expected_support(num_class=num_class, dim=dim, alpha=alpha, scale=scale)
    return "streaming" if support <= _MAX_SHARE * num_class else "dense"


def fastest(run, impls, *, rows: int, num_class: int, device: torch.device) -> str:
    """Return the impl of ``impls`` whose ``run(impl)`` takes the least time on ``device``.

    The dense form is not tried where its scores might not fit. Each is run twice to warm up and
    three times on the clock; what runs out of memory is out.
    """
    times = {}
    for impl in impls:
        if impl == "dense" and _DENSE_COPIES * 4 * rows * num_class > _free_memory(device):
            continue
        try:
            times[impl] = min(_seconds(run, impl, device) for _ in range(5))
        except torch.OutOfMemoryError:
            logger.info("q_margin: %s does not fit into the memory of %s", impl, device)
    chosen = min(times, key=times.get, default="streaming")
    logger.info(
        "q_margin: impl %s for %d samples x %d classes on %s (%s)",
        chosen,
        rows,
        num_class,
        device,
        ", ".join(f"{impl} {1000 * seconds:.2f} ms" for impl, seconds in times.items()),
    )
    return chosen


def _seconds(run, impl: str, device: torch.device) -> float:
    _synchronise(device)
    start = time.perf_counter()
    run(impl)
    _synchronise(device)
    return time.perf_counter() - start


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free_memory(device: torch.device) -> float:
    if device.type != "cuda":
        return float("inf")
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
