"""Variables with names on their tasks, what kind they are, and how their values travel.

Contract: reads and writes one storage; knows neither shards nor strategies.
"""
