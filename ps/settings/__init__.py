"""What was asked for, who this process is, and what can go wrong. Values alone.

Here: an option, the ranks of torchrun, an error and its exit code, a fault to inject and a
learning-rate schedule as they are typed, the format of log lines.
Not here: anything that acts. Imports no torch and no other room.
"""
