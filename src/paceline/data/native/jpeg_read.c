/* Baseline and extended sequential Huffman JPEG, 8 bits, gray or YCbCr, to quantized coefficients.
 *
 * Other files (progressive, arithmetic, CMYK, RGB, unusual sampling, corrupt) get a status; preparation then decodes
 * them with Pillow. */
#include <stdlib.h>

#include "codec.h"
#include "huffman.h"

static Status read_block(Bits *bits, const Huffman *dc, const Huffman *ac, int16_t *prediction, int16_t *block)
{
    refill(bits);
    int size = take_symbol(bits, dc);
    if (size < 0 || size > 15)
        return JPEG_HUFFMAN;
    *prediction = (int16_t)(*prediction + take_value(bits, size));
    block[0] = *prediction;
    if (UNLIKELY(block[0] < -1024 || block[0] > 1023))
        return JPEG_RANGE; /* impossible for 8-bit samples, and the difference would not fit into a baseline JPEG */
    for (int at = 1; at < 64;) {
        refill(bits);
        int32_t whole = ac->whole[bits->bits >> (64 - LOOKUP_BITS)];
        if (LIKELY(whole)) {
            at += whole >> 8 & 15;
            drop(bits, whole & 15);
            block[ZIGZAG_TO_STREAM[at++]] = (int16_t)(whole >> 16);
            continue;
        }
        int symbol = take_symbol(bits, ac);
        if (symbol < 0)
            return JPEG_HUFFMAN;
        int run = symbol >> 4;
        size = symbol & 15;
        if (!size) {
            if (run < 15)
                break;
            at += 16;
            continue;
        }
        if (UNLIKELY(size > 10))
            return JPEG_RANGE;
        at += run;
        block[ZIGZAG_TO_STREAM[at++]] = (int16_t)take_value(bits, size);
    }
    return OK;
}

/* ---- markers ---- */

typedef struct {
    Coefficients *image;
    const uint8_t *bytes;
    size_t length, at;
    uint16_t quantizers[4][64];
    unsigned quantizers_defined, components_read;
    Huffman dc[4], ac[4];
    int restart_interval, has_frame, has_jfif, adobe_transform;
} Reader;

static Status read_quantizers(Reader *reader, const uint8_t *at, const uint8_t *end)
{
    while (at < end) {
        int wide = *at >> 4, table = *at & 15;
        at++;
        if (table > 3 || wide > 1 || end - at < 64 * (wide + 1))
            return JPEG_SYNTAX;
        for (int i = 0; i < 64; i++)
            reader->quantizers[table][ZIGZAG[i]] = wide ? (uint16_t)(at[2 * i] << 8 | at[2 * i + 1]) : at[i];
        at += 64 * (wide + 1);
        reader->quantizers_defined |= 1u << table;
    }
    return OK;
}

static Status read_huffman_tables(Reader *reader, const uint8_t *at, const uint8_t *end)
{
    while (at < end) {
        int is_ac = *at >> 4, table = *at & 15, num_values = 0;
        if (is_ac > 1 || table > 3 || end - at < 17)
            return JPEG_SYNTAX;
        for (int i = 0; i < 16; i++)
            num_values += at[1 + i];
        if (num_values > 256 || end - at < 17 + num_values)
            return JPEG_SYNTAX;
        Huffman *huffman = is_ac ? &reader->ac[table] : &reader->dc[table];
        Status status = huffman_build(huffman, at + 1, at + 17, num_values, is_ac);
        if (status)
            return status;
        at += 17 + num_values;
    }
    return OK;
}

static Status read_frame(Reader *reader, const uint8_t *at, const uint8_t *end)
{
    Coefficients *image = reader->image;
    if (reader->has_frame || end - at < 6)
        return JPEG_SYNTAX;
    if (at[0] != 8)
        return JPEG_PRECISION;
    image->height = at[1] << 8 | at[2];
    image->width = at[3] << 8 | at[4];
    image->num_components = at[5];
    if (!image->height || !image->width)
        return JPEG_SYNTAX;
    if (image->num_components != 1 && image->num_components != 3)
        return JPEG_COMPONENTS;
    if (end - at < 6 + 3 * image->num_components)
        return JPEG_SYNTAX;
    image->h_max = image->v_max = 1;
    for (int i = 0; i < image->num_components; i++) {
        Component *component = &image->components[i];
        const uint8_t *entry = at + 6 + 3 * i;
        component->id = entry[0];
        component->h = entry[1] >> 4;
        component->v = entry[1] & 15;
        component->table = entry[2];
        if (component->table > 3)
            return JPEG_SYNTAX;
        if (image->num_components == 1)
            component->h = component->v = 1; /* sampling factors of a single component have no effect */
        if (!is_sampling_factor(component->h) || !is_sampling_factor(component->v))
            return JPEG_SAMPLING;
        image->h_max = component->h > image->h_max ? component->h : image->h_max;
        image->v_max = component->v > image->v_max ? component->v : image->v_max;
    }
    const Component *parts = image->components;
    if (parts[0].h != image->h_max || parts[0].v != image->v_max)
        return JPEG_SAMPLING;
    if (image->num_components == 3) {
        int blocks = parts[0].h * parts[0].v + 2 * parts[1].h * parts[1].v; /* per MCU: a JPEG can have at most 10 */
        int across = parts[0].h / parts[1].h, down = parts[0].v / parts[1].v;
        if (parts[1].h != parts[2].h || parts[1].v != parts[2].v || blocks > 10)
            return JPEG_SAMPLING;
        if (across + down == 6) /* 2 and 4: libjpeg upsamples this combination differently */
            return JPEG_SAMPLING;
    }
    reader->has_frame = 1;
    return coefficients_allocate(image);
}

static Status skip_to_restart(Bits *bits)
{
    for (; bits->end - bits->at >= 2; bits->at++) {
        if (bits->at[0] != 0xFF || bits->at[1] == 0)
            continue;
        if (bits->at[1] < 0xD0 || bits->at[1] > 0xD7)
            return JPEG_SYNTAX;
        bits->at += 2;
        bits->bits = 0;
        bits->count = bits->invented = 0;
        return OK;
    }
    return JPEG_TRUNCATED;
}

static Status read_scan(Reader *reader, const uint8_t *at, const uint8_t *end)
{
    Coefficients *image = reader->image;
    if (!reader->has_frame || end - at < 1)
        return JPEG_SYNTAX;
    int num_parts = *at++;
    if (num_parts < 1 || num_parts > image->num_components || end - at < 2 * num_parts + 3)
        return JPEG_SYNTAX;
    Component *parts[MAX_COMPONENTS];
    const Huffman *dc[MAX_COMPONENTS], *ac[MAX_COMPONENTS];
    int16_t predictions[MAX_COMPONENTS] = {0};
    for (int i = 0; i < num_parts; i++) {
        int which = 0, dc_table = at[2 * i + 1] >> 4, ac_table = at[2 * i + 1] & 15;
        while (which < image->num_components && image->components[which].id != at[2 * i])
            which++;
        if (which == image->num_components || reader->components_read >> which & 1)
            return JPEG_SYNTAX;
        reader->components_read |= 1u << which;
        parts[i] = &image->components[which];
        if (dc_table > 3 || ac_table > 3 || !reader->dc[dc_table].defined || !reader->ac[ac_table].defined ||
            !(reader->quantizers_defined >> parts[i]->table & 1))
            return JPEG_SYNTAX;
        dc[i] = &reader->dc[dc_table];
        ac[i] = &reader->ac[ac_table];
        memcpy(parts[i]->quantizers, reader->quantizers[parts[i]->table], sizeof parts[i]->quantizers);
    }
    /* a scan of one component has only its blocks; a scan of several has whole MCUs */
    int alone = num_parts == 1;
    int columns = alone ? parts[0]->blocks_w : parts[0]->pitch / parts[0]->h;
    int rows = alone ? parts[0]->blocks_h : parts[0]->rows / parts[0]->v;
    Bits bits = {.at = reader->bytes + reader->at, .end = reader->bytes + reader->length};
    int until_restart = reader->restart_interval;
    for (int y = 0; y < rows; y++) {
        for (int x = 0; x < columns; x++) {
            if (reader->restart_interval && until_restart-- == 0) {
                Status status = skip_to_restart(&bits);
                if (status)
                    return status;
                memset(predictions, 0, sizeof predictions);
                until_restart = reader->restart_interval - 1;
            }
            for (int i = 0; i < num_parts; i++) {
                Component *part = parts[i];
                int down = alone ? 1 : part->v, across = alone ? 1 : part->h;
                for (int v = 0; v < down; v++) {
                    for (int h = 0; h < across; h++) {
                        size_t block = (size_t)(y * down + v) * (size_t)part->pitch + (size_t)(x * across + h);
                        Status status =
                            read_block(&bits, dc[i], ac[i], &predictions[i], part->coefficients + block * 64);
                        if (status)
                            return status;
                    }
                }
            }
            if (bits.invented > 64)
                return JPEG_TRUNCATED;
        }
    }
    if (bits.invented > bits.count)
        return JPEG_TRUNCATED; /* bits after the end were used */
    reader->at = (size_t)(bits.at - reader->bytes);
    return OK;
}

static Status read_markers(Reader *reader)
{
    const uint8_t *bytes = reader->bytes;
    for (;;) {
        while (reader->at < reader->length && bytes[reader->at] != 0xFF)
            reader->at++;
        while (reader->at < reader->length && bytes[reader->at] == 0xFF)
            reader->at++;
        if (reader->at >= reader->length)
            return JPEG_TRUNCATED;
        int marker = bytes[reader->at++];
        if (marker == 0xD9)
            return JPEG_TRUNCATED; /* the end, before all components were read */
        if (marker <= 1 || (marker >= 0xD0 && marker <= 0xD8))
            continue;
        if (reader->length - reader->at < 2)
            return JPEG_TRUNCATED;
        size_t length = (size_t)bytes[reader->at] << 8 | bytes[reader->at + 1];
        if (length < 2 || reader->length - reader->at < length)
            return JPEG_TRUNCATED;
        const uint8_t *at = bytes + reader->at + 2, *end = bytes + reader->at + length;
        reader->at += length;
        Status status = OK;
        switch (marker) {
        case 0xDB:
            status = read_quantizers(reader, at, end);
            break;
        case 0xC4:
            status = read_huffman_tables(reader, at, end);
            break;
        case 0xDD:
            if (end - at < 2)
                return JPEG_SYNTAX;
            reader->restart_interval = at[0] << 8 | at[1];
            break;
        case 0xE0:
            reader->has_jfif |= end - at >= 5 && !memcmp(at, "JFIF", 5);
            break;
        case 0xEE:
            if (end - at >= 12 && !memcmp(at, "Adobe", 5))
                reader->adobe_transform = at[11];
            break;
        case 0xC0:
        case 0xC1:
            status = read_frame(reader, at, end);
            break;
        case 0xDA:
            status = read_scan(reader, at, end);
            if (!status && reader->components_read == (1u << reader->image->num_components) - 1)
                return OK;
            break;
        default:
            if (marker >= 0xC2 && marker <= 0xCF && marker != 0xC8 && marker != 0xCC)
                return JPEG_PROGRESSIVE;
        }
        if (status)
            return status;
    }
}

static int is_rgb(const Reader *reader)
{
    const Component *parts = reader->image->components;
    if (reader->image->num_components != 3)
        return 0;
    if (reader->adobe_transform >= 0)
        return reader->adobe_transform == 0;
    return !reader->has_jfif && parts[0].id == 'R' && parts[1].id == 'G' && parts[2].id == 'B';
}

Status jpeg_read(Coefficients *image, const uint8_t *bytes, size_t length)
{
    if (length < 4 || bytes[0] != 0xFF || bytes[1] != 0xD8)
        return JPEG_SYNTAX;
    Reader *reader = malloc(sizeof *reader); /* its tables may not fit on the stack of a thread */
    if (!reader)
        return NO_MEMORY;
    memset(reader, 0, offsetof(Reader, dc));
    for (int i = 0; i < 4; i++)
        reader->dc[i].defined = reader->ac[i].defined = 0;
    reader->restart_interval = reader->has_frame = reader->has_jfif = 0;
    reader->adobe_transform = -1;
    reader->image = image;
    reader->bytes = bytes;
    reader->length = length;
    reader->at = 2;
    Status status = read_markers(reader);
    if (!status && is_rgb(reader))
        status = JPEG_COLORS;
    free(reader);
    return status;
}
