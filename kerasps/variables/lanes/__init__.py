"""Counts pushes in lanes, each once, and knows when steps are in flight.

Contract: keeps counts and locks on each ps; knows no step.
"""
