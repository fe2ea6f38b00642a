/* Reads bits and Huffman codes of a JPEG: the inner loop of jpeg_read.c. */
#ifndef PACELINE_HUFFMAN_H
#define PACELINE_HUFFMAN_H

#include "codec.h"

/* ---- bits ---- */

typedef struct {
    const uint8_t *at, *end;
    uint64_t bits; /* the next bits, the first one in the highest bit */
    int count;     /* how many of them are valid */
    int invented;  /* zero bits supplied after the end or a marker */
} Bits;

/* Ensures at least 32 bits: a code of up to 16 and its value of up to 15. */
ALWAYS_INLINE void refill(Bits *bits)
{
    if (bits->count > 32)
        return;
    if (LIKELY(bits->end - bits->at >= 8)) {
        uint64_t word;
        memcpy(&word, bits->at, 8);
        if (LIKELY(!((~word - 0x0101010101010101u) & word & 0x8080808080808080u))) { /* no 0xFF among them */
            bits->bits |= __builtin_bswap64(word) >> bits->count;
            int whole = (63 - bits->count) >> 3;
            bits->at += whole;
            bits->count += whole * 8;
            return;
        }
    }
    while (bits->count <= 56) {
        uint64_t byte = 0;
        if (bits->at < bits->end && *bits->at != 0xFF) {
            byte = *bits->at++;
        } else if (bits->end - bits->at >= 2 && bits->at[1] == 0) { /* 0xFF itself is written as 0xFF 0x00 */
            byte = 0xFF;
            bits->at += 2;
        } else {
            bits->invented += 8;
        }
        bits->bits |= byte << (56 - bits->count);
        bits->count += 8;
    }
}

ALWAYS_INLINE void drop(Bits *bits, int count)
{
    bits->bits <<= count;
    bits->count -= count;
}

/* Reads a signed value of `size` bits; in JPEG, values below half of the range are negative. */
ALWAYS_INLINE int take_value(Bits *bits, int size)
{
    if (!size)
        return 0;
    int value = (int)(bits->bits >> (64 - size));
    drop(bits, size);
    return value >> (size - 1) ? value : value - (1 << size) + 1;
}

/* ---- Huffman tables ---- */

enum { LOOKUP_BITS = 10, LOOKUPS = 1 << LOOKUP_BITS };

typedef struct {
    int defined;
    uint16_t symbol[LOOKUPS]; /* length << 8 | symbol, for codes of up to LOOKUP_BITS; else 0 */
    int32_t whole[LOOKUPS];   /* value << 16 | run << 8 | length, where code and value fit into the lookup; else 0 */
    int32_t limit[18];        /* codes of a length are below this, aligned to 16 bits */
    int32_t offset[17];       /* from a code to its index in `values` */
    uint8_t values[256];
} Huffman;

static Status huffman_build(Huffman *table, const uint8_t *counts, const uint8_t *values, int num_values, int is_ac)
{
    memset(table, 0, sizeof *table);
    memcpy(table->values, values, (size_t)num_values);
    int code = 0, place = 0;
    for (int length = 1; length <= 16; length++) {
        table->offset[length] = place - code;
        for (int i = 0; i < counts[length - 1]; i++, code++, place++) {
            if (code >= 1 << length)
                return JPEG_HUFFMAN;
            if (length > LOOKUP_BITS)
                continue;
            int spare = LOOKUP_BITS - length;
            for (int rest = 0; rest < 1 << spare; rest++)
                table->symbol[(code << spare) + rest] = (uint16_t)(length << 8 | values[place]);
        }
        table->limit[length] = code << (16 - length);
        code <<= 1;
    }
    table->limit[17] = INT32_MAX;
    for (int i = 0; is_ac && i < LOOKUPS; i++) {
        int length = table->symbol[i] >> 8, size = table->symbol[i] & 15, run = table->symbol[i] >> 4 & 15;
        if (!length || !size || length + size > LOOKUP_BITS)
            continue;
        Bits bits = {.bits = (uint64_t)i << (64 - LOOKUP_BITS) << length};
        table->whole[i] = (int32_t)((uint32_t)take_value(&bits, size) << 16 | (uint32_t)(run << 8 | (length + size)));
    }
    table->defined = 1;
    return OK;
}

/* Returns the next symbol, or -1. */
ALWAYS_INLINE int take_symbol(Bits *bits, const Huffman *table)
{
    int entry = table->symbol[bits->bits >> (64 - LOOKUP_BITS)];
    if (LIKELY(entry)) {
        drop(bits, entry >> 8);
        return entry & 255;
    }
    int code = (int)(bits->bits >> 48), length = LOOKUP_BITS + 1;
    while (length <= 16 && code >= table->limit[length])
        length++;
    if (length > 16)
        return -1;
    drop(bits, length);
    return table->values[((code >> (16 - length)) + table->offset[length]) & 255];
}

#endif
