"""What a compiler can say about the kernels without a GPU: `python -m kernels.report`.

    variants.py   what is compiled: a written list, each planned by the functions that serve
    targets.py    what it is compiled for
    row.py        what came out of one compilation, and what is wrong with it
    compile.py    launch → machine code → row
    digests.py    which of it has been compiled before, as it is now
"""
