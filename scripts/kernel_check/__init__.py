"""What check_kernels.py is made of: see its docstring."""
