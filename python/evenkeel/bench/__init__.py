"""`python -m evenkeel bench`: evenkeel beside every other library that is installed, in one run.

lines        what is measured: problems, and the presets that are lists of them
tensors      the inputs of a problem, its result in float64, the comparison with it
contenders   the libraries, each as calls of the same form
timing       graphs of many calls on a GPU, alternating rounds on a CPU, host cost
steps        training steps of whole models: native, fused, without norms
report       tables, CSV and JSON
plots        pictures, and the look that all of the project's pictures share
cli          the command

And `python -m evenkeel bench-jax`, evenkeel.jax beside what else normalizes in JAX:

jax_cli      the command
jax_norms    what is measured
jax_lines    what its lines are called and say
"""
