"""The benchmarks: how long starts, cells and recoveries take, held against their bounds.

`python -m nbdist.bench`, `nbdist bench` and `make bench` run them. A process of its own, which acts
as a kernel does; nothing imports this package.
"""
