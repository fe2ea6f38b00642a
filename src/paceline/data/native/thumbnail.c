/* Thumbnails from DC coefficients: the mean of every luma block, without decoding its pixels. */
#include "codec.h"

/* Returns the block after `at`, and adds the difference of its DC to `dc`. */
static const uint8_t *skip_block(const uint8_t *at, int *dc)
{
    BlockHead head;
    at = block_head(at, dc, &head);
    uint64_t whole = head.bytes_until == 8 ? head.mask : head.mask & ((1ull << 8 * head.bytes_until) - 1);
    return at + __builtin_popcountll(whole) * (1 + head.wide) + (__builtin_popcountll(head.mask ^ whole) + 1) / 2;
}

/* Distributes `value`, of block `number`, over the outputs that the block overlaps. Lengths are in 1/THUMBNAIL pixels, so
 * that overlaps are whole numbers and sums exact. */
static void spread(int64_t value, int number, int size, int64_t *outputs, size_t stride)
{
    int from = 8 * THUMBNAIL * number, to = from + 8 * THUMBNAIL;
    if (to > THUMBNAIL * size)
        to = THUMBNAIL * size;
    for (int i = from / size; from < to; i++) {
        int end = (i + 1) * size < to ? (i + 1) * size : to;
        outputs[(size_t)i * stride] += value * (end - from);
        from = end;
    }
}

Status record_thumbnail(const uint8_t *record, size_t length, float *out)
{
    RecordHeader header;
    Status status = record_header(record, length, &header);
    if (status)
        return status;
    const RecordComponent *luma = &header.components[0];
    const uint8_t *at = record + luma->data, *end = record + luma->end;
    uint16_t quantizer;
    memcpy(&quantizer, record + sizeof header + luma->table * TABLE_BYTES, 2);
    int64_t sums[THUMBNAIL * THUMBNAIL] = {0};
    for (int y = 0; y < luma->blocks_h; y++) {
        int64_t row[THUMBNAIL] = {0};
        int dc = 0;
        for (int x = 0; x < luma->blocks_w; x++) {
            if (x % GROUP == 0)
                dc = 0;
            if (at >= end)
                return RECORD_BLOCKS;
            at = skip_block(at, &dc);
            spread(dc, x, header.width, row, 1);
        }
        for (int x = 0; x < THUMBNAIL; x++)
            spread(row[x], y, header.height, sums + x, THUMBNAIL);
    }
    if (at != end)
        return RECORD_BLOCKS;
    double scale = quantizer / 8.0 / ((double)header.width * header.height);
    for (int i = 0; i < THUMBNAIL * THUMBNAIL; i++)
        out[i] = (float)((double)sums[i] * scale + 128);
    return OK;
}
