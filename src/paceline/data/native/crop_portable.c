/* The path for all CPUs: plain C that compilers vectorize well. */
#include "codec.h"

#define LOW_BITS(value, count) ((count) >= 64 ? (value) : (value) & ((1ull << (count)) - 1))
enum { STRIP_ROWS = 8, ROW_SAMPLES = 1 }; /* strips are columns of 8 samples, resized rows are rows */

typedef struct {
    int16_t values[64]; /* natural order */
} Quantizers;

#include "crop.h"

/* gcc would unroll loops of 8 before it vectorizes them */
#if defined(__GNUC__) && !defined(__clang__)
#define AS_VECTOR _Pragma("GCC unroll 1")
#define NOINLINE __attribute__((noinline))
#else
#define AS_VECTOR
#define NOINLINE
#endif

static void quantizers_load(Quantizers *quantizers, const uint8_t *table)
{
    memcpy(quantizers->values, table, sizeof quantizers->values);
}

ALWAYS_INLINE int saturate16(int value)
{
    return value < INT16_MIN ? INT16_MIN : value > INT16_MAX ? INT16_MAX : value;
}

ALWAYS_INLINE int clamp8(int value)
{
    return value < 0 ? 0 : value > 255 ? 255 : value;
}

ALWAYS_INLINE int clamp_resized(int value)
{
    return value < 0 ? 0 : value > MAX_RESIZED ? MAX_RESIZED : value;
}

enum { FIRST_ROUNDING = 1 << 10, FIRST_SHIFT = 11, LAST_ROUNDING = (1 << 17) + (128 << 18), LAST_SHIFT = 18 };

/* libjpeg's islow transform with its factors expanded. `sparse`: the last four inputs are zero. */
ALWAYS_INLINE void transform(const int16_t *restrict in, int16_t *restrict out, int last, int sparse)
{
    int rounding = last ? LAST_ROUNDING : FIRST_ROUNDING, shift = last ? LAST_SHIFT : FIRST_SHIFT;
#define STORE(row, value) out[8 * (row) + i] = (int16_t)(last ? clamp8((value) >> shift) : saturate16((value) >> shift))
    for (int i = 0; i < 8; i++) {
        int v0 = in[i], v1 = in[8 + i], v2 = in[16 + i], v3 = in[24 + i];
        int v4 = sparse ? 0 : in[32 + i], v5 = sparse ? 0 : in[40 + i];
        int v6 = sparse ? 0 : in[48 + i], v7 = sparse ? 0 : in[56 + i];
        int sum = (v0 + v4) * 8192 + rounding, difference = (v0 - v4) * 8192 + rounding;
        int low = v2 * 4433 - v6 * 10704, high = v2 * 10703 + v6 * 4433;
        int even0 = sum + high, even1 = difference + low, even2 = difference - low, even3 = sum - high;
        int odd0 = v1 * 11363 + v3 * 9633 + v5 * 6437 + v7 * 2260;
        int odd1 = v1 * 9633 - v3 * 2259 - v5 * 11362 - v7 * 6436;
        int odd2 = v1 * 6437 - v3 * 11362 + v5 * 2261 + v7 * 9633;
        int odd3 = v1 * 2260 - v3 * 6436 + v5 * 9633 - v7 * 11363;
        STORE(0, even0 + odd0);
        STORE(1, even1 + odd1);
        STORE(2, even2 + odd2);
        STORE(3, even3 + odd3);
        STORE(4, even3 - odd3);
        STORE(5, even2 - odd2);
        STORE(6, even1 - odd1);
        STORE(7, even0 - odd0);
    }
#undef STORE
}

ALWAYS_INLINE void transpose(const int16_t *restrict in, int16_t *restrict out)
{
    for (int y = 0; y < 8; y++)
        for (int x = 0; x < 8; x++)
            out[8 * x + y] = in[8 * y + x];
}

/* Columns first, then rows; the result is column by column, like strips. */
ALWAYS_INLINE void inverse_transform(const int16_t *coefficients, int16_t *samples, int sparse)
{
    int16_t columns[64], turned[64];
    transform(coefficients, columns, 0, sparse);
    transpose(columns, turned);
    transform(turned, samples, 1, sparse);
}

ALWAYS_INLINE const uint8_t *values_read(const uint8_t *at, const Head *head, int16_t *coefficients)
{
    uint64_t whole = LOW_BITS(head->mask, head->whole), halves = head->mask ^ whole;
    if (!head->wide) {
        for (; whole; whole &= whole - 1)
            coefficients[STREAM_TO_NATURAL[__builtin_ctzll(whole)]] = (int8_t)*at++;
    } else {
        for (; whole; whole &= whole - 1, at += 2)
            memcpy(&coefficients[STREAM_TO_NATURAL[__builtin_ctzll(whole)]], at, 2);
    }
    int count = 0;
    for (; halves; halves &= halves - 1, count++) {
        int bits = at[count >> 1] >> (count & 1) * 4 & 15;
        coefficients[STREAM_TO_NATURAL[__builtin_ctzll(halves)]] = (int16_t)((bits ^ 8) - 8);
    }
    return at + ((count + 1) >> 1);
}

ALWAYS_INLINE const uint8_t *block_decode(const uint8_t *at, int *dc, const Quantizers *quantizers, int16_t *samples)
{
    Head head;
    at = head_read(at, dc, &head);
    if (!head.mask) { /* the transform of a block that has only a DC */
        int column = saturate16((int16_t)((int16_t)*dc * quantizers->values[0]) * 4);
        int16_t value = (int16_t)clamp8((column * 8192 + LAST_ROUNDING) >> LAST_SHIFT);
        for (int i = 0; i < 64; i++)
            samples[i] = value;
        return at;
    }
    int16_t coefficients[64] = {0};
    at = values_read(at, &head, coefficients);
    coefficients[0] = (int16_t)*dc;
    for (int i = 0; i < 64; i++)
        coefficients[i] = (int16_t)(coefficients[i] * quantizers->values[i]);
    if (head.mask < 1 << 16) /* two tiles: rows and columns 0 to 3 */
        inverse_transform(coefficients, samples, 1);
    else
        inverse_transform(coefficients, samples, 0);
    return at;
}

/* Computes a column of eight samples from `taps` columns, four at a time. */
ALWAYS_INLINE void column_resize(const int16_t *restrict in, const int16_t *restrict w, int taps, int16_t *restrict out,
                                 int cubic)
{
    enum { ROUNDING = 64, SHIFT = 7 };
#define RESIZED(sum) (int16_t)(cubic ? clamp_resized((sum) >> SHIFT) : (sum) >> SHIFT)
#define FOUR(at, k) (in[(at) + y] * k##0 + in[(at) + 8 + y] * k##1 + in[(at) + 16 + y] * k##2 + in[(at) + 24 + y] * k##3)
    int16_t a0 = w[0], a1 = w[1], a2 = w[2], a3 = w[3];
    if (taps <= 4) {
        AS_VECTOR for (int y = 0; y < 8; y++)
            out[y] = RESIZED(ROUNDING + FOUR(0, a));
        return;
    }
    int16_t b0 = w[4], b1 = w[5], b2 = w[6], b3 = w[7];
    if (taps <= 8) {
        AS_VECTOR for (int y = 0; y < 8; y++)
            out[y] = RESIZED(ROUNDING + FOUR(0, a) + FOUR(32, b));
        return;
    }
    int sums[8];
    AS_VECTOR for (int y = 0; y < 8; y++)
        sums[y] = ROUNDING + FOUR(0, a);
    for (int tap = 4; tap < taps; tap += 4) {
        in += 32;
        w += 4;
        a0 = w[0], a1 = w[1], a2 = w[2], a3 = w[3];
        AS_VECTOR for (int y = 0; y < 8; y++)
            sums[y] += FOUR(0, a);
    }
    AS_VECTOR for (int y = 0; y < 8; y++)
        out[y] = RESIZED(sums[y]);
#undef FOUR
#undef RESIZED
}

typedef void ColumnResize(const int16_t *restrict in, const int16_t *restrict w, int taps, int16_t *restrict out);

static NOINLINE void column_bilinear(const int16_t *restrict in, const int16_t *restrict w, int taps, int16_t *restrict out)
{
    column_resize(in, w, taps, out, 0);
}

static NOINLINE void column_bicubic(const int16_t *restrict in, const int16_t *restrict w, int taps, int16_t *restrict out)
{
    column_resize(in, w, taps, out, 1);
}

static void strip_resize(const int16_t *strip, const Weights *weights, int16_t *rows, size_t pitch)
{
    ColumnResize *resize = weights->cubic ? column_bicubic : column_bilinear;
    for (int from = 0; from < weights->outputs; from += 8) { /* padded to a multiple of eight */
        int16_t columns[64];
        for (int i = 0; i < 8; i++) {
            int output = from + i, odd = weights->first[output] & 1;
            const int16_t *in = strip + (ptrdiff_t)weights->first_even[output] * 8;
            const int16_t *own = weights->weights + (size_t)output * (size_t)weights->pairs * 2;
            resize(in, own, weights->taps[output] + odd, columns + 8 * i);
        }
        for (int y = 0; y < 8; y++)
            for (int i = 0; i < 8; i++)
                rows[(size_t)y * pitch + (size_t)(from + i)] = columns[8 * i + y];
    }
}

static void rows_resize(const int16_t *rows, size_t pitch, const Weights *down, int y, int outputs, int16_t *restrict out)
{
    int sums[MAX_OUTPUT];
    const int16_t *w = down->weights + (size_t)y * (size_t)down->pairs * 2 + (down->first[y] & 1);
    rows += (ptrdiff_t)down->first[y] * (ptrdiff_t)pitch;
    for (int x = 0; x < outputs; x++)
        sums[x] = 1 << 14;
    for (int tap = 0; tap < down->taps[y]; tap++, rows += pitch) {
        const int16_t *restrict in = rows;
        int16_t weight = w[tap];
        for (int x = 0; x < outputs; x++)
            sums[x] += in[x] * weight;
    }
    for (int x = 0; x < outputs; x++)
        out[x] = (int16_t)(sums[x] >> 15);
}

static void row_finish(int16_t *const *rows, size_t pitch, const Weights *const *down, int y, int padded,
                       int num_components, uint8_t *restrict red, uint8_t *restrict green, uint8_t *restrict blue)
{
    int16_t planes[MAX_COMPONENTS][MAX_OUTPUT];
    for (int i = 0; i < num_components; i++)
        rows_resize(rows[i], pitch, down[i], y, padded, planes[i]);
    const int16_t *restrict luma = planes[0], *restrict cb = planes[1], *restrict cr = planes[2];
    if (num_components == 1) {
        for (int x = 0; x < padded; x++)
            red[x] = green[x] = blue[x] = (uint8_t)clamp8((luma[x] + 32) >> 6);
        return;
    }
    for (int x = 0; x < padded; x++) {
        int16_t u = (int16_t)(cb[x] - 128 * 64), v = (int16_t)(cr[x] - 128 * 64);
        int gray = luma[x] * 16384 + (1 << 19);
        red[x] = (uint8_t)clamp8((gray + v * 22970) >> 20);
        green[x] = (uint8_t)clamp8((gray - v * 11700 - u * 5638) >> 20);
        blue[x] = (uint8_t)clamp8((gray + u * 29032) >> 20);
    }
}

CropFunction crop_portable;

Status crop_portable(Workspace *workspace, const uint8_t *record, size_t length, const Crop *crop, uint8_t *out)
{
    return crop_record(workspace, record, length, crop, out);
}
