"""The settings of a job: what was asked for, which rank this process is, and what can go wrong.

Here: how options are declared (options) and which ones there are (config), torchrun's variables
(topology), errors with their exit codes (errors), faults to inject and learning-rate schedules as
they are typed, and the format of log lines.
Not here: anything that acts. Imports no torch and no other room.
"""
