/* Records: coefficients with random access by block. docs/reference/format.md is the specification. */
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "codec.h"

/* Encodes 0 to 6 or 8 tiles in three bits; seven is never needed. */
static int to_bits(int tiles)
{
    return tiles >= 7 ? 7 : tiles;
}

/* ---- writing ---- */

/* Which of 64 values have a magnitude above 0, 7 and 127: a bit per value. */
typedef struct {
    uint64_t above_0, above_7, above_127;
} Magnitudes;

static Magnitudes magnitudes(const int16_t *values)
{
    Magnitudes found = {0};
#ifdef __SSE2__
    const __m128i zero = _mm_setzero_si128(), seven = _mm_set1_epi8(7);
    for (int i = 0; i < 64; i += 16) {
        __m128i low = _mm_loadu_si128((const __m128i *)(values + i));
        __m128i high = _mm_loadu_si128((const __m128i *)(values + i + 8));
        low = _mm_max_epi16(low, _mm_subs_epi16(zero, low));
        high = _mm_max_epi16(high, _mm_subs_epi16(zero, high));
        __m128i bytes = _mm_packs_epi16(low, high); /* at most 127 */
        found.above_0 |= (uint64_t)_mm_movemask_epi8(_mm_cmpgt_epi8(bytes, zero)) << i;
        found.above_7 |= (uint64_t)_mm_movemask_epi8(_mm_cmpgt_epi8(bytes, seven)) << i;
        found.above_127 |= (uint64_t)_mm_movemask_epi8(_mm_packus_epi16(low, high)) << i;
    }
#else
    for (int i = 0; i < 64; i++) {
        int magnitude = values[i] < 0 ? -values[i] : values[i];
        found.above_0 |= (uint64_t)(magnitude > 0) << i;
        found.above_7 |= (uint64_t)(magnitude > 7) << i;
        found.above_127 |= (uint64_t)(magnitude > 127) << i;
    }
#endif
    return found;
}

/* Returns how many tiles there are up to the last one that has a bit. */
static int tiles_until(uint64_t mask)
{
    return mask ? 8 - (__builtin_clzll(mask) >> 3) : 0;
}

static uint8_t *pack_block(uint8_t *out, const int16_t *values, int *previous_dc)
{
    const uint64_t without_dc = ~1ull; /* which is stored separately */
    Magnitudes found = magnitudes(values);
    uint64_t mask = found.above_0 & without_dc;
    int tiles = tiles_until(mask), bytes_until = tiles_until(found.above_7 & without_dc);
    int wide = !!(found.above_127 & without_dc);
    int difference = (int16_t)(values[0] - *previous_dc);
    *previous_dc = values[0];
    /* blocks of at most two tiles use whole bytes only, since the decoder has a fast path for them */
    if (tiles <= 2)
        bytes_until = 8;
    int tile_bits = to_bits(tiles), until_bits = to_bits(bytes_until);
    tiles = tiles_from_bits(tile_bits);
    bytes_until = tiles_from_bits(until_bits);
    int wide_dc = difference != (int8_t)difference;

    *out++ = (uint8_t)(tile_bits | until_bits << 3 | wide_dc << 6 | wide << 7);
    int16_t difference16 = (int16_t)difference;
    memcpy(out, &difference16, 2);
    out += 1 + wide_dc;
    memcpy(out, &mask, 8);
    out += tiles;
    uint64_t whole = bytes_until == 8 ? mask : mask & ((1ull << 8 * bytes_until) - 1), halves = mask ^ whole;
    for (; whole; whole &= whole - 1) {
        int16_t value = values[__builtin_ctzll(whole)];
        memcpy(out, &value, 2);
        out += 1 + wide;
    }
    while (halves) {
        int pair = values[__builtin_ctzll(halves)] & 15;
        halves &= halves - 1;
        if (halves) {
            pair |= (values[__builtin_ctzll(halves)] & 15) << 4;
            halves &= halves - 1;
        }
        *out++ = (uint8_t)pair;
    }
    return out;
}

/* Writes index and blocks of one component. Returns 0 if an offset does not fit into an index entry of this width. */
static int pack_component(const Component *part, RecordComponent *entry, uint8_t *record, size_t from)
{
    size_t groups = ((size_t)part->blocks_w + GROUP - 1) / GROUP, rows = (size_t)part->blocks_h;
    uint8_t *row_offsets = record + from, *group_offsets = row_offsets + 4 * rows;
    uint8_t *at = group_offsets + rows * groups * entry->index_width;
    entry->index = (uint32_t)from;
    entry->data = (uint32_t)(at - record);
    for (size_t y = 0; y < rows; y++) {
        uint32_t row_offset = (uint32_t)(at - record);
        memcpy(row_offsets + 4 * y, &row_offset, 4);
        int dc = 0;
        for (size_t x = 0; x < (size_t)part->blocks_w; x++) {
            if (x % GROUP == 0) {
                uint32_t offset = (uint32_t)(at - record) - row_offset;
                if (entry->index_width == 2 && offset > UINT16_MAX)
                    return 0;
                memcpy(group_offsets + (y * groups + x / GROUP) * entry->index_width, &offset, entry->index_width);
                dc = 0;
            }
            at = pack_block(at, part->coefficients + (y * (size_t)part->pitch + x) * 64, &dc);
        }
    }
    entry->end = (uint32_t)(at - record);
    return 1;
}

size_t record_bound(const Coefficients *image)
{
    size_t bytes = sizeof(RecordHeader) + MAX_COMPONENTS * TABLE_BYTES + OVERRUN;
    for (int i = 0; i < image->num_components; i++) {
        const Component *part = &image->components[i];
        size_t blocks = (size_t)part->blocks_w * (size_t)part->blocks_h;
        bytes += blocks * MAX_BLOCK_BYTES + (size_t)part->blocks_h * (8 + 4 * ((size_t)part->blocks_w / GROUP));
    }
    return bytes;
}

Status record_pack(const Coefficients *image, uint8_t *out, size_t capacity, size_t *length)
{
    if (capacity < record_bound(image))
        return NO_MEMORY;
    RecordHeader header = {
        .magic = RECORD_MAGIC,
        .width = (uint16_t)image->width,
        .height = (uint16_t)image->height,
        .num_components = (uint8_t)image->num_components,
        .h_max = (uint8_t)image->h_max,
        .v_max = (uint8_t)image->v_max,
    };
    uint8_t *tables = out + sizeof header;
    for (int i = 0; i < image->num_components; i++) {
        const uint16_t *quantizers = image->components[i].quantizers;
        int table = 0;
        while (table < header.num_tables && memcmp(tables + table * TABLE_BYTES, quantizers, TABLE_BYTES))
            table++;
        if (table == header.num_tables)
            memcpy(tables + TABLE_BYTES * header.num_tables++, quantizers, TABLE_BYTES);
        header.components[i].table = (uint8_t)table;
    }
    size_t at = sizeof header + (size_t)header.num_tables * TABLE_BYTES;
    for (int i = 0; i < image->num_components; i++) {
        const Component *part = &image->components[i];
        RecordComponent *entry = &header.components[i];
        entry->blocks_w = (uint16_t)part->blocks_w;
        entry->blocks_h = (uint16_t)part->blocks_h;
        entry->h = (uint8_t)part->h;
        entry->v = (uint8_t)part->v;
        entry->index_width = 2;
        if (!pack_component(part, entry, out, at)) {
            entry->index_width = 4;
            pack_component(part, entry, out, at);
        }
        at = entry->end;
    }
    header.length = (uint32_t)at;
    memcpy(out, &header, sizeof header);
    header.checksum = record_checksum(out, at, 0);
    memcpy(out, &header, sizeof header);
    *length = at;
    return OK;
}

/* ---- reading ---- */

static int component_is_valid(const RecordHeader *header, int number)
{
    const RecordComponent *part = &header->components[number];
    if (!is_sampling_factor(part->h) || !is_sampling_factor(part->v) || part->h > header->h_max || part->v > header->v_max)
        return 0;
    if (number == 0 && (part->h != header->h_max || part->v != header->v_max))
        return 0;
    if (number == 2 && (part->h != header->components[1].h || part->v != header->components[1].v))
        return 0;
    if ((part->index_width != 2 && part->index_width != 4) || part->table >= header->num_tables)
        return 0;
    int width = (header->width * part->h + header->h_max - 1) / header->h_max;
    int height = (header->height * part->v + header->v_max - 1) / header->v_max;
    if (part->blocks_w != (width + 7) / 8 || part->blocks_h != (height + 7) / 8)
        return 0;
    uint64_t groups = ((uint64_t)part->blocks_w + GROUP - 1) / GROUP;
    uint64_t index_bytes = part->blocks_h * (4 + groups * part->index_width);
    uint64_t from = sizeof *header + (uint64_t)header->num_tables * TABLE_BYTES;
    return part->index >= from && part->index + index_bytes <= part->data && part->data <= part->end &&
           part->end <= header->length;
}

Status record_header(const uint8_t *record, size_t length, RecordHeader *header)
{
    if (length < sizeof *header)
        return RECORD_HEADER;
    memcpy(header, record, sizeof *header);
    if (header->magic != RECORD_MAGIC || header->length != length || !header->width || !header->height)
        return RECORD_HEADER;
    if (header->num_components != 1 && header->num_components != 3)
        return RECORD_HEADER;
    if (!is_sampling_factor(header->h_max) || !is_sampling_factor(header->v_max) || header->num_tables > MAX_COMPONENTS)
        return RECORD_HEADER;
    for (int i = 0; i < header->num_components; i++)
        if (!component_is_valid(header, i))
            return RECORD_HEADER;
    return OK;
}

static const uint8_t *unpack_block(const uint8_t *at, int *dc, int16_t *block)
{
    BlockHead head;
    at = block_head(at, dc, &head);
    int second_half = 0;
    for (uint64_t mask = head.mask; mask; mask &= mask - 1) {
        int position = __builtin_ctzll(mask);
        int16_t value;
        if (position < 8 * head.bytes_until) {
            memcpy(&value, at, 2);
            value = head.wide ? value : (int8_t)value;
            at += 1 + head.wide;
        } else {
            int bits = second_half ? *at >> 4 : *at & 15;
            value = (int16_t)((bits ^ 8) - 8);
            at += second_half;
            second_half ^= 1;
        }
        block[position] = value;
    }
    block[0] = (int16_t)*dc;
    return at + second_half;
}

Status record_unpack(const uint8_t *record, size_t length, Coefficients *image)
{
    RecordHeader header;
    Status status = record_header(record, length, &header);
    if (status)
        return status;
    image->width = header.width;
    image->height = header.height;
    image->num_components = header.num_components;
    image->h_max = header.h_max;
    image->v_max = header.v_max;
    for (int i = 0; i < header.num_components; i++) {
        image->components[i].h = header.components[i].h;
        image->components[i].v = header.components[i].v;
    }
    if ((status = coefficients_allocate(image)))
        return status;
    for (int i = 0; i < header.num_components; i++) {
        const RecordComponent *entry = &header.components[i];
        Component *part = &image->components[i];
        memcpy(part->quantizers, record + sizeof header + entry->table * TABLE_BYTES, TABLE_BYTES);
        const uint8_t *at = record + entry->data, *end = record + entry->end;
        for (int y = 0; y < part->blocks_h; y++) {
            int dc = 0;
            for (int x = 0; x < part->blocks_w; x++) {
                if (x % GROUP == 0)
                    dc = 0;
                if (at >= end)
                    return RECORD_BLOCKS;
                at = unpack_block(at, &dc, part->coefficients + ((size_t)y * (size_t)part->pitch + (size_t)x) * 64);
            }
        }
        if (at != end)
            return RECORD_BLOCKS;
    }
    return OK;
}
