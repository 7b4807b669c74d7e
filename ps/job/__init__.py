"""One run from start to end: prepare, build, serve or train, end.

Here: the life of each role's process, the run directory, checkpoints, the report, the last line,
`doctor`, injected faults.
Not here: the algorithm. Imports every other room; nothing imports it but launch.py and
ps/__main__.py.
"""
