"""What else trains the same net: each module starts real processes and gives their rate.

A peer is a module with two functions: `rate(task)` for the benchmark, and `part(task, gate)`, which
one of its processes runs. Nothing of a peer is left when `rate` returns or raises.

Every rate is the sum of the rates of the peer's processes, each measured in the process itself,
after warm-up steps, from the moment all are ready to its own last step. A process that is still
training when the others are done has the cores to itself, so the sum flatters the peers a little;
ours is never measured that way.
"""
