"""The kernels on a GPU: right first, then how close to what the machine can do, and beside others.

    __main__.py    arguments, the order of the parts, exit status
    plan.py        what is measured, and within how many seconds
    work.py        bytes that must move and operations that must be done, from the shapes
    machine.py     how a call is timed and captured on a device
    suite.py       the tests of the kernels, on the device
    limits.py      copy bandwidth, link bandwidth, matrix rate
    step.py        one step of attention: blocks, tables, and what must come out
    peers.py       the same step by SDPA, flex_attention and FlashInfer
    attention.py   decode and prefill: checked, then timed in turns
    moves.py       whole blocks between device and host
    tiles.py       the sweep that the tile table is made from
    report.py      figures as lines, as tables, and as a file that is always up to date
"""
