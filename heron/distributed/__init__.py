"""How processes meet, agree and notice that one of them has gone; tensors are all it knows.

In come the tensors and objects of one process; out come sums, gathered rows and what all have
agreed on, the same on every process. `watchdog` ends a run whose peer is dead, `signals` saves it.
"""
