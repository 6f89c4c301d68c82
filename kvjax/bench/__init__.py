"""Decode benchmarks: decode attention beside its peers, and whole decode steps.

`decode_attention.measure` and `decode_step.measure` return one run as plain data; `report` prints
and writes it. Parts are imported where they are used: attention needs jax and numpy alone,
`decode_step` flax, `report` rich, and `plots` matplotlib.
"""
