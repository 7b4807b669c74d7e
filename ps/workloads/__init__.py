"""What is trained: the built-in workloads with their data, and the checks on a plug-in.

Here: a data set, a net, the choice that `--workload auto` makes, how a plug-in is loaded and what
it must look like.
Not here: how it is trained. Imports ps.workload, ps.host and ps.settings.
"""
