"""`python -m evenkeel check`: results of this build on this machine against float64.

cases      the case lists, which the tests of the library share (tests/cases; a wheel carries them)
memory     the tensors of a case: strides, guards, on the host or on a GPU
oracle     what a case has to give, in float64, and how far from it rounding may lead
judge      runs a case on a backend and compares
cli        the command: one process for every backend, so that a crash is a finding and not the end
"""
