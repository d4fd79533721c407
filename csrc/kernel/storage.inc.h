/* The caller's elements on their way into registers and out of them.
 *
 * Kernels compute in `real`; an array may hold something else (ta_storage). A kernel that meets one is
 * a body for a constant storage, of which TA_EACH_STORAGE makes the instances:
 * X(storage, name of the kernel for it). TA_EACH_KEPT is for what keys and values may be kept as.
 */
#if TA_BITS == 32
#define TA_EACH_STORAGE(X, name) X(TA_REAL, name) X(TA_BF16, name##_bf16) X(TA_F16, name##_f16)
#define TA_EACH_KEPT(X, name) TA_EACH_STORAGE(X, name) X(TA_INT8, name##_int8)
#else
#define TA_EACH_STORAGE(X, name) X(TA_REAL, name)
#define TA_EACH_KEPT TA_EACH_STORAGE
#endif

/* For double too, and from the other of float and double. */
#define TA_EACH_SOURCE(X, name) \
    X(TA_REAL, name) X(TA_BF16, name##_bf16) X(TA_F16, name##_f16) X(TA_OTHER_REAL, name##_other)

#define stored_size TA_NAME(stored_size)
TA_INLINE ptrdiff_t stored_size(const int storage)
{
    switch (storage) {
    case TA_REAL:
        return sizeof(real);
    case TA_OTHER_REAL:
        return sizeof(other_real);
    case TA_INT8:
        return 1;
    default:
        return sizeof(uint16_t);
    }
}

#define load_one TA_NAME(load_one)
TA_INLINE real load_one(const int storage, const void *from)
{
    switch (storage) {
    case TA_BF16:
        return real_from_bf16(*(const uint16_t *)from);
    case TA_F16:
        return real_from_f16(*(const uint16_t *)from);
    case TA_OTHER_REAL:
        return (real) * (const other_real *)from;
    case TA_INT8:
        return *(const signed char *)from;
    default:
        return *(const real *)from;
    }
}

#define load_vector TA_NAME(load_vector)
TA_INLINE vec load_vector(const int storage, const void *from)
{
    switch (storage) {
    case TA_BF16:
        return vec_load_bf16(from);
    case TA_F16:
        return vec_load_f16(from);
    case TA_OTHER_REAL:
        return vec_load_other(from);
#if TA_BITS == 32
    case TA_INT8:
        return vec_load_int8(from);
#endif
    default:
        return vec_load(from);
    }
}

#define store_one TA_NAME(store_one)
TA_INLINE void store_one(const int storage, void *to, real value)
{
#if TA_BITS == 32
    if (storage == TA_BF16)
        *(uint16_t *)to = bf16_from_real(value);
    else if (storage == TA_F16)
        *(uint16_t *)to = f16_from_real(value);
    else
#endif
        *(real *)to = value;
    (void)storage;
}

#define store_vector TA_NAME(store_vector)
TA_INLINE void store_vector(const int storage, void *to, vec v)
{
#if TA_BITS == 32
    if (storage == TA_BF16)
        vec_store_bf16(to, v);
    else if (storage == TA_F16)
        vec_store_f16(to, v);
    else
#endif
        vec_store(to, v);
    (void)storage;
}
