"""What is trained: the built-in workloads, their data, and the checks on a workload of your own.

Here: a data set, a net, `--workload auto`, what a plug-in must look like.
Not here: how it is trained. Imports ps.workload, ps.host, ps.settings.
"""
