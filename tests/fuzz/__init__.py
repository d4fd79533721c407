"""A fuzzer of the whole public API: random calls, right and wrong, in a process that may die.

    python -m tests.fuzz --minutes 10 --seed 1
    python -m tests.fuzz --seed 1 --only attention --case 123      # one case again, here

A case is one call or a short sequence of calls, drawn from its seed, operation and number alone.
What is handed over is right, or right in an odd form (lists, subclasses, any strides, other byte
order), or wrong (other types, shapes, numbers), or hostile (objects that raise, or change another
argument while they are asked for their value). See `judge` for what must hold then.
"""

from tests.fuzz import blocks, caches, files, operations

# What each calls of the public names.
OF = {
    operations.attention: ("dot_product_attention", "explain", "Plan", "reference"),
    operations.weights: ("attention_weights",),
    operations.varlen: ("varlen_attention",),
    operations.merge: ("merge_states",),
    operations.rope: ("apply_rope", "Rope", "RopeScaling"),
    operations.norm: ("LayerNorm", "RMSNorm"),
    operations.cost: ("cost",),
    operations.settings: ("threads", "set_num_threads", "get_num_threads", "isa"),
    caches.cache: ("KVCache",),
    blocks.block: ("AttentionBlock",),
    blocks.quantized: ("QuantizedMatrix",),
    blocks.once: ("attention_block",),
    files.files: ("AttentionBlock",),
    files.config: ("Rope",),
    files.command: ("show_config",),
    files.environment: ("isa", "available_isas"),
}
OPERATIONS = {case.__name__: case for case in OF}

# Of those that take longer than others: how often they come, beside once.
SHARES = {"block": 2, "cache": 2, "command": 0.5, "environment": 0.02}
