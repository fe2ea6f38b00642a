/* The functions that Python calls through ctypes (paceline/data/codec.py), which releases the GIL during every call.
 * ctypes needs no Python headers, and one build works with all versions of Python. */
#include <stdlib.h>

#include "codec.h"

#define EXPORT __attribute__((visibility("default")))

static const char *const TEXTS[NUM_STATUSES] = {
    [OK] = "valid",
    [JPEG_TRUNCATED] = "the JPEG ends early",
    [JPEG_SYNTAX] = "not a JPEG, or a corrupt one",
    [JPEG_PROGRESSIVE] = "a progressive, lossless or arithmetic JPEG",
    [JPEG_COMPONENTS] = "neither gray nor three color components",
    [JPEG_COLORS] = "RGB instead of YCbCr",
    [JPEG_SAMPLING] = "unusual color sampling",
    [JPEG_HUFFMAN] = "corrupt Huffman data",
    [JPEG_PRECISION] = "more than 8 bits per sample",
    [JPEG_TOO_LARGE] = "too large",
    [JPEG_RANGE] = "coefficients out of the range of baseline JPEG",
    [RECORD_HEADER] = "the record's header is corrupt",
    [RECORD_CHECKSUM] = "the record does not match its checksum",
    [RECORD_BLOCKS] = "the record's blocks are corrupt",
    [RECORD_LOST] = "the shard was truncated, or its disk failed, while it was read",
    [CROP_BOX] = "the crop is not inside the image, or the output size is not supported",
    [NO_MEMORY] = "out of memory",
};

EXPORT const char *paceline_text(int status)
{
    return status >= 0 && status < NUM_STATUSES ? TEXTS[status] : "unknown";
}

/* Bytes after a record that must be readable. */
EXPORT int paceline_overrun(void)
{
    return OVERRUN;
}

/* ---- paths ---- */

enum { PORTABLE, AVX2 };

EXPORT int paceline_has_path(int path)
{
#ifdef HAVE_AVX2_PATH
    if (path == AVX2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
               __builtin_cpu_supports("popcnt");
#endif
    return path == PORTABLE;
}

static CropFunction *crop_function(int path)
{
#ifdef HAVE_AVX2_PATH
    if (path == AVX2)
        return crop_avx2;
#endif
    return path == PORTABLE ? crop_portable : NULL;
}

/* ---- one image ---- */

EXPORT void paceline_free(void *memory)
{
    free(memory);
}

/* Packs a baseline JPEG into a record. The caller frees `*record` with paceline_free. */
EXPORT int paceline_pack(const uint8_t *jpeg, size_t jpeg_length, uint8_t **record, size_t *length)
{
    Coefficients image = {0};
    *record = NULL;
    Status status = jpeg_read(&image, jpeg, jpeg_length);
    if (!status) {
        size_t capacity = record_bound(&image);
        *record = malloc(capacity);
        status = *record ? record_pack(&image, *record, capacity, length) : NO_MEMORY;
    }
    coefficients_free(&image);
    return status;
}

static Status verify(const uint8_t *record, size_t length, RecordHeader *header, int path)
{
    Status status = record_header(record, length, header);
    if (status)
        return status;
    return record_checksum(record, length, path == PORTABLE) == header->checksum ? OK : RECORD_CHECKSUM;
}

/* Verifies a record. Writes width, height and number of components to `shape`. */
EXPORT int paceline_describe(const uint8_t *record, size_t length, int path, int32_t *shape)
{
    RecordHeader header;
    Status status = verify(record, length, &header, path);
    if (!status) {
        shape[0] = header.width;
        shape[1] = header.height;
        shape[2] = header.num_components;
    }
    return status;
}

/* Unpacks a record, followed by its overrun, into a baseline JPEG with the same coefficients. The caller frees `*jpeg`
 * with paceline_free. */
EXPORT int paceline_unpack(const uint8_t *record, size_t record_length, uint8_t **jpeg, size_t *length)
{
    Coefficients image = {0};
    RecordHeader header;
    *jpeg = NULL;
    Status status = verify(record, record_length, &header, AVX2);
    if (!status)
        status = record_unpack(record, record_length, &image);
    if (!status) {
        size_t capacity = jpeg_bound(&image);
        *jpeg = malloc(capacity);
        status = *jpeg ? jpeg_write(&image, *jpeg, capacity, length) : NO_MEMORY;
    }
    coefficients_free(&image);
    return status;
}

/* ---- many images ---- */

EXPORT Workspace *paceline_workspace(void)
{
    return calloc(1, sizeof(Workspace));
}

EXPORT void paceline_workspace_free(Workspace *workspace)
{
    workspace_free(workspace);
}

typedef struct {
    const uint8_t *bytes;
    uint64_t length; /* of the whole shard, including the overrun */
} Shard;

typedef struct {
    Workspace *workspace;
    CropFunction *function;
    int path;
    const uint8_t *record;
    size_t length;
    Crop crop;
    uint8_t *out;
    float *thumbnail;
} Job;

static Status crop_record(void *argument)
{
    const Job *job = argument;
    RecordHeader header;
    Status status = verify(job->record, job->length, &header, job->path);
    return status ? status : job->function(job->workspace, job->record, job->length, &job->crop, job->out);
}

/* Returns the status of `work` on the record at `place` = (shard, offset, length); the record is set in the job. */
static Status at_place(const Shard *shards, int64_t num_shards, const int64_t *place, Status (*work)(void *), Job *job)
{
    int64_t shard = place[0], offset = place[1], length = place[2];
    if (shard < 0 || shard >= num_shards || offset < 0 || length < 0)
        return RECORD_HEADER;
    const Shard *from = &shards[shard];
    uint64_t room = from->length < OVERRUN ? 0 : from->length - OVERRUN;
    if ((uint64_t)offset > room || (uint64_t)length > room - (uint64_t)offset)
        return RECORD_HEADER;
    job->record = from->bytes + offset;
    job->length = (size_t)length;
    return guarded(from->bytes, from->length, work, job);
}

/* Crops the image at `places[i]` = (shard, offset, length) to `boxes[i]` = (x, y, width, height, mirrored), resizes it
 * to width x height, bilinear or bicubic, and writes three planes to `out + i * 3 * width * height`. `statuses[i]` is
 * its status; the output of a failed image is undefined. Returns the number of failures. */
EXPORT int paceline_crop(Workspace *workspace, int path, const Shard *shards, int64_t num_shards, const int64_t (*places)[3],
                         const int32_t (*boxes)[5], int64_t num, int width, int height, int luma_only, int cubic,
                         uint8_t *out, int32_t *statuses)
{
    CropFunction *function = crop_function(path);
    int failures = 0;
    guard_install();
    for (int64_t i = 0; i < num; i++) {
        const int32_t *box = boxes[i];
        Crop crop = {box[0], box[1], box[2], box[3], box[4], width, height, luma_only, !!cubic};
        Job job = {.workspace = workspace, .function = function, .path = path, .crop = crop, .out = out};
        statuses[i] = function ? at_place(shards, num_shards, places[i], crop_record, &job) : RECORD_HEADER;
        failures += statuses[i] != OK;
        out += 3 * (size_t)width * (size_t)height;
    }
    return failures;
}

static Status thumbnail_of_record(void *argument)
{
    const Job *job = argument;
    RecordHeader header;
    Status status = verify(job->record, job->length, &header, job->path);
    return status ? status : record_thumbnail(job->record, job->length, job->thumbnail);
}

/* Writes the thumbnail of the image at `places[i]` to `out + i * side * side`, with the side that is returned. */
EXPORT int paceline_thumbnails(int path, const Shard *shards, int64_t num_shards, const int64_t (*places)[3], int64_t num,
                               float *out, int32_t *statuses)
{
    guard_install();
    for (int64_t i = 0; i < num; i++) {
        Job job = {.path = path, .thumbnail = out + i * THUMBNAIL * THUMBNAIL};
        statuses[i] = at_place(shards, num_shards, places[i], thumbnail_of_record, &job);
    }
    return THUMBNAIL;
}

EXPORT void paceline_random_boxes(const int32_t (*sizes)[2], const int64_t *ids, int64_t num, const BoxLimits *limits,
                                  const uint64_t (*begins)[4], int attempts, int32_t (*boxes)[5])
{
    random_boxes(sizes, ids, num, limits, begins, attempts, boxes);
}
