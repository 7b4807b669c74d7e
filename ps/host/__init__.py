"""The operating system as this program uses it.

Here: a signal, a process, what is wrong with one, the thread that watches, cores and memory, files
that are written whole, bounds on time. Health is judged by plain functions over readings.
Not here: weights, orders, ranks that talk to each other. Imports ps.settings alone, and no torch.
"""
