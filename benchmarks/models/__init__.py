"""Real models end to end, with tileattn as their attention."""

import os

# Between a layer's attention and the next, NumPy's own threads work. OpenMP's would spin meanwhile,
# for some 10 ms, and take their cores away. Read when tileattn is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

#: What attention's weights may be kept as.
WEIGHTS = ("float32", "bfloat16", "int8", "int4")
