/* Memory that dot products ask for while they multiply: a share at each of their steps. */
#ifndef TILEATTN_AHEAD_H
#define TILEATTN_AHEAD_H

#include "tileattn.h"

/* Addresses, maybe of no memory at all. */
typedef struct ahead {
    intptr_t at, end, share;
} ahead;

/* What a tile is to fetch, so many bytes at each step. */
static inline __attribute__((always_inline)) ahead ahead_of(const ta_dot_tile *t, ptrdiff_t share)
{
    const intptr_t at = (intptr_t)t->next;
    return (ahead){at, at + t->next_bytes, share};
}

static inline __attribute__((always_inline)) void fetch(ahead *next)
{
    const intptr_t stop = next->end - next->at < next->share ? next->end : next->at + next->share;
    for (; next->at < stop; next->at += 64)
        __builtin_prefetch((const void *)next->at, 0, 2);
}

#endif
