/* Coefficients of a whole image: their order and memory. */
#include <stdlib.h>

#include "codec.h"

const uint8_t ZIGZAG[64] = {
    0, 1, 8, 16, 9, 2, 3, 10, 17, 24, 32, 25, 18, 11, 4, 5, 12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13,
    6, 7, 14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31,
    39, 46, 53, 60, 61, 54, 47, 55, 62, 63,
};

const uint8_t ZIGZAG_TO_STREAM[64 + 16] = {
    0, 2, 4, 8, 6, 1, 3, 5, 10, 12, 24, 14, 9, 7, 16, 18, 20, 11, 13, 26, 28, 40, 30, 25, 15, 32,
    22, 17, 19, 21, 34, 36, 27, 29, 42, 44, 46, 41, 31, 48, 38, 33, 23, 35, 37, 50, 52, 43, 45, 47, 56, 54,
    49, 39, 51, 53, 58, 60, 62, 57, 55, 59, 61, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63,
    63, 63,
};

/* The coefficients of a block are in eight tiles of 2 rows x 4 columns, low frequencies first. Within a tile they are
 * row by row, with columns in the order 0 2 1 3, in which the inverse transform pairs them. */
const uint8_t STREAM_TO_NATURAL[64] = {
    0,  2,  1,  3,  8,  10, 9,  11, 16, 18, 17, 19, 24, 26, 25, 27, 4,  6,  5,  7,  12, 14,
    13, 15, 32, 34, 33, 35, 40, 42, 41, 43, 20, 22, 21, 23, 28, 30, 29, 31, 48, 50, 49, 51,
    56, 58, 57, 59, 36, 38, 37, 39, 44, 46, 45, 47, 52, 54, 53, 55, 60, 62, 61, 63,
};

Status coefficients_allocate(Coefficients *image)
{
    size_t blocks = 0;
    int mcus_w = (image->width + 8 * image->h_max - 1) / (8 * image->h_max);
    int mcus_h = (image->height + 8 * image->v_max - 1) / (8 * image->v_max);
    for (int i = 0; i < image->num_components; i++) {
        Component *part = &image->components[i];
        part->blocks_w = ((image->width * part->h + image->h_max - 1) / image->h_max + 7) / 8;
        part->blocks_h = ((image->height * part->v + image->v_max - 1) / image->v_max + 7) / 8;
        part->pitch = mcus_w * part->h;
        part->rows = mcus_h * part->v;
        blocks += (size_t)part->pitch * (size_t)part->rows;
    }
    if (blocks > MAX_BLOCKS)
        return JPEG_TOO_LARGE;
    size_t bytes = blocks * 64 * sizeof(int16_t);
    if (image->capacity < bytes) {
        free(image->buffer);
        image->buffer = malloc(bytes);
        image->capacity = image->buffer ? bytes : 0;
        if (!image->buffer)
            return NO_MEMORY;
    }
    memset(image->buffer, 0, bytes);
    int16_t *next = image->buffer;
    for (int i = 0; i < image->num_components; i++) {
        Component *part = &image->components[i];
        part->coefficients = next;
        next += (size_t)part->pitch * (size_t)part->rows * 64;
    }
    return OK;
}

void coefficients_free(Coefficients *image)
{
    free(image->buffer);
    image->buffer = NULL;
    image->capacity = 0;
}
