"""Speed, memory, start and scale, measured against stated limits: `python -m benchmarks`.

Imports no other package at the top: a process of the bare loop loads this package and must stay bare.
"""
