/* The codec: JPEG <-> quantized DCT coefficients <-> record -> crop. docs/reference/format.md specifies the record.
 *
 * jpeg_read.c       baseline JPEG -> coefficients, with huffman.h
 * jpeg_write.c      coefficients -> baseline JPEG, for export
 * coefficients.c    their order and memory
 * record.c          coefficients <-> record, and checks of records
 * checksum.c        CRC-32C of a record
 * weights.c         resize weights
 * crop.h            record -> resized crop, included by crop_portable.c and crop_avx2.c, which return identical bytes
 * thumbnail.c       record -> thumbnail of DC coefficients
 * boxes.c           boxes of random crops
 * guard.c           handles shards that are truncated while they are mapped
 * api.c             the functions that Python calls
 */
#ifndef PACELINE_CODEC_H
#define PACELINE_CODEC_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "records are little-endian, and this code does not convert them"
#endif

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

enum {
    MAX_COMPONENTS = 3,
    GROUP = 8,              /* blocks per entry of the index */
    OVERRUN = 256,          /* bytes after a record that vector loads may read; their values are ignored */
    MAX_BLOCK_BYTES = 142,  /* head 1, DC 2, masks 8, 63 values of 2 bytes, rounded up */
    MAX_BLOCKS = 1 << 21,
    MAX_OUTPUT = 4096,
    THUMBNAIL = 32,         /* side of thumbnails */
};

/* The reason of a failure; the messages are in api.c. */
typedef enum {
    OK = 0,
    JPEG_TRUNCATED,
    JPEG_SYNTAX,
    JPEG_PROGRESSIVE,
    JPEG_COMPONENTS,
    JPEG_COLORS,
    JPEG_SAMPLING,
    JPEG_HUFFMAN,
    JPEG_PRECISION,
    JPEG_TOO_LARGE,
    JPEG_RANGE,
    RECORD_HEADER,
    RECORD_CHECKSUM,
    RECORD_BLOCKS,
    RECORD_LOST,
    CROP_BOX,
    NO_MEMORY,
    NUM_STATUSES,
} Status;

/* ---- coefficients ---- */

static inline int is_sampling_factor(int sampling)
{
    return sampling == 1 || sampling == 2 || sampling == 4;
}

typedef struct {
    int blocks_w, blocks_h; /* blocks that cover the component */
    int pitch, rows;        /* the same, padded to whole MCUs: the layout of `coefficients` */
    int h, v;               /* sampling factors */
    int id, table;
    uint16_t quantizers[64]; /* natural (row by row) order */
    int16_t *coefficients;   /* in the order of a record: STREAM_TO_NATURAL */
} Component;

typedef struct {
    int width, height, num_components, h_max, v_max;
    Component components[MAX_COMPONENTS];
    int16_t *buffer;
    size_t capacity;
} Coefficients;

extern const uint8_t ZIGZAG[64];                /* zigzag -> natural */
extern const uint8_t ZIGZAG_TO_STREAM[64 + 16]; /* padded, since a corrupt run may exceed the end */

Status coefficients_allocate(Coefficients *image); /* zeroed planes of rows x pitch blocks */
void coefficients_free(Coefficients *image);
Status jpeg_read(Coefficients *image, const uint8_t *bytes, size_t length);
Status jpeg_write(const Coefficients *image, uint8_t *out, size_t capacity, size_t *length);
size_t jpeg_bound(const Coefficients *image);

/* ---- records ---- */

typedef struct {
    uint16_t blocks_w, blocks_h;
    uint8_t h, v;
    uint8_t index_width; /* 2 or 4 bytes per entry */
    uint8_t table;
    uint32_t index, data, end; /* offsets from the start of the record */
} RecordComponent;

typedef struct {
    uint32_t magic, length, checksum;
    uint16_t width, height;
    uint8_t num_components, h_max, v_max, num_tables;
    RecordComponent components[MAX_COMPONENTS];
} RecordHeader; /* then num_tables x 64 16-bit quantizers in natural order, then indexes and blocks of components */

_Static_assert(sizeof(RecordHeader) == 80, "the header is copied from the record");

#define RECORD_MAGIC 0x314C4350u /* "PCL1" */
enum { CHECKSUM_FROM = 12, TABLE_BYTES = 128 };

extern const uint8_t STREAM_TO_NATURAL[64];

static inline int tiles_from_bits(int bits)
{
    return bits == 7 ? 8 : bits;
}

typedef struct {
    uint64_t mask;   /* positions of the values; without the DC */
    int bytes_until; /* tiles whose values are whole bytes; the values of others are halves */
    int wide;        /* whole values have two bytes */
} BlockHead;

/* Reads the head of a block, and adds the difference of its DC to `dc`. Returns where its values begin. */
static inline const uint8_t *block_head(const uint8_t *at, int *dc, BlockHead *block)
{
    int head = *at++, tiles = tiles_from_bits(head & 7);
    int16_t difference;
    memcpy(&difference, at, 2);
    *dc = (int16_t)(*dc + (head & 64 ? difference : (int8_t)difference));
    at += head & 64 ? 2 : 1;
    block->mask = 0;
    memcpy(&block->mask, at, (size_t)tiles);
    block->mask &= ~1ull;
    block->bytes_until = tiles <= 2 ? 8 : tiles_from_bits(head >> 3 & 7);
    block->wide = head >> 7;
    return at + tiles;
}

size_t record_bound(const Coefficients *image);
Status record_pack(const Coefficients *image, uint8_t *out, size_t capacity, size_t *length);
Status record_unpack(const uint8_t *record, size_t length, Coefficients *image);
Status record_header(const uint8_t *record, size_t length, RecordHeader *header); /* reads and checks it */
/* Writes the mean luma (0 to 255) of THUMBNAIL x THUMBNAIL equal parts of the image. The caller must have verified the
 * checksum. */
Status record_thumbnail(const uint8_t *record, size_t length, float *out);
uint32_t record_checksum(const uint8_t *record, size_t length, int portable);

/* ---- mapped shards ---- */

void guard_install(void);
/* Returns the result of `work`, or RECORD_LOST if reading from `bytes` to `bytes + length` failed. */
Status guarded(const uint8_t *bytes, size_t length, Status (*work)(void *), void *argument);

/* ---- crops ---- */

/* Weights of a one-dimensional resize, 14 bits; those of an output sum to exactly 1 << 14, and their absolute values to
 * less than twice that, so that 16-bit weights and 32-bit sums of products never overflow. They start at the even
 * sample `first_even`, so that samples can be processed in pairs. */
typedef struct {
    int outputs;
    int pairs;      /* allocated per output */
    int used_pairs; /* maximum that any output uses */
    int cubic;      /* some weights are negative, so results may exceed the range of samples */
    int16_t *weights;
    int32_t *first_even, *first, *taps;
    void *buffer;
    size_t capacity;
} Weights;

typedef struct {
    int start, length; /* of the crop, in full-size samples */
    int ratio;         /* full-size samples per sample of this component */
    int size;          /* samples of this component in the whole image */
    int origin;        /* first sample of the component in the decoded strip */
    int outputs, mirror;
    int cubic; /* the filter: bicubic instead of bilinear */
} Axis;

Status weights_full(Weights *weights, const Axis *axis);
Status weights_subsampled(Weights *weights, const Axis *axis, const Weights *full, int full_origin);
void samples_needed(const Axis *axis, int *from, int *to); /* samples of the component that the crop covers */

typedef struct {
    int16_t *strip, *rows[MAX_COMPONENTS];
    size_t strip_capacity, rows_capacity[MAX_COMPONENTS];
    Weights across[2], down[2]; /* full-size components; subsampled ones */
} Workspace;

void workspace_free(Workspace *workspace);
Status workspace_grow(int16_t **buffer, size_t *capacity, size_t bytes);

typedef struct {
    int x, y, width, height; /* in pixels of the image */
    int mirror;
    int out_width, out_height;
    int luma_only;
    int cubic;
} Crop;

typedef struct {
    double min_area, max_area; /* fractions of the area of the image */
    double min_ratio, max_ratio;
    int64_t mirror; /* 0: never; 1: at random; 2: exactly when 1 would not */
    uint64_t mirror_begin;
} BoxLimits;

/* `begins`: per attempt, the starts of the random streams for area, ratio, x and y.
 * Boxes are x, y, width, height, mirrored. */
void random_boxes(const int32_t (*sizes)[2], const int64_t *ids, int64_t num, const BoxLimits *limits,
                  const uint64_t (*begins)[4], int attempts, int32_t (*boxes)[5]);

/* Writes three planes of out_height x out_width bytes. The caller must have verified the checksum. */
typedef Status CropFunction(Workspace *, const uint8_t *record, size_t length, const Crop *, uint8_t *out);
CropFunction crop_portable;
#if defined(__x86_64__) && defined(__GNUC__)
#define HAVE_AVX2_PATH 1
CropFunction crop_avx2;
#endif

#endif
