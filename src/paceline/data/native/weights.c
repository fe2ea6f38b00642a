/* Resize weights: Pillow's antialiased filters, bilinear and bicubic, over the crop, in 14 bits.
 *
 * Compiled once for all paths, with floating-point contraction off, so that every path resizes with the same weights.
 * The inner loops run over a number of taps that is known to the compiler in the usual cases, so that they are unrolled
 * and vectorized. */
#include <math.h>
#include <stdlib.h>

#include "codec.h"

enum { ONE = 1 << 14, MAX_TAPS = 8192 };

static Status weights_allocate(Weights *weights, int taps, int outputs, int cubic)
{
    int pairs = (taps / 2 + 3) & ~1, padded = (outputs + 15) & ~15; /* kernels work on 16 outputs at a time */
    size_t bytes = (size_t)padded * ((size_t)pairs * 4 + 12) + 64;
    if (weights->capacity < bytes) {
        free(weights->buffer);
        weights->buffer = malloc(bytes * 3 / 2);
        weights->capacity = weights->buffer ? bytes * 3 / 2 : 0;
        if (!weights->buffer)
            return NO_MEMORY;
    }
    memset(weights->buffer, 0, bytes);
    weights->first_even = weights->buffer;
    weights->first = weights->first_even + padded;
    weights->taps = weights->first + padded;
    weights->weights = (int16_t *)(weights->taps + padded);
    weights->pairs = pairs;
    weights->outputs = outputs;
    weights->used_pairs = 1;
    weights->cubic = cubic;
    return OK;
}

/* Records where the weights of an output begin. Returns where to write them. */
ALWAYS_INLINE int16_t *place(Weights *weights, int output, int first, int taps)
{
    int even = first & ~1, pairs = (first - even + taps + 1) / 2;
    weights->first_even[output] = even;
    weights->first[output] = first;
    weights->taps[output] = taps;
    if (pairs > weights->used_pairs)
        weights->used_pairs = pairs;
    return weights->weights + (size_t)output * (size_t)weights->pairs * 2 + (first - even);
}

ALWAYS_INLINE float triangle(float x)
{
    float height = 1.0f - fabsf(x);
    return height > 0.0f ? height : 0.0f;
}

/* Keys' cubic convolution with a = -0.5, which is Pillow's; exactly 0 from 2 on. */
ALWAYS_INLINE float cubic_convolution(float x)
{
    x = fabsf(x) < 2.0f ? fabsf(x) : 2.0f;
    float inner = (1.5f * x - 2.5f) * x * x + 1.0f, outer = (((x - 5.0f) * x + 8.0f) * x - 4.0f) * -0.5f;
    return x < 1.0f ? inner : outer;
}

/* `support`: samples on each side that the filter covers. */
ALWAYS_INLINE void fill_full(Weights *weights, const Axis *axis, double scale, double support, int max_taps, int cubic)
{
    float step = (float)((cubic ? 2 : 1) / support);
    /* conversion rounds toward zero, which would bias negative weights */
    const int offset = cubic ? ONE : 0;
    int raw[MAX_TAPS], rounded[MAX_TAPS];
    for (int i = 0; i < axis->outputs; i++) {
        double center = (i + 0.5) * scale;
        int from = (int)(center - support + 0.5), to = (int)(center + support + 0.5), sum = 0, total = 0;
        from = from < 0 ? 0 : from;
        float begin = (float)(from + 0.5 - center) * step;
        for (int tap = 0; tap < max_taps; tap++) {
            float x = begin + step * (float)tap;
            raw[tap] = (int)((cubic ? cubic_convolution(x) : triangle(x)) * 65536.0f);
        }
        if (to > axis->length) {
            to = axis->length;
            for (int tap = to - from; tap < max_taps; tap++)
                raw[tap] = 0;
        }
        for (int tap = 0; tap < max_taps; tap++)
            sum += raw[tap];
        float factor = (float)ONE / (float)sum;
        for (int tap = 0; tap < max_taps; tap++)
            rounded[tap] = (int)((float)raw[tap] * factor + (0.5f + (float)offset)) - offset;
        for (int tap = 0; tap < max_taps; tap++)
            total += rounded[tap];
        rounded[(int)center - from] += ONE - total; /* the rounding error goes to the center */
        int output = axis->mirror ? axis->outputs - 1 - i : i;
        int16_t *out = place(weights, output, axis->start + from - axis->origin, to - from);
        for (int tap = 0; tap < max_taps; tap++)
            out[tap] = (int16_t)rounded[tap];
    }
}

Status weights_full(Weights *weights, const Axis *axis)
{
    int cubic = axis->cubic;
    double scale = (double)axis->length / axis->outputs, support = (scale < 1 ? 1 : scale) * (cubic ? 2 : 1);
    int max_taps = ((int)ceil(2 * support) + 1 + 3) & ~3;
    if (max_taps > MAX_TAPS)
        return CROP_BOX;
    Status status = weights_allocate(weights, max_taps, axis->outputs, cubic);
    if (status)
        return status;
    if (cubic && max_taps == 8)
        fill_full(weights, axis, scale, support, 8, 1);
    else if (cubic && max_taps == 12)
        fill_full(weights, axis, scale, support, 12, 1);
    else if (cubic)
        fill_full(weights, axis, scale, support, max_taps, 1);
    else if (max_taps == 4)
        fill_full(weights, axis, scale, support, 4, 0);
    else if (max_taps == 8)
        fill_full(weights, axis, scale, support, 8, 0);
    else
        fill_full(weights, axis, scale, support, max_taps, 0);
    return OK;
}

/* Components subsampled by two: composed with libjpeg's smooth upsampling (3/4 and 1/4 of the neighbors), so that they
 * are filtered as if they were upsampled first, at no cost per pixel. Sample c gets w[2c-1] + 3 w[2c] + 3 w[2c+1] +
 * w[2c+2], divided by four; the rounding error goes to the largest weight. */
ALWAYS_INLINE void fill_half(Weights *weights, const Axis *axis, const Weights *full, int full_origin, int pairs)
{
    int taps = pairs + 2;
    int padded[2 * MAX_TAPS + 8], composed[MAX_TAPS + 4];
    memset(padded, 0, 3 * sizeof *padded);
    memset(padded + 3 + 2 * pairs, 0, 3 * sizeof *padded);
    for (int output = 0; output < axis->outputs; output++) {
        const int16_t *given = full->weights + (size_t)output * (size_t)full->pairs * 2;
        int first = ((full->first_even[output] + full_origin) >> 1) - 1, total = 0, largest = 1;
        for (int i = 0; i < 2 * pairs; i++)
            padded[3 + i] = given[i];
        for (int tap = 0; tap < taps; tap++)
            composed[tap] = padded[2 * tap] + 3 * (padded[2 * tap + 1] + padded[2 * tap + 2]) + padded[2 * tap + 3];
        if (first < 0) { /* outside of the image the last sample is repeated */
            composed[1] += composed[0];
            composed[0] = 0;
        }
        for (int tap = taps - 1; tap > 0 && first + tap > axis->size - 1; tap--) {
            composed[tap - 1] += composed[tap];
            composed[tap] = 0;
        }
        for (int tap = 0; tap < taps; tap++)
            composed[tap] = (composed[tap] + 2) >> 2;
        for (int tap = 0; tap < taps; tap++)
            total += composed[tap];
        for (int tap = 2; tap < taps; tap++)
            largest = composed[tap] > composed[largest] ? tap : largest;
        composed[largest] += ONE - total;
        int16_t *out = place(weights, output, first - axis->origin, taps);
        for (int tap = 0; tap < taps; tap++)
            out[tap] = (int16_t)composed[tap];
    }
}

/* Components subsampled by four, which libjpeg upsamples by repetition. */
static void fill_quarter(Weights *weights, const Axis *axis, const Weights *full, int full_origin)
{
    int composed[MAX_TAPS];
    for (int output = 0; output < axis->outputs; output++) {
        const int16_t *given = full->weights + (size_t)output * (size_t)full->pairs * 2;
        int begin = full->first_even[output] + full_origin, num = 2 * full->used_pairs;
        int first = begin >> 2, taps = ((begin + num - 1) >> 2) - first + 1;
        memset(composed, 0, (size_t)taps * sizeof *composed);
        for (int i = 0; i < num; i++)
            composed[((begin + i) >> 2) - first] += given[i];
        for (int tap = taps - 1; tap > 0 && first + tap > axis->size - 1; tap--) {
            composed[tap - 1] += composed[tap];
            composed[tap] = 0;
        }
        int16_t *out = place(weights, output, first - axis->origin, taps);
        for (int tap = 0; tap < taps; tap++)
            out[tap] = (int16_t)composed[tap];
    }
}

Status weights_subsampled(Weights *weights, const Axis *axis, const Weights *full, int full_origin)
{
    if (axis->ratio == 1)
        return weights_full(weights, axis); /* only the other axis is subsampled */
    int pairs = full->used_pairs;
    if (pairs > MAX_TAPS / 2)
        return CROP_BOX;
    Status status = weights_allocate(weights, 2 * pairs / axis->ratio + 4, axis->outputs, axis->cubic);
    if (status)
        return status;
    if (axis->ratio == 4)
        fill_quarter(weights, axis, full, full_origin);
    else if (pairs == 2)
        fill_half(weights, axis, full, full_origin, 2);
    else if (pairs == 3)
        fill_half(weights, axis, full, full_origin, 3);
    else if (pairs == 4)
        fill_half(weights, axis, full, full_origin, 4);
    else if (pairs == 5)
        fill_half(weights, axis, full, full_origin, 5);
    else
        fill_half(weights, axis, full, full_origin, pairs);
    return OK;
}

void samples_needed(const Axis *axis, int *from, int *to)
{
    int last = axis->start + axis->length - 1, low = axis->start / axis->ratio, high = last / axis->ratio;
    if (axis->ratio == 2) { /* smooth upsampling also reads the neighbor on the other side */
        low -= !(axis->start & 1);
        high += last & 1;
    }
    low = low < 0 ? 0 : low;
    high = high > axis->size - 1 ? axis->size - 1 : high;
    *from = low > high ? high : low;
    *to = high + 1;
}

/* ---- the memory that crops need ---- */

Status workspace_grow(int16_t **buffer, size_t *capacity, size_t bytes)
{
    if (*capacity >= bytes)
        return OK;
    free(*buffer);
    *buffer = NULL;
    *capacity = 0;
    void *memory = NULL;
    if (posix_memalign(&memory, 64, bytes * 3 / 2))
        return NO_MEMORY;
    memset(memory, 0, bytes * 3 / 2);
    *buffer = memory;
    *capacity = bytes * 3 / 2;
    return OK;
}

void workspace_free(Workspace *workspace)
{
    free(workspace->strip);
    for (int i = 0; i < MAX_COMPONENTS; i++)
        free(workspace->rows[i]);
    for (int i = 0; i < 2; i++) {
        free(workspace->across[i].buffer);
        free(workspace->down[i].buffer);
    }
    free(workspace);
}
