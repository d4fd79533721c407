"""What `tileattn bench` measures: tileattn beside NumPy, PyTorch and onnxruntime, in turns.

`groups` lists the groups of cells; each has a module of its name that prepares a cell's work
(`attention`, `blocks`, ...), and `memory` measures in processes of their own. `work` and `rounds`
time it, `records` keeps what came out and is the file of `--json`, `report` and `pictures` show it,
and `command` is the command line. Nothing here is imported by `import tileattn`, and no peer before
something is measured.
"""
