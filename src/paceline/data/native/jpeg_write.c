/* Quantized coefficients to a baseline JPEG with the standard Huffman tables, for export. */
#include "codec.h"

/* Tables K.3 to K.6 of the JPEG standard: number of codes of each length, then the symbols. */
static const uint8_t DC_COUNTS[2][16] = {{0, 1, 5, 1, 1, 1, 1, 1, 1}, {0, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1}};
static const uint8_t DC_SYMBOLS[12] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
static const uint8_t AC_COUNTS[2][16] = {
    {0, 2, 1, 3, 3, 2, 4, 3, 5, 5, 4, 4, 0, 0, 1, 0x7d},
    {0, 2, 1, 2, 4, 4, 3, 4, 7, 5, 4, 4, 0, 1, 2, 0x77},
};
static const uint8_t AC_SYMBOLS[2][162] = {
    {0x01, 0x02, 0x03, 0x00, 0x04, 0x11, 0x05, 0x12, 0x21, 0x31, 0x41, 0x06, 0x13, 0x51, 0x61, 0x07, 0x22, 0x71,
     0x14, 0x32, 0x81, 0x91, 0xa1, 0x08, 0x23, 0x42, 0xb1, 0xc1, 0x15, 0x52, 0xd1, 0xf0, 0x24, 0x33, 0x62, 0x72,
     0x82, 0x09, 0x0a, 0x16, 0x17, 0x18, 0x19, 0x1a, 0x25, 0x26, 0x27, 0x28, 0x29, 0x2a, 0x34, 0x35, 0x36, 0x37,
     0x38, 0x39, 0x3a, 0x43, 0x44, 0x45, 0x46, 0x47, 0x48, 0x49, 0x4a, 0x53, 0x54, 0x55, 0x56, 0x57, 0x58, 0x59,
     0x5a, 0x63, 0x64, 0x65, 0x66, 0x67, 0x68, 0x69, 0x6a, 0x73, 0x74, 0x75, 0x76, 0x77, 0x78, 0x79, 0x7a, 0x83,
     0x84, 0x85, 0x86, 0x87, 0x88, 0x89, 0x8a, 0x92, 0x93, 0x94, 0x95, 0x96, 0x97, 0x98, 0x99, 0x9a, 0xa2, 0xa3,
     0xa4, 0xa5, 0xa6, 0xa7, 0xa8, 0xa9, 0xaa, 0xb2, 0xb3, 0xb4, 0xb5, 0xb6, 0xb7, 0xb8, 0xb9, 0xba, 0xc2, 0xc3,
     0xc4, 0xc5, 0xc6, 0xc7, 0xc8, 0xc9, 0xca, 0xd2, 0xd3, 0xd4, 0xd5, 0xd6, 0xd7, 0xd8, 0xd9, 0xda, 0xe1, 0xe2,
     0xe3, 0xe4, 0xe5, 0xe6, 0xe7, 0xe8, 0xe9, 0xea, 0xf1, 0xf2, 0xf3, 0xf4, 0xf5, 0xf6, 0xf7, 0xf8, 0xf9, 0xfa},
    {0x00, 0x01, 0x02, 0x03, 0x11, 0x04, 0x05, 0x21, 0x31, 0x06, 0x12, 0x41, 0x51, 0x07, 0x61, 0x71, 0x13, 0x22,
     0x32, 0x81, 0x08, 0x14, 0x42, 0x91, 0xa1, 0xb1, 0xc1, 0x09, 0x23, 0x33, 0x52, 0xf0, 0x15, 0x62, 0x72, 0xd1,
     0x0a, 0x16, 0x24, 0x34, 0xe1, 0x25, 0xf1, 0x17, 0x18, 0x19, 0x1a, 0x26, 0x27, 0x28, 0x29, 0x2a, 0x35, 0x36,
     0x37, 0x38, 0x39, 0x3a, 0x43, 0x44, 0x45, 0x46, 0x47, 0x48, 0x49, 0x4a, 0x53, 0x54, 0x55, 0x56, 0x57, 0x58,
     0x59, 0x5a, 0x63, 0x64, 0x65, 0x66, 0x67, 0x68, 0x69, 0x6a, 0x73, 0x74, 0x75, 0x76, 0x77, 0x78, 0x79, 0x7a,
     0x82, 0x83, 0x84, 0x85, 0x86, 0x87, 0x88, 0x89, 0x8a, 0x92, 0x93, 0x94, 0x95, 0x96, 0x97, 0x98, 0x99, 0x9a,
     0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7, 0xa8, 0xa9, 0xaa, 0xb2, 0xb3, 0xb4, 0xb5, 0xb6, 0xb7, 0xb8, 0xb9, 0xba,
     0xc2, 0xc3, 0xc4, 0xc5, 0xc6, 0xc7, 0xc8, 0xc9, 0xca, 0xd2, 0xd3, 0xd4, 0xd5, 0xd6, 0xd7, 0xd8, 0xd9, 0xda,
     0xe2, 0xe3, 0xe4, 0xe5, 0xe6, 0xe7, 0xe8, 0xe9, 0xea, 0xf2, 0xf3, 0xf4, 0xf5, 0xf6, 0xf7, 0xf8, 0xf9, 0xfa},
};

typedef struct {
    uint16_t code[256];
    uint8_t length[256];
} Codes;

typedef struct {
    uint8_t *at;
    uint64_t bits;
    int count;
} Output;

enum { HEADER_BYTES = 2048, MCU_BYTES = 48 * 512 }; /* a block of 64 codes of 26 bits, every byte stuffed: 416 bytes */

static void make_codes(Codes *codes, const uint8_t *counts, const uint8_t *symbols)
{
    int code = 0;
    for (int length = 1; length <= 16; length++, code <<= 1) {
        for (int i = 0; i < counts[length - 1]; i++, symbols++) {
            codes->code[*symbols] = (uint16_t)code++;
            codes->length[*symbols] = (uint8_t)length;
        }
    }
}

static void put_bits(Output *out, unsigned value, int length)
{
    out->bits = out->bits << length | value;
    out->count += length;
    while (out->count >= 8) {
        out->count -= 8;
        uint8_t byte = (uint8_t)(out->bits >> out->count);
        *out->at++ = byte;
        if (byte == 0xFF)
            *out->at++ = 0;
    }
}

static int size_of(int value)
{
    return value ? 32 - __builtin_clz((unsigned)(value < 0 ? -value : value)) : 0;
}

static void put_value(Output *out, const Codes *codes, int symbol, int value, int size)
{
    put_bits(out, codes->code[symbol], codes->length[symbol]);
    if (size)
        put_bits(out, (unsigned)(value < 0 ? value - 1 : value) & ((1u << size) - 1), size);
}

static Status put_block(Output *out, const Codes *dc, const Codes *ac, const int16_t *block, int *prediction)
{
    int difference = block[0] - *prediction, size = size_of(difference), run = 0;
    *prediction = block[0];
    if (size > 11)
        return JPEG_RANGE;
    put_value(out, dc, size, difference, size);
    for (int i = 1; i < 64; i++) {
        int value = block[ZIGZAG_TO_STREAM[i]];
        if (!value) {
            run++;
            continue;
        }
        for (; run > 15; run -= 16)
            put_value(out, ac, 0xF0, 0, 0);
        size = size_of(value);
        if (size > 10)
            return JPEG_RANGE;
        put_value(out, ac, run << 4 | size, value, size);
        run = 0;
    }
    if (run)
        put_value(out, ac, 0, 0, 0);
    return OK;
}

static uint8_t *put_bytes(uint8_t *at, const void *bytes, size_t length)
{
    memcpy(at, bytes, length);
    return at + length;
}

static uint8_t *put_header(uint8_t *at, const Coefficients *image)
{
    int num = image->num_components;
    at = put_bytes(at, "\xFF\xD8\xFF\xE0\0\x10JFIF\0\1\1\0\0\1\0\1\0\0", 20);
    for (int i = 0; i < num; i++) {
        const uint16_t *quantizers = image->components[i].quantizers;
        int wide = 0;
        for (int k = 0; k < 64; k++)
            wide |= quantizers[k] > 255;
        const uint8_t start[5] = {0xFF, 0xDB, 0, (uint8_t)(3 + 64 * (wide + 1)), (uint8_t)(wide << 4 | i)};
        at = put_bytes(at, start, 5);
        for (int k = 0; k < 64; k++) {
            if (wide)
                *at++ = (uint8_t)(quantizers[ZIGZAG[k]] >> 8);
            *at++ = (uint8_t)quantizers[ZIGZAG[k]];
        }
    }
    const uint8_t frame[10] = {0xFF,
                               0xC0,
                               0,
                               (uint8_t)(8 + 3 * num),
                               8,
                               (uint8_t)(image->height >> 8),
                               (uint8_t)image->height,
                               (uint8_t)(image->width >> 8),
                               (uint8_t)image->width,
                               (uint8_t)num};
    at = put_bytes(at, frame, 10);
    for (int i = 0; i < num; i++) {
        const Component *part = &image->components[i];
        const uint8_t entry[3] = {(uint8_t)(i + 1), (uint8_t)(part->h << 4 | part->v), (uint8_t)i};
        at = put_bytes(at, entry, 3);
    }
    for (int table = 0; table < (num == 1 ? 1 : 2); table++) {
        const uint8_t dc[5] = {0xFF, 0xC4, 0, 19 + 12, (uint8_t)table}, ac[5] = {0xFF, 0xC4, 0, 19 + 162, (uint8_t)(16 | table)};
        at = put_bytes(at, dc, 5);
        at = put_bytes(at, DC_COUNTS[table], 16);
        at = put_bytes(at, DC_SYMBOLS, 12);
        at = put_bytes(at, ac, 5);
        at = put_bytes(at, AC_COUNTS[table], 16);
        at = put_bytes(at, AC_SYMBOLS[table], 162);
    }
    const uint8_t scan[5] = {0xFF, 0xDA, 0, (uint8_t)(6 + 2 * num), (uint8_t)num};
    at = put_bytes(at, scan, 5);
    for (int i = 0; i < num; i++) {
        *at++ = (uint8_t)(i + 1);
        *at++ = i ? 0x11 : 0;
    }
    return put_bytes(at, "\0\x3F\0", 3);
}

size_t jpeg_bound(const Coefficients *image)
{
    size_t blocks = 0;
    for (int i = 0; i < image->num_components; i++)
        blocks += (size_t)image->components[i].pitch * (size_t)image->components[i].rows;
    return HEADER_BYTES + blocks * 448 + MCU_BYTES;
}

Status jpeg_write(const Coefficients *image, uint8_t *out, size_t capacity, size_t *length)
{
    Codes dc[2] = {{{0}, {0}}}, ac[2] = {{{0}, {0}}};
    for (int table = 0; table < 2; table++) {
        make_codes(&dc[table], DC_COUNTS[table], DC_SYMBOLS);
        make_codes(&ac[table], AC_COUNTS[table], AC_SYMBOLS[table]);
    }
    if (capacity < jpeg_bound(image))
        return NO_MEMORY;
    Output output = {.at = put_header(out, image)};
    int predictions[MAX_COMPONENTS] = {0};
    const Component *luma = &image->components[0];
    for (int y = 0; y < luma->rows / luma->v; y++) {
        for (int x = 0; x < luma->pitch / luma->h; x++) {
            for (int i = 0; i < image->num_components; i++) {
                const Component *part = &image->components[i];
                for (int block = 0; block < part->h * part->v; block++) {
                    int column = x * part->h + block % part->h, row = y * part->v + block / part->h;
                    /* outside of the image the previous DC is repeated, which takes the fewest bits */
                    int16_t padding[64] = {(int16_t)predictions[i]};
                    const int16_t *coefficients = padding;
                    if (column < part->blocks_w && row < part->blocks_h)
                        coefficients = part->coefficients + ((size_t)row * (size_t)part->pitch + (size_t)column) * 64;
                    Status status = put_block(&output, &dc[i > 0], &ac[i > 0], coefficients, &predictions[i]);
                    if (status)
                        return status;
                }
            }
        }
    }
    if (output.count)
        put_bits(&output, (1u << (8 - output.count)) - 1, 8 - output.count);
    output.at = put_bytes(output.at, "\xFF\xD9", 2);
    *length = (size_t)(output.at - out);
    return OK;
}
