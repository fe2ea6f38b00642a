/* Record -> resized crop: the code shared by all paths. Before including this file, a path defines LOW_BITS,
 * STRIP_ROWS, ROW_SAMPLES and the type Quantizers; after it, the four functions declared here.
 *
 * The arithmetic is fixed, so that all paths return the same bytes: dequantize modulo 2^16; libjpeg's slow integer
 * inverse transform as 13-bit matrices, the first pass saturated to 16 bits, samples clamped to 0..255; 14-bit weights,
 * first horizontally, kept with 7 fractional bits and clamped to 0..MAX_RESIZED, then vertically, kept with 6; a 14-bit
 * color matrix and one final rounding. Bilinear results need no clamping: they are averages of samples.
 *
 * Every block starts at or before the end of its component's data and reads less than OVERRUN bytes. One comparison per
 * block therefore keeps all reads inside the record and the OVERRUN bytes after it. */

/* Loads the quantizers of a component, 64 x 16 bits in natural order, into the layout of the path. */
static void quantizers_load(Quantizers *quantizers, const uint8_t *table);

/* Decodes a block to 64 samples. Returns the start of the next one. */
ALWAYS_INLINE const uint8_t *block_decode(const uint8_t *at, int *dc, const Quantizers *quantizers, int16_t *samples);

/* Resizes one row of blocks horizontally, to STRIP_ROWS rows of ROW_SAMPLES samples per output. */
static void strip_resize(const int16_t *strip, const Weights *weights, int16_t *rows, size_t pitch);

/* Computes one output row: vertical resize and color conversion. Writes `padded` bytes to each plane. */
static void row_finish(int16_t *const *rows, size_t pitch, const Weights *const *down, int y, int padded,
                       int num_components, uint8_t *red, uint8_t *green, uint8_t *blue);

enum { MAX_RESIZED = 255 << 7 }; /* of the horizontal pass, which Pillow clamps as well */
enum { BEFORE = 64 }; /* samples before a strip, and two rows before the resized ones, that zero weights may read */

/* The head of a block: 3 bits number of tiles, 3 bits tiles with values of whole bytes, wide DC, wide values. */
typedef struct {
    uint64_t mask; /* which coefficients follow; the DC is stored separately */
    int whole;     /* coefficients below this one are whole bytes */
    int wide;      /* ... or 16 bits */
} Head;

ALWAYS_INLINE const uint8_t *head_read(const uint8_t *at, int *dc, Head *head)
{
    unsigned byte = *at, tiles = byte & 7, until = tiles <= 2 ? 7 : byte >> 3 & 7, wide_dc = byte >> 6 & 1;
    int16_t difference;
    memcpy(&difference, at + 1, 2);
    *dc += wide_dc ? difference : (int8_t)difference;
    at += 2 + wide_dc;
    tiles += (tiles + 1) >> 3; /* 7 stands for 8 */
    memcpy(&head->mask, at, 8);
    head->mask = LOW_BITS(head->mask, 8 * tiles) & ~1ull;
    head->whole = (int)(8 * (until + ((until + 1) >> 3)));
    head->wide = (int)(byte >> 7);
    return at + tiles;
}

ALWAYS_INLINE const uint8_t *block_skip(const uint8_t *at, int *dc)
{
    Head head;
    at = head_read(at, dc, &head);
    int whole = __builtin_popcountll(LOW_BITS(head.mask, head.whole)), all = __builtin_popcountll(head.mask);
    return at + (whole << head.wide) + ((all - whole + 1) >> 1);
}

typedef struct {
    int blocks_from, blocks_to, rows_from, rows_to; /* blocks that the crop covers */
    const Weights *across, *down;
} Region;

ALWAYS_INLINE uint32_t load32(const uint8_t *at)
{
    uint32_t value;
    memcpy(&value, at, 4);
    return value;
}

/* Decodes the blocks of a component that the crop covers, row by row, and resizes each row horizontally. */
static Status component_decode(Workspace *workspace, const uint8_t *record, const RecordHeader *header,
                               const RecordComponent *part, const Region *region, int16_t *rows, size_t pitch)
{
    Quantizers quantizers;
    quantizers_load(&quantizers, record + sizeof *header + part->table * TABLE_BYTES);
    const uint8_t *row_offsets = record + part->index, *group_offsets = row_offsets + 4u * part->blocks_h;
    const uint8_t *end = record + part->end;
    size_t groups = ((size_t)part->blocks_w + GROUP - 1) / GROUP;
    int16_t *strip = workspace->strip + BEFORE;
    for (int y = region->rows_from; y < region->rows_to; y++) {
        size_t group = (size_t)y * groups + (size_t)region->blocks_from / GROUP;
        uint64_t offset = load32(row_offsets + 4 * (size_t)y);
        uint16_t narrow;
        memcpy(&narrow, group_offsets + 2 * group, 2);
        offset += part->index_width == 2 ? narrow : load32(group_offsets + 4 * group);
        if (UNLIKELY(offset < part->data || offset > part->end))
            return RECORD_BLOCKS;
        const uint8_t *at = record + offset;
        int dc = 0, x = region->blocks_from / GROUP * GROUP;
        for (; x < region->blocks_from; x++) {
            if (UNLIKELY(at > end))
                return RECORD_BLOCKS;
            at = block_skip(at, &dc);
        }
        int16_t *samples = strip;
        for (; x < region->blocks_to; x++, samples += 64) {
            if (x % GROUP == 0)
                dc = 0;
            if (UNLIKELY(at > end))
                return RECORD_BLOCKS;
            at = block_decode(at, &dc, &quantizers, samples);
        }
        strip_resize(strip, region->across, rows, pitch);
        rows += STRIP_ROWS * pitch;
    }
    return OK;
}

/* Computes the blocks of a component that the crop covers, and its resize weights. */
static Status component_region(Workspace *workspace, const RecordHeader *header, int number, const Crop *crop,
                               Region *region)
{
    const RecordComponent *part = &header->components[number];
    int subsampled = part->h != header->h_max || part->v != header->v_max;
    Axis across = {
        .start = crop->x,
        .length = crop->width,
        .ratio = header->h_max / part->h,
        .size = (header->width * part->h + header->h_max - 1) / header->h_max,
        .outputs = crop->out_width,
        .mirror = crop->mirror,
        .cubic = crop->cubic,
    };
    Axis down = {
        .start = crop->y,
        .length = crop->height,
        .ratio = header->v_max / part->v,
        .size = (header->height * part->v + header->v_max - 1) / header->v_max,
        .outputs = crop->out_height,
        .cubic = crop->cubic,
    };
    int x_from, x_to, y_from, y_to;
    samples_needed(&across, &x_from, &x_to);
    samples_needed(&down, &y_from, &y_to);
    region->blocks_from = x_from / 8;
    region->blocks_to = (x_to + 7) / 8;
    region->rows_from = y_from / 8;
    region->rows_to = (y_to + 7) / 8;
    across.origin = region->blocks_from * 8;
    down.origin = region->rows_from * 8;
    Weights *horizontal = &workspace->across[subsampled], *vertical = &workspace->down[subsampled];
    region->across = horizontal;
    region->down = vertical;
    if (number == 2 || (number == 1 && !subsampled))
        return OK; /* both color components have the same sampling; without subsampling it is that of the luma */
    if (!subsampled) {
        Status status = weights_full(horizontal, &across);
        return status ? status : weights_full(vertical, &down);
    }
    Status status = weights_subsampled(horizontal, &across, &workspace->across[0], crop->x & ~7);
    return status ? status : weights_subsampled(vertical, &down, &workspace->down[0], crop->y & ~7);
}

static Status crop_record(Workspace *workspace, const uint8_t *record, size_t length, const Crop *crop, uint8_t *out)
{
    RecordHeader header;
    Status status = record_header(record, length, &header);
    if (status)
        return status;
    if (crop->x < 0 || crop->y < 0 || crop->width < 1 || crop->height < 1 || crop->width > header.width - crop->x ||
        crop->height > header.height - crop->y || crop->out_width < 1 || crop->out_width > MAX_OUTPUT ||
        crop->out_height < 1 || crop->out_height > MAX_OUTPUT)
        return CROP_BOX;
    int num_components = crop->luma_only ? 1 : header.num_components;
    int padded = (crop->out_width + 15) & ~15; /* kernels write 16 samples at a time */
    size_t pitch = (size_t)padded * ROW_SAMPLES;
    int16_t *rows[MAX_COMPONENTS];
    const Weights *down[MAX_COMPONENTS];
    for (int i = 0; i < num_components; i++) {
        Region region;
        if ((status = component_region(workspace, &header, i, crop, &region)))
            return status;
        size_t strip = (size_t)(region.blocks_to - region.blocks_from) * 64 + (size_t)region.across->pairs * 32;
        size_t height = (size_t)(region.rows_to - region.rows_from) * STRIP_ROWS + (size_t)region.down->pairs * 2;
        if ((status = workspace_grow(&workspace->strip, &workspace->strip_capacity, (strip + 2 * BEFORE) * 2)) ||
            (status = workspace_grow(&workspace->rows[i], &workspace->rows_capacity[i], (height + 6) * pitch * 2 + 64)))
            return status;
        rows[i] = workspace->rows[i] + 2 * pitch;
        down[i] = region.down;
        status = component_decode(workspace, record, &header, &header.components[i], &region, rows[i], pitch);
        if (status)
            return status;
    }
    size_t plane = (size_t)crop->out_width * (size_t)crop->out_height;
    uint8_t row[3][MAX_OUTPUT + 16];
    for (int y = 0; y < crop->out_height; y++) {
        uint8_t *target = out + (size_t)y * (size_t)crop->out_width;
        if (padded == crop->out_width) {
            row_finish(rows, pitch, down, y, padded, num_components, target, target + plane, target + 2 * plane);
        } else {
            row_finish(rows, pitch, down, y, padded, num_components, row[0], row[1], row[2]);
            for (int i = 0; i < 3; i++)
                memcpy(target + (size_t)i * plane, row[i], (size_t)crop->out_width);
        }
    }
    return OK;
}
