"""The tools around the engine: the command, plans, traces, and the status of a run.

Contract: training does not need the wings in here. The engine calls two of them at its edges: a
strategy answers with a status (`monitoring`), and the callback `Trace` records tasks (`tracing`).
"""
