"""The processes of tasks on this machine: started, watched, started again, and ended.

Contract: knows a task by its command and its log. It never connects to one.
"""
