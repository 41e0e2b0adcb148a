"""A dry run of a script: computes a training's memory and traffic, without tasks and steps.

Contract: `plan` runs a script up to its first step in this process, and prints the plan that
`report.py` describes. The same code as in a run makes the placement, the traces and the messages.
After the call, the process can be used for nothing else.
"""

from __future__ import annotations

from kerasps.tools.plan.run import plan

__all__ = ["plan"]
