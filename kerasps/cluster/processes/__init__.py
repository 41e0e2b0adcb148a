"""Starts, watches, restarts and ends the processes of tasks on this machine.

Contract: knows a task by its command and its log, and never connects to one.
"""
