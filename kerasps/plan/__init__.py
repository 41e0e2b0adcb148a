"""A dry run of a script: what its training would hold and move, without tasks and steps.

Contract: `plan` runs a script up to its first step in this process, and prints what `report.py`
describes. Placement, traces and messages are those of a run: the same code makes them. Once called,
the process can be used for nothing else.
"""

from __future__ import annotations

from kerasps.plan.run import plan

__all__ = ["plan"]
