"""The two meters of torchnet that WeSpeaker's trainer logs with.

torchnet itself is unmaintained and fails to install with a current setuptools.
"""

import importlib.machinery
import types

import numpy as np


class AverageValueMeter:
    """The mean of the values added; standard deviations are not kept."""

    def __init__(self):
        self._sum, self._count = 0.0, 0

    def add(self, value: float, n: int = 1) -> None:
        """Add ``value``, the sum of ``n`` values."""
        self._sum, self._count = self._sum + value, self._count + n

    def value(self) -> tuple[float, float]:
        """Return (mean, NaN); the mean of nothing is NaN."""
        return (self._sum / self._count if self._count else float("nan")), float("nan")


class ClassErrorMeter:
    """Share in percent of rows whose largest output is (``accuracy``), or is not, the target's."""

    def __init__(self, accuracy: bool = False):
        self._accuracy = accuracy
        self._right, self._count = 0, 0

    def add(self, output: np.ndarray, target: np.ndarray) -> None:
        """Add outputs (B, C) and targets (B,)."""
        self._right += int((output.argmax(axis=1) == target).sum())
        self._count += len(target)

    def value(self) -> list[float]:
        """Return the share, in a list as torchnet does for its many ``topk``."""
        right = self._right if self._accuracy else self._count - self._right
        return [100.0 * right / self._count]


def modules() -> dict[str, types.ModuleType]:
    """Return the stand-in for torchnet: module name -> module."""
    package, meter = types.ModuleType("torchnet"), types.ModuleType("torchnet.meter")
    package.meter = meter
    meter.AverageValueMeter, meter.ClassErrorMeter = AverageValueMeter, ClassErrorMeter
    for module in (package, meter):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    return {"torchnet": package, "torchnet.meter": meter}
