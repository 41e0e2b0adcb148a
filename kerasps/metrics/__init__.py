"""Metrics of recommenders for Keras: normalised entropy, calibration, grouped AUC.

Contract: the states of a metric are sums over examples, zero at first. The strategy adds the states
of all workers, so a metric covers all examples, whichever worker had them. The metrics do not
depend on strategies: they also work in plain Keras.
"""

from __future__ import annotations

from kerasps.metrics.clicks import Calibration, NormalizedEntropy
from kerasps.metrics.grouped_auc import GroupedAUC

__all__ = ["Calibration", "GroupedAUC", "NormalizedEntropy"]

# Users, and saved models, import them from here.
for _metric in (Calibration, GroupedAUC, NormalizedEntropy):
    _metric.__module__ = __name__
