"""Pallas kernels, a package for each back end; `kvjax.ops` alone calls them."""
