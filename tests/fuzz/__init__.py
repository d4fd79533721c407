"""A fuzzer of the whole public API: random calls, right and wrong, in a process that may die.

    python -m tests.fuzz --minutes 10 --seed 1
    python -m tests.fuzz --seed 1 --only attention --case 123      # one case again, here

A case is one call or a short sequence of calls, drawn from its seed, operation and number alone.
What is handed over is right, or right in an odd form (lists, subclasses, any strides, other byte
order), or wrong (other types, shapes, numbers), or hostile (objects that raise, or change another
argument while they are asked for their value). See `judge` for what must hold then.
"""

from tests.fuzz import blocks, caches, files, operations

OPERATIONS = {
    f.__name__: f
    for f in (
        operations.attention,
        operations.weights,
        operations.varlen,
        operations.merge,
        operations.rope,
        operations.norm,
        operations.cost,
        operations.settings,
        caches.cache,
        blocks.block,
        blocks.quantized,
        blocks.once,
        files.files,
        files.config,
        files.command,
        files.environment,
    )
}

# Of those that take longer than others: how often they come, beside once.
SHARES = {"block": 2, "cache": 2, "command": 0.5, "environment": 0.02}
