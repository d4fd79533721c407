/* Faults that each sanitizer must report, in loops like ours. Not part of the package.
 *
 * Every function works on `memory` of `count` floats; `sound*` do what is allowed.
 */
#include <stdint.h>
#include <stdlib.h>

enum { LANES = 4 };
typedef float vec __attribute__((vector_size(LANES * sizeof(float))));
typedef float loose __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));

static void scale(float *memory, int count)
{
    for (int j = 0; j < count; j += LANES)
        *(loose *)(memory + j) = 2 * *(loose *)(memory + j);
}

void sound(float *memory, int count)
{
    scale(memory, count);
}

/* A kernel that takes one vector too many. */
void overflow(float *memory, int count)
{
    scale(memory, count + LANES);
}

/* A strict vector where only elements are aligned. */
void misalign(float *memory, int count)
{
    vec *strict = (vec *)(memory + 1);
    for (int j = 0; j < count / LANES - 1; j++)
        strict[j] = 2 * strict[j];
}

void use_after_free(float *memory, int count)
{
    float *copy = malloc(count * sizeof *copy);
    for (int j = 0; j < count; j++)
        copy[j] = memory[j];
    free(copy);
    scale(copy, count);
}

void overflow_int(float *memory, int count)
{
    int bytes = INT32_MAX - count + 1;
    for (int j = 0; j < count; j++, bytes++)
        memory[j] = bytes;
}

void shift_too_far(float *memory, int count)
{
    for (int j = 0; j < count; j++)
        memory[j] = 1u << j;
}

void round_too_large(float *memory, int count)
{
    for (int j = 0; j < count; j++)
        memory[j] = (int)(memory[j] + 1e10f);
}

/* Two loops of a region that do not wait by themselves, as those of `prange`: the second reads what
 * another thread wrote in the first. */
static void two_phases(float *memory, int count, int wait)
{
    int half = count / 2;
#pragma omp parallel num_threads(2)
    {
#pragma omp for schedule(static) nowait
        for (int j = 0; j < half; j++)
            memory[j] = j;
        if (wait) {
#pragma omp barrier
        }
#pragma omp for schedule(static) nowait
        for (int j = 0; j < half; j++)
            memory[half + j] = memory[half - 1 - j];
    }
}

void sound_phases(float *memory, int count)
{
    two_phases(memory, count, 1);
}

void forget_barrier(float *memory, int count)
{
    two_phases(memory, count, 0);
}

/* All threads sum into one element. */
void share_element(float *memory, int count)
{
#pragma omp parallel for num_threads(2) schedule(static)
    for (int j = 1; j < count; j++)
        memory[0] += memory[j];
}
