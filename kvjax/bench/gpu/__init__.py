"""The benchmark of the decode kernels on a GPU, which `scripts/bench_gpu.py` starts.

`presets` says what is checked and measured, `shape` makes the arrays, `oracle` says what must come
out, `chained` how short calls are timed, `peers` who is beside us. `checks` and `timed` do it, in a
process that is the `worker` and writes a `journal`, of which `report` makes tables. Needs jax and
numpy alone.
"""
