"""One short loop per schedule over the same stages, and the root that builds them."""
