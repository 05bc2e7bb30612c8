"""Synthetic data: typed programs as tasks, a template teacher, and the corpora a training run starts from.

`operators` is the table of what can be computed and how it goes wrong, `workloads` turns compositions of it into
tasks and splits, `teacher` writes answers, `corpora` writes the files.

>>> from musalib.synthesis.operators import wrong_share_table
>>> print(wrong_share_table())  # share of wrong lines per operator in the base corpus  # doctest: +SKIP
"""
