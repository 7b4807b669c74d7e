"""The operating system as this program uses it.

Here: signals, processes and what is wrong with one, the thread that watches, cores and memory,
files that are written whole, limits of time, the user at the other end of a socket. A new signal
goes to signals, a new way to be unhealthy to health, which is plain functions over readings.
Not here: weights, orders, ranks that talk to each other. Imports ps.settings alone, and no torch.
"""
