"""Metrics of recommenders for Keras: normalised entropy, calibration, grouped AUC.

Contract: the states of a metric are sums over examples, zero at first. The states of workers are
added, so a metric is that of all examples, whichever worker had them. The metrics know nothing of
strategies: plain Keras uses them too.
"""

from __future__ import annotations

from kerasps.metrics.calibration import Calibration
from kerasps.metrics.grouped_auc import GroupedAUC
from kerasps.metrics.normalized_entropy import NormalizedEntropy

__all__ = ["Calibration", "GroupedAUC", "NormalizedEntropy"]

# Users, and saved models, find them here.
for _metric in (Calibration, GroupedAUC, NormalizedEntropy):
    _metric.__module__ = __name__
