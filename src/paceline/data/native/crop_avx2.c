/* The path for x86 CPUs with AVX2 (since 2013). It returns the same bytes as crop_portable.c. */
#include "codec.h"

#ifdef HAVE_AVX2_PATH

/* ---- compiled without AVX2: this runs on any CPU when the library is loaded ---- */

/* Byte shuffles that spread 8 packed values over the positions of a mask: for bytes, for bytes in the upper half of the
 * source, and for 16-bit values. */
static uint64_t spread_low[256], spread_high[256];
static uint8_t spread_wide[256][16];

__attribute__((constructor)) static void make_spreads(void)
{
    for (int mask = 0; mask < 256; mask++) {
        uint8_t low[8], high[8], next = 0;
        for (int i = 0; i < 8; i++) {
            int present = mask >> i & 1;
            low[i] = present ? next : 0x80; /* 0x80 gives zero */
            high[i] = present ? (uint8_t)(next + 8) : 0x80;
            spread_wide[mask][2 * i] = present ? (uint8_t)(2 * next) : 0x80;
            spread_wide[mask][2 * i + 1] = present ? (uint8_t)(2 * next + 1) : 0x80;
            next = (uint8_t)(next + present);
        }
        memcpy(&spread_low[mask], low, 8);
        memcpy(&spread_high[mask], high, 8);
    }
}

/* ---- compiled with AVX2 ---- */

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,bmi,bmi2,popcnt"))), apply_to = function)
#else
#pragma GCC target("avx2,bmi,bmi2,popcnt")
#endif

#include <immintrin.h>

#define LOW_BITS(value, count) _bzhi_u64(value, (unsigned)(count))
enum { STRIP_ROWS = 4, ROW_SAMPLES = 2 }; /* strips are pairs of columns, resized rows are pairs of rows */

typedef struct {
    __m256i rows[4]; /* rows 2i and 2i + 1: columns 0-3 of both in the low half, 4-7 in the high half */
    __m256i corner;  /* rows and columns 0 to 3 */
} Quantizers;

#include "crop.h"

#define ADD _mm256_add_epi32
#define SUB _mm256_sub_epi32
#define SHIFT _mm256_srai_epi32
#define PAIRS(first, second) _mm256_set1_epi32((int)((uint32_t)(uint16_t)(second) << 16 | (uint16_t)(first)))
#define SHUFFLE(a, b, control) \
    _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), control))

ALWAYS_INLINE __m128i load_two(const void *low, const void *high)
{
    __m128 both = _mm_castsi128_ps(_mm_loadl_epi64((const __m128i *)low));
    return _mm_castps_si128(_mm_loadh_pi(both, (const __m64 *)high));
}

/* The position of a coefficient in the kernel: tiles by row pairs. */
static int kernel_position(int natural)
{
    static const uint8_t within[4] = {0, 2, 1, 3};
    int row = natural >> 3, column = natural & 7;
    return (2 * (row >> 1) + (column >> 2)) * 8 + (row & 1) * 4 + within[column & 3];
}

static void quantizers_load(Quantizers *quantizers, const uint8_t *table)
{
    int16_t natural[64], kernel[64] __attribute__((aligned(32)));
    memcpy(natural, table, sizeof natural);
    for (int i = 0; i < 64; i++)
        kernel[kernel_position(i)] = natural[i];
    for (int i = 0; i < 4; i++)
        quantizers->rows[i] = _mm256_load_si256((const __m256i *)kernel + i);
    __m128i first = _mm256_castsi256_si128(quantizers->rows[0]), second = _mm256_castsi256_si128(quantizers->rows[1]);
    quantizers->corner = _mm256_setr_m128i(first, second);
}

/* ---- inverse transform ---- */

#define MADD(a, b) _mm256_madd_epi16(a, b)

/* Stores two 32-bit results as a column pair, clamped to 0..255: `first` in the low, `second` in the high 16 bits. */
ALWAYS_INLINE void store_columns(int16_t *samples, int pair, __m256i first, __m256i second)
{
    __m256i both = _mm256_blend_epi16(SHIFT(first, 18), SHIFT(second, 2), 0xAA);
    both = _mm256_min_epi16(_mm256_max_epi16(both, _mm256_setzero_si256()), _mm256_set1_epi16(255));
    _mm256_store_si256((__m256i *)samples + pair, both);
}

ALWAYS_INLINE __m256i odd_part(__m256i low, __m256i high, int a, int b, int c, int d)
{
    return ADD(MADD(low, PAIRS(a, b)), MADD(high, PAIRS(c, d)));
}

/* Transforms dequantized rows to samples: four column pairs of 8 rows. */
ALWAYS_INLINE void inverse_transform(const __m256i *rows, int16_t *samples)
{
    /* columns: inputs 0 and 4, 1 and 5, 2 and 6, 3 and 7 side by side */
    __m256i in04 = _mm256_unpacklo_epi16(rows[0], rows[2]), in15 = _mm256_unpackhi_epi16(rows[0], rows[2]);
    __m256i in26 = _mm256_unpacklo_epi16(rows[1], rows[3]), in37 = _mm256_unpackhi_epi16(rows[1], rows[3]);
    const __m256i rounding = _mm256_set1_epi32(1 << 10);
    __m256i sum = ADD(MADD(in04, PAIRS(8192, 8192)), rounding), difference = ADD(MADD(in04, PAIRS(8192, -8192)), rounding);
    __m256i low = MADD(in26, PAIRS(4433, -10704)), high = MADD(in26, PAIRS(10703, 4433));
    __m256i even0 = ADD(sum, high), even1 = ADD(difference, low), even2 = SUB(difference, low), even3 = SUB(sum, high);
    __m256i odd0 = odd_part(in15, in37, 11363, 6437, 9633, 2260), odd1 = odd_part(in15, in37, 9633, -11362, -2259, -6436);
    __m256i odd2 = odd_part(in15, in37, 6437, 2261, -11362, 9633), odd3 = odd_part(in15, in37, 2260, 9633, -6436, -11363);
#define FIRST(value) SHIFT(value, 11)
    __m256i rows01 = _mm256_packs_epi32(FIRST(ADD(even0, odd0)), FIRST(ADD(even1, odd1)));
    __m256i rows23 = _mm256_packs_epi32(FIRST(ADD(even2, odd2)), FIRST(ADD(even3, odd3)));
    __m256i rows45 = _mm256_packs_epi32(FIRST(SUB(even3, odd3)), FIRST(SUB(even2, odd2)));
    __m256i rows67 = _mm256_packs_epi32(FIRST(SUB(even1, odd1)), FIRST(SUB(even0, odd0)));
    /* rows: columns 0 and 2, 4 and 6, 1 and 3, 5 and 7 side by side */
    __m256i a = SHUFFLE(rows01, rows23, 0x88), b = SHUFFLE(rows01, rows23, 0xDD);
    __m256i c = SHUFFLE(rows45, rows67, 0x88), d = SHUFFLE(rows45, rows67, 0xDD);
    __m256i in02 = _mm256_permute2x128_si256(a, c, 0x20), in46 = _mm256_permute2x128_si256(a, c, 0x31);
    __m256i in13 = _mm256_permute2x128_si256(b, d, 0x20), in57 = _mm256_permute2x128_si256(b, d, 0x31);
    const __m256i last = _mm256_set1_epi32((1 << 17) + (128 << 18));
    even0 = ADD(ADD(MADD(in02, PAIRS(8192, 10703)), last), MADD(in46, PAIRS(8192, 4433)));
    even1 = ADD(ADD(MADD(in02, PAIRS(8192, 4433)), last), MADD(in46, PAIRS(-8192, -10704)));
    even2 = ADD(ADD(MADD(in02, PAIRS(8192, -4433)), last), MADD(in46, PAIRS(-8192, 10704)));
    even3 = ADD(ADD(MADD(in02, PAIRS(8192, -10703)), last), MADD(in46, PAIRS(8192, -4433)));
    odd0 = odd_part(in13, in57, 11363, 9633, 6437, 2260);
    odd1 = odd_part(in13, in57, 9633, -2259, -11362, -6436);
    odd2 = odd_part(in13, in57, 6437, -11362, 2261, 9633);
    odd3 = odd_part(in13, in57, 2260, -6436, 9633, -11363);
    store_columns(samples, 0, ADD(even0, odd0), ADD(even1, odd1));
    store_columns(samples, 1, ADD(even2, odd2), ADD(even3, odd3));
    store_columns(samples, 2, SUB(even3, odd3), SUB(even2, odd2));
    store_columns(samples, 3, SUB(even1, odd1), SUB(even0, odd0));
}

/* The same for coefficients in rows and columns 0 to 3 only, as in smooth areas: half the work. */
ALWAYS_INLINE void inverse_transform_corner(__m256i corner, int16_t *samples)
{
#define SIGNED_PAIRS(a, b)                                                                       \
    _mm256_setr_m128i(_mm_set1_epi32((int)((uint32_t)(uint16_t)(b) << 16 | (uint16_t)(a))),      \
                      _mm_set1_epi32((int)((uint32_t)(uint16_t)(-(b)) << 16 | (uint16_t)(-(a)))))
    __m256i upper = _mm256_permute4x64_epi64(corner, 0x44), lower = _mm256_permute4x64_epi64(corner, 0xEE);
    __m256i in02 = _mm256_unpacklo_epi16(upper, lower), in13 = _mm256_unpackhi_epi16(upper, lower);
    const __m256i rounding = _mm256_set1_epi32(1 << 10);
    /* the low half contains rows 0 to 3, the high half rows 7 to 4 */
    __m256i row0 = ADD(ADD(MADD(in02, PAIRS(8192, 10703)), rounding), MADD(in13, SIGNED_PAIRS(11363, 9633)));
    __m256i row1 = ADD(ADD(MADD(in02, PAIRS(8192, 4433)), rounding), MADD(in13, SIGNED_PAIRS(9633, -2259)));
    __m256i row2 = ADD(ADD(MADD(in02, PAIRS(8192, -4433)), rounding), MADD(in13, SIGNED_PAIRS(6437, -11362)));
    __m256i row3 = ADD(ADD(MADD(in02, PAIRS(8192, -10703)), rounding), MADD(in13, SIGNED_PAIRS(2260, -6436)));
    __m256i rows01 = _mm256_packs_epi32(FIRST(row0), FIRST(row1)), rows23 = _mm256_packs_epi32(FIRST(row2), FIRST(row3));
    const __m256i turn = _mm256_setr_epi32(0, 1, 2, 3, 3, 2, 1, 0);
    __m256i columns02 = _mm256_castps_si256(_mm256_permutevar_ps(_mm256_castsi256_ps(SHUFFLE(rows01, rows23, 0x88)), turn));
    __m256i columns13 = _mm256_castps_si256(_mm256_permutevar_ps(_mm256_castsi256_ps(SHUFFLE(rows01, rows23, 0xDD)), turn));
    const __m256i last = _mm256_set1_epi32((1 << 17) + (128 << 18));
    __m256i even0 = ADD(MADD(columns02, PAIRS(8192, 10703)), last), odd0 = MADD(columns13, PAIRS(11363, 9633));
    __m256i even1 = ADD(MADD(columns02, PAIRS(8192, 4433)), last), odd1 = MADD(columns13, PAIRS(9633, -2259));
    __m256i even2 = ADD(MADD(columns02, PAIRS(8192, -4433)), last), odd2 = MADD(columns13, PAIRS(6437, -11362));
    __m256i even3 = ADD(MADD(columns02, PAIRS(8192, -10703)), last), odd3 = MADD(columns13, PAIRS(2260, -6436));
    store_columns(samples, 0, ADD(even0, odd0), ADD(even1, odd1));
    store_columns(samples, 1, ADD(even2, odd2), ADD(even3, odd3));
    store_columns(samples, 2, SUB(even3, odd3), SUB(even2, odd2));
    store_columns(samples, 3, SUB(even1, odd1), SUB(even0, odd0));
}

/* ---- unpacking ---- */

ALWAYS_INLINE __m256i with_dc(__m256i values, int dc)
{
    return _mm256_or_si256(values, _mm256_zextsi128_si256(_mm_cvtsi32_si128((uint16_t)dc)));
}

ALWAYS_INLINE const uint8_t *corner_read(const uint8_t *at, unsigned mask, int dc, const Quantizers *quantizers, __m256i *out)
{
    unsigned first = (unsigned)__builtin_popcount(mask & 255);
    /* the bytes of the second tile follow those of the first, so offset its shuffle; zeros (0x80) stay zeros */
    uint64_t second = spread_low[mask >> 8] + first * 0x0101010101010101ull;
    __m128i control = _mm_set_epi64x((long long)second, (long long)spread_low[mask & 255]);
    __m128i bytes = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)at), control);
    *out = _mm256_mullo_epi16(with_dc(_mm256_cvtepi8_epi16(bytes), dc), quantizers->corner);
    return at + __builtin_popcount(mask);
}

/* Unpacks 32 values of 4 bits to bytes. */
ALWAYS_INLINE void halves_unpack(const uint8_t *at, uint8_t *out)
{
    const __m256i signs = _mm256_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6,
                                           7, -8, -7, -6, -5, -4, -3, -2, -1);
    __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)at));
    bytes = _mm256_and_si256(_mm256_or_si256(bytes, _mm256_slli_epi16(bytes, 4)), _mm256_set1_epi8(15));
    _mm256_store_si256((__m256i *)out, _mm256_shuffle_epi8(signs, bytes));
}

/* Unpacks values of 4 bits; a tile reads 8 bytes from its first value on. */
ALWAYS_INLINE void tail_unpack(const uint8_t *at, int count, uint8_t *unpacked)
{
    halves_unpack(at, unpacked);
    if (UNLIKELY(count > 24))
        halves_unpack(at + 16, unpacked + 32);
}

enum { UNPACKED_BYTES = 64 + 16 };

/* Like rows_read for values of 16 bits, which occur at strong edges of high-quality JPEGs. */
static __attribute__((noinline)) const uint8_t *rows_read_wide(const uint8_t *at, uint64_t mask, int whole_until, int dc,
                                                               const Quantizers *quantizers, __m256i *rows)
{
    static const uint8_t left[4] = {0, 1, 3, 5}, right[4] = {2, 4, 6, 7};
    int whole = __builtin_popcountll(LOW_BITS(mask, whole_until)), halves = __builtin_popcountll(mask) - whole;
    uint8_t unpacked[UNPACKED_BYTES] __attribute__((aligned(32)));
    tail_unpack(at + 2 * whole, halves, unpacked);
    __m128i tiles[8];
    for (int tile = 0; tile < 8; tile++) {
        int before = __builtin_popcountll(LOW_BITS(mask, 8 * tile));
        unsigned present = mask >> 8 * tile & 255;
        if (8 * tile < whole_until) {
            __m128i control = _mm_loadu_si128((const __m128i *)spread_wide[present]);
            tiles[tile] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(at + 2 * before)), control);
        } else {
            __m128i bytes = _mm_loadl_epi64((const __m128i *)(unpacked + before - whole));
            __m128i control = _mm_loadl_epi64((const __m128i *)&spread_low[present]);
            tiles[tile] = _mm_cvtepi8_epi16(_mm_shuffle_epi8(bytes, control));
        }
    }
    for (int i = 0; i < 4; i++) {
        __m256i values = _mm256_setr_m128i(tiles[left[i]], tiles[right[i]]);
        rows[i] = _mm256_mullo_epi16(i ? values : with_dc(values, dc), quantizers->rows[i]);
    }
    return at + 2 * whole + ((halves + 1) >> 1);
}

ALWAYS_INLINE const uint8_t *rows_read(const uint8_t *at, uint64_t mask, int whole_until, int dc,
                                       const Quantizers *quantizers, __m256i *rows)
{
    int whole = __builtin_popcountll(LOW_BITS(mask, whole_until)), halves = __builtin_popcountll(mask) - whole;
    uint8_t unpacked[UNPACKED_BYTES] __attribute__((aligned(32)));
    tail_unpack(at + whole, halves, unpacked);
    /* the values of a tile are in the record or in `unpacked`; integers, since C pointers must not cross objects */
    uintptr_t in_record = (uintptr_t)at, in_unpacked = (uintptr_t)unpacked - (uintptr_t)whole, from[8];
    for (int tile = 0; tile < 8; tile++) {
        uintptr_t before = tile ? (uintptr_t)__builtin_popcountll(LOW_BITS(mask, 8 * tile)) : 0;
        from[tile] = (8 * tile < whole_until ? in_record : in_unpacked) + before;
    }
#define ROW_PAIR(number, left, right)                                                                            \
    {                                                                                                            \
        __m128i bytes = load_two((const void *)from[left], (const void *)from[right]);                           \
        __m128i control = load_two(&spread_low[mask >> 8 * left & 255], &spread_high[mask >> 8 * right & 255]);  \
        __m256i values = _mm256_cvtepi8_epi16(_mm_shuffle_epi8(bytes, control));                                 \
        rows[number] = _mm256_mullo_epi16(number ? values : with_dc(values, dc), quantizers->rows[number]);      \
    }
    ROW_PAIR(0, 0, 2)
    ROW_PAIR(1, 1, 4)
    ROW_PAIR(2, 3, 6)
    ROW_PAIR(3, 5, 7)
#undef ROW_PAIR
    return at + whole + ((halves + 1) >> 1);
}

ALWAYS_INLINE const uint8_t *block_decode(const uint8_t *at, int *dc, const Quantizers *quantizers, int16_t *samples)
{
    Head head;
    unsigned first = *at;
    at = head_read(at, dc, &head);
    if ((first & 0x87) <= 2) { /* at most two tiles, no wide values */
        __m256i corner;
        at = corner_read(at, (unsigned)head.mask, *dc, quantizers, &corner);
        inverse_transform_corner(corner, samples);
    } else {
        __m256i rows[4];
        if (UNLIKELY(head.wide))
            at = rows_read_wide(at, head.mask, head.whole, *dc, quantizers, rows);
        else
            at = rows_read(at, head.mask, head.whole, *dc, quantizers, rows);
        inverse_transform(rows, samples);
    }
    return at;
}

/* ---- resizing ---- */

ALWAYS_INLINE __m256i two_weights(const int16_t *weights)
{
    int32_t both;
    memcpy(&both, weights, 4);
    return _mm256_set1_epi32(both);
}

ALWAYS_INLINE __m256i pack_resized(__m256i first, __m256i second, int cubic)
{
    __m256i both = _mm256_packs_epi32(first, second);
    if (cubic) /* known to the compiler */
        both = _mm256_min_epi16(_mm256_max_epi16(both, _mm256_setzero_si256()), _mm256_set1_epi16(MAX_RESIZED));
    return both;
}

/* Eight outputs at a time, each a column of 8 rows, turned into row pairs. */
ALWAYS_INLINE void strip_resize_by(const int16_t *strip, const Weights *weights, int16_t *rows, size_t pitch, int pairs,
                                   int cubic)
{
    const __m256i rounding = _mm256_set1_epi32(64);
    for (int from = 0; from < weights->outputs; from += 8) {
        __m256i columns[8];
        for (int i = 0; i < 8; i++) {
            const int16_t *in = strip + (ptrdiff_t)weights->first_even[from + i] * 8;
            const int16_t *own = weights->weights + (size_t)(from + i) * (size_t)weights->pairs * 2;
            __m256i sum = rounding;
            for (int pair = 0; pair < pairs; pair++)
                sum = ADD(sum, MADD(_mm256_load_si256((const __m256i *)in + pair), two_weights(own + 2 * pair)));
            columns[i] = SHIFT(sum, 7);
        }
        __m256i p0 = pack_resized(columns[0], columns[1], cubic), p1 = pack_resized(columns[2], columns[3], cubic);
        __m256i p2 = pack_resized(columns[4], columns[5], cubic), p3 = pack_resized(columns[6], columns[7], cubic);
        __m256i a = SHUFFLE(p0, p1, 0x88), b = SHUFFLE(p0, p1, 0xDD), c = SHUFFLE(p2, p3, 0x88), d = SHUFFLE(p2, p3, 0xDD);
        int16_t *out = rows + 2 * from;
        _mm256_storeu_si256((__m256i *)out, _mm256_permute2x128_si256(a, c, 0x20));
        _mm256_storeu_si256((__m256i *)(out + pitch), _mm256_permute2x128_si256(b, d, 0x20));
        _mm256_storeu_si256((__m256i *)(out + 2 * pitch), _mm256_permute2x128_si256(a, c, 0x31));
        _mm256_storeu_si256((__m256i *)(out + 3 * pitch), _mm256_permute2x128_si256(b, d, 0x31));
    }
}

static void strip_resize(const int16_t *strip, const Weights *weights, int16_t *rows, size_t pitch)
{
#define CASE(pairs, cubic)                                            \
    case 2 * (pairs) + (cubic):                                       \
        strip_resize_by(strip, weights, rows, pitch, (pairs), cubic); \
        return;
    int pairs = weights->used_pairs < 2 ? 2 : weights->used_pairs;
    switch (2 * pairs + weights->cubic) { /* the compiler unrolls loops of a known length */
        CASE(2, 0)
        CASE(3, 0)
        CASE(4, 0)
        CASE(3, 1)
        CASE(4, 1)
        CASE(5, 1)
    default:
        break;
    }
#undef CASE
    if (weights->cubic)
        strip_resize_by(strip, weights, rows, pitch, pairs, 1);
    else
        strip_resize_by(strip, weights, rows, pitch, pairs, 0);
}

ALWAYS_INLINE __m256i rows_resize(const int16_t *rows, size_t pitch, const int16_t *weights, int pairs)
{
    __m256i low = _mm256_set1_epi32(1 << 14), high = low;
    for (int pair = 0; pair < pairs; pair++, rows += pitch) {
        __m256i both = two_weights(weights + 2 * pair);
        low = ADD(low, MADD(_mm256_loadu_si256((const __m256i *)rows), both));
        high = ADD(high, MADD(_mm256_loadu_si256((const __m256i *)(rows + 16)), both));
    }
    return _mm256_packs_epi32(SHIFT(low, 15), SHIFT(high, 15));
}

ALWAYS_INLINE void row_finish_by(int16_t *const *rows, size_t pitch, const Weights *const *down, int y, int padded,
                                 int num_components, uint8_t *red, uint8_t *green, uint8_t *blue, int luma_pairs,
                                 int color_pairs)
{
    const __m256i middle = _mm256_set1_epi16(128 * 64), rounding = _mm256_set1_epi32(1 << 19);
    const __m256i half = _mm256_set1_epi16(32), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const int16_t *in[MAX_COMPONENTS], *weights[MAX_COMPONENTS];
    for (int i = 0; i < num_components; i++) {
        in[i] = rows[i] + (ptrdiff_t)(down[i]->first_even[y] >> 1) * (ptrdiff_t)pitch;
        weights[i] = down[i]->weights + (size_t)y * (size_t)down[i]->pairs * 2;
    }
    for (int x = 0; x < padded; x += 16) {
        __m256i luma = rows_resize(in[0] + 2 * x, pitch, weights[0], luma_pairs), r, g, b;
        if (num_components == 1) {
            r = g = b = _mm256_srai_epi16(_mm256_add_epi16(luma, half), 6);
        } else {
            __m256i u = _mm256_sub_epi16(rows_resize(in[1] + 2 * x, pitch, weights[1], color_pairs), middle);
            __m256i v = _mm256_sub_epi16(rows_resize(in[2] + 2 * x, pitch, weights[2], color_pairs), middle);
            __m256i yv0 = _mm256_unpacklo_epi16(luma, v), yv1 = _mm256_unpackhi_epi16(luma, v);
            __m256i yu0 = _mm256_unpacklo_epi16(luma, u), yu1 = _mm256_unpackhi_epi16(luma, u);
            /* green needs three products and the rounding, 32 * 16384 */
            __m256i u0 = _mm256_unpacklo_epi16(u, half), u1 = _mm256_unpackhi_epi16(u, half);
#define COLOUR(low, high) _mm256_packs_epi32(SHIFT(low, 20), SHIFT(high, 20))
            r = COLOUR(ADD(MADD(yv0, PAIRS(16384, 22970)), rounding), ADD(MADD(yv1, PAIRS(16384, 22970)), rounding));
            g = COLOUR(ADD(MADD(yv0, PAIRS(16384, -11700)), MADD(u0, PAIRS(-5638, 16384))),
                       ADD(MADD(yv1, PAIRS(16384, -11700)), MADD(u1, PAIRS(-5638, 16384))));
            b = COLOUR(ADD(MADD(yu0, PAIRS(16384, 29032)), rounding), ADD(MADD(yu1, PAIRS(16384, 29032)), rounding));
        }
        __m256i red_green = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(r, g), order);
        __m256i blue_twice = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(b, b), order);
        _mm_storeu_si128((__m128i *)(red + x), _mm256_castsi256_si128(red_green));
        _mm_storeu_si128((__m128i *)(green + x), _mm256_extracti128_si256(red_green, 1));
        _mm_storeu_si128((__m128i *)(blue + x), _mm256_castsi256_si128(blue_twice));
    }
}

static void row_finish(int16_t *const *rows, size_t pitch, const Weights *const *down, int y, int padded,
                       int num_components, uint8_t *red, uint8_t *green, uint8_t *blue)
{
    int luma = down[0]->used_pairs < 2 ? 2 : down[0]->used_pairs;
    int color = num_components == 1 ? 0 : down[1]->used_pairs < 2 ? 2 : down[1]->used_pairs;
#define CASE(a, b)                                                                             \
    case a * 8 + b:                                                                            \
        row_finish_by(rows, pitch, down, y, padded, 3, red, green, blue, a, b);                \
        return;
    if (num_components == 3 && luma <= 5 && color <= 5) {
        switch (luma * 8 + color) { /* the usual cases */
            CASE(2, 2)
            CASE(2, 3)
            CASE(2, 4)
            CASE(3, 2)
            CASE(3, 3)
            CASE(3, 4)
            CASE(4, 3)
            CASE(4, 4)
            CASE(5, 4)
            CASE(5, 5)
        default:
            break;
        }
    }
#undef CASE
    row_finish_by(rows, pitch, down, y, padded, num_components, red, green, blue, luma, color);
}

Status crop_avx2(Workspace *workspace, const uint8_t *record, size_t length, const Crop *crop, uint8_t *out)
{
    return crop_record(workspace, record, length, crop, out);
}

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
